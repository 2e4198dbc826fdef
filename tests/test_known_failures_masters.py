"""Reported failures of half-precision params and states elsewhere. See known_failures.md."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import mpopt

BF16 = jnp.bfloat16


def run(tx, params, grads, steps=1, opt_state=None):
    opt_state = tx.init(params) if opt_state is None else opt_state
    step = jax.jit(tx.update)
    for _ in range(steps):
        updates, opt_state = step(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert step._cache_size() == 1
    return params, opt_state


def masters(opt_state, params):
    return mpopt.master_params(opt_state, params)


def guarded(inner, policy=None):
    return mpopt.mixed_precision(inner, loss_scale=mpopt.static_loss_scale(1.0), policy=policy)


def scanned(tx, params, grads, steps):
    def body(carry, _):
        updates, opt_state = tx.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), opt_state), None

    return jax.jit(lambda c: lax.scan(body, c, None, length=steps)[0])((params, tx.init(params)))


# Optimizer arithmetic in half precision -------------------------------------------------------


def test_second_moment_in_bfloat16_does_not_stall():
    # google-deepmind/optax#1552, FluxML/Optimisers.jl#215: b2 = 0.999 is 1.0 in bfloat16.
    inner = optax.adam(1e-3)
    half, wide = jnp.ones(3, BF16), jnp.ones(3, jnp.float32)
    _, state = scanned(mpopt.with_master_params(inner), half, half, 2000)
    _, expected = scanned(inner, wide, wide, 2000)
    np.testing.assert_array_equal(state.inner_state[0].nu, expected[0].nu)
    np.testing.assert_allclose(expected[0].nu, 1 - 0.999**2000, rtol=1e-3)
    _, stalled = scanned(inner, half, half, 2000)
    assert float(stalled[0].nu[0]) < 0.6


def test_injected_hyperparams_are_float32():
    # google-deepmind/optax#1414: they take the dtype of bfloat16 params.
    tx = guarded(optax.inject_hyperparams(optax.adamw)(1e-3))
    params = jnp.ones(3, BF16)
    _, opt_state = run(tx, params, params)
    hyperparams = opt_state.inner_state.inner_state.hyperparams
    assert {x.dtype for x in hyperparams.values()} == {jnp.dtype(jnp.float32)}
    assert hyperparams["b2"] == np.float32(0.999)


def test_small_updates_add_up():
    # google-deepmind/optax#1444: 1e-3 is below half an ulp of 1.0 in bfloat16.
    params = jnp.ones(3, BF16)
    params, opt_state = run(guarded(optax.sgd(1e-3)), params, -params, steps=100)
    np.testing.assert_allclose(masters(opt_state, params), 1.1, rtol=1e-5)
    np.testing.assert_array_equal(params, masters(opt_state, params).astype(BF16))
    assert (params > 1.09).all()


@pytest.mark.parametrize("dtype", [jnp.float16, BF16])
def test_weight_decay_below_an_ulp_decays(dtype):
    # Nerogar/OneTrainer#996: learning rate times decay rounds away, so nothing decays.
    params = jnp.full(3, 1.0, dtype)
    zeros = jnp.zeros(3, dtype)
    params, opt_state = scanned(guarded(optax.adamw(1e-2, weight_decay=1e-2)), params, zeros, 1000)
    np.testing.assert_allclose(masters(opt_state, params), (1 - 1e-4) ** 1000, rtol=1e-4)
    np.testing.assert_allclose(np.float32(params), (1 - 1e-4) ** 1000, rtol=4e-3)


ZERO_GRADIENT_OPTIMIZERS = {
    # google-deepmind/optax#1754
    "adam": optax.adam,
    "amsgrad": optax.amsgrad,
    "adabelief": optax.adabelief,
    "yogi": optax.yogi,
    "radam": optax.radam,
    # google-deepmind/optax#1768
    "adamax": optax.adamax,
    # google-deepmind/optax#1784
    "rmsprop": optax.rmsprop,
    "rmsprop centered": lambda lr: optax.rmsprop(lr, centered=True),
    # google-deepmind/optax#1789
    "adadelta": optax.adadelta,
    "adan": optax.adan,
    "novograd": optax.novograd,
}


@pytest.mark.parametrize("name", ZERO_GRADIENT_OPTIMIZERS)
def test_zero_gradients_in_float16_move_nothing(name):
    # eps = 1e-8 is 0 in float16, and 0 / 0 is NaN. Also chainer/chainer#6299,
    # FluxML/Optimisers.jl#167, CambioML/pykoi#69.
    params = jnp.array([1.0, -2.0, 0.5], jnp.float16)
    tx = guarded(ZERO_GRADIENT_OPTIMIZERS[name](0.1))
    stepped, opt_state = run(tx, params, jnp.zeros(3, jnp.float16), steps=2)
    np.testing.assert_array_equal(stepped, params)
    assert bool(mpopt.grads_finite(opt_state))


@pytest.mark.parametrize(
    "inner",
    [
        pytest.param(lambda: optax.contrib.schedule_free_adamw(0.1), id="schedule_free"),
        pytest.param(lambda: optax.adafactor(0.1), id="adafactor"),
    ],
)
def test_accumulation_of_bfloat16_gradients_has_one_dtype(inner):
    # google-deepmind/optax#1038, #1039, #377: lax.cond inside MultiSteps got bfloat16 and float32.
    params = {"w": jnp.ones((4, 4), BF16), "b": jnp.ones(4, BF16)}
    tx = guarded(optax.MultiSteps(inner(), 2))
    stepped, opt_state = run(tx, params, params, steps=4)
    assert {x.dtype for x in jax.tree.leaves(stepped)} == {jnp.dtype(BF16)}
    floats = [x for x in jax.tree.leaves(opt_state.inner_state) if x.dtype.kind == "f"]
    assert {x.dtype for x in floats} == {jnp.dtype(jnp.float32)}
    assert (stepped["w"] != params["w"]).all()


@pytest.mark.parametrize("rate", [1e-2, np.array(1e-2, BF16), jnp.array(1e-2, BF16)])
def test_dtype_of_the_update_does_not_depend_on_the_kind_of_the_rate(rate):
    # google-deepmind/optax#1405: a NumPy bfloat16 rate gives float32 updates, others bfloat16.
    params = jnp.ones(3, BF16)
    tx = guarded(optax.adam(rate))
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert updates.dtype == jnp.float32
    stepped, _ = run(tx, params, params, steps=2)
    assert stepped.dtype == BF16


def test_changing_the_rate_does_not_compile_again():
    # google-deepmind/optax#577.
    tx = guarded(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    params = jnp.ones(3, jnp.float16)
    opt_state, step = tx.init(params), jax.jit(tx.update)
    for rate in (0.5, 0.25, 0.125):
        opt_state = optax.tree.set(opt_state, learning_rate=jnp.float32(rate))
        updates, opt_state = step(params, opt_state, params)
        np.testing.assert_allclose(updates, -rate, rtol=1e-3)
    assert step._cache_size() == 1


def test_line_search_on_half_precision_params_compiles_once():
    # google-deepmind/optax#1108: zoom line search retraced, and failed, in other dtypes.
    def value_fn(p):
        return jnp.sum(jnp.square(p.astype(jnp.float32) - jnp.arange(3.0)))

    tx = guarded(optax.lbfgs())
    params = jnp.ones(3, BF16)

    @jax.jit
    def step(params, opt_state):
        value, grads = mpopt.value_and_grad(value_fn)(params, opt_state=opt_state)
        updates, opt_state = tx.update(
            grads, opt_state, params, value=value, grad=grads, value_fn=value_fn
        )
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for _ in range(5):
        params, opt_state = step(params, opt_state)
    assert step._cache_size() == 1
    np.testing.assert_allclose(np.float32(params), np.arange(3.0), atol=1e-2)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("wrap", [optax.contrib.schedule_free, None])
def test_fresh_state_can_be_donated_with_its_params(wrap, dtype):
    # google-deepmind/optax#1059: the state held the params' own buffer.
    inner = optax.adam(0.1) if wrap is None else wrap(optax.sgd(0.1), 0.1)
    params_f32 = {"w": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}
    policy = mpopt.Policy(dtype)
    tx = guarded(inner, policy)
    opt_state, params = tx.init(params_f32), policy.cast_to_param(params_f32)
    grads = jax.tree.map(lambda p: p * 2, params)
    step = jax.jit(lambda p, s, g: tx.update(g, s, p), donate_argnums=(0, 1))
    updates, _ = step(params, opt_state, grads)
    assert (np.asarray(updates["w"]) != 0).all()
    np.testing.assert_array_equal(params_f32["w"], 1)  # the donor's float32 copy lives on


def test_muon_on_bfloat16_params_resumes():
    # deepspeedai/DeepSpeed#7746: float32 momentum meets bfloat16 gradients after a resume.
    # zichongli5/NorMuon#7, HomebrewML/HeavyBall#2: and without one.
    params = {"w": jnp.ones((4, 3), BF16), "b": jnp.ones(3, BF16)}
    tx = guarded(optax.contrib.muon(0.1))
    stepped, opt_state = run(tx, params, params)
    opt_state = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), opt_state)
    resumed, _ = run(tx, stepped, params, opt_state=opt_state)
    straight, _ = run(tx, params, params, steps=2)
    assert (np.asarray(resumed["w"]) == np.asarray(straight["w"])).all()


# Which weights are trained --------------------------------------------------------------------


def test_loaded_weights_survive_the_next_step():
    # deepspeedai/DeepSpeed#4141, stanford-futuredata/Megatron-LM#5 and megablocks#80:
    # stale masters overwrote them.
    params = jnp.ones(3, BF16)
    tx = guarded(optax.sgd(1e-3, momentum=0.9))
    params, opt_state = run(tx, params, params, steps=3)
    loaded = jnp.array([5.0, -7.0, 0.25], BF16)
    stepped, opt_state = run(tx, loaded, jnp.zeros(3, BF16), opt_state=opt_state)
    np.testing.assert_allclose(masters(opt_state, stepped), np.float32(loaded), rtol=2e-2)


def test_start_from_half_weights_alone():
    # deepspeedai/DeepSpeed#14, NVIDIA/apex#964: load a model without its optimizer state.
    params = jnp.array([0.1, -3.0, 7.0], jnp.float16)
    opt_state = guarded(optax.adam(0.1)).init(params)
    np.testing.assert_array_equal(masters(opt_state, params), np.float32(params))


def test_pruned_weights_stay_pruned():
    # he-y/filter-pruning-geometric-median#47, ruihangdu/PyTorch-Deep-Compression#2: weights come
    # back. From masters they do not; from momentum they do, in any precision, unless it is masked.
    mask = jnp.array([True, False, True])
    params = jnp.array([1.0, 2.0, 3.0], jnp.float16)
    tx = guarded(optax.sgd(0.1))
    params, opt_state = run(tx, params, params)
    params = params * mask
    for _ in range(3):
        updates, opt_state = tx.update(params * mask, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert params[1] == 0 and masters(opt_state, params)[1] == 0 and params[0] > 0


def test_average_of_half_weights_moves():
    # d8ahazard/sd_dreambooth_extension#1417, AndreasBergmeister/ram#6, lucidrains/ema-pytorch#36.
    params = jnp.ones(3, BF16)
    tx = guarded(optax.sgd(1e-4))
    opt_state = tx.init(params)
    average, naive = masters(opt_state, params), params
    step = jax.jit(tx.update)
    for _ in range(20):
        updates, opt_state = step(-params, opt_state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(masters(opt_state, params), average, 0.1)
        naive = optax.incremental_update(params, naive, 0.1)
    assert (naive == 1).all()
    assert ((average > 1.0005) & (average < 1.002)).all()


def test_chosen_layers_keep_float32():
    # deepspeedai/DeepSpeed#5812: rotary frequencies and norms cast against the user's will.
    # facebookresearch/fairscale#442, NVIDIA/apex#133: so were batch-norm buffers.
    params_f32 = {
        "block": {"rope": {"inv_freq": jnp.array([1.0, 1e-3])}, "w": jnp.array([1.001, 1e-3])},
        "bn": {"mean": jnp.zeros(2), "scale": jnp.ones(2)},
    }
    policy = mpopt.Policy(BF16, keep_float32=lambda path, leaf: "rope" in path or "bn" in path)
    params = policy.cast_to_param(params_f32)
    assert jax.tree.map(lambda x: x.dtype.name, params) == {
        "block": {"rope": {"inv_freq": "float32"}, "w": "bfloat16"},
        "bn": {"mean": "float32", "scale": "float32"},
    }
    tx = guarded(optax.sgd(1e-5), policy)
    opt_state = tx.init(params_f32)
    assert len(jax.tree.leaves(opt_state.inner_state.master_params)) == 1
    grads = jax.tree.map(jnp.ones_like, params)
    stepped, _ = run(tx, params, grads, opt_state=opt_state)
    np.testing.assert_allclose(
        stepped["block"]["rope"]["inv_freq"], [1 - 1e-5, 1e-3 - 1e-5], rtol=1e-6
    )


def test_module_dtype_does_not_decide_the_dtype_of_its_params():
    # google/flax#3086, #2384: dtype= casts the computation, the params stay float32.
    nn = pytest.importorskip("flax.linen")
    variables = nn.Dense(2, dtype=BF16).init(jax.random.key(0), jnp.ones((1, 2)))
    assert variables["params"]["kernel"].dtype == jnp.float32
    assert mpopt.Policy(BF16).cast_to_param(variables)["params"]["kernel"].dtype == BF16


def test_frozen_params_get_no_master_and_do_not_move():
    # deepspeedai/DeepSpeed#8029, #2615: a float32 copy of every frozen weight.
    # facebookresearch/fairseq#4661, OpenNMT/OpenNMT-py#2176: frozen ones moved, or None crashed.
    params = {"base": jnp.ones(3, BF16), "lora": jnp.ones(3, BF16)}
    tx = optax.partition(
        {"train": guarded(optax.adamw(0.1)), "freeze": optax.set_to_zero()},
        {"base": "freeze", "lora": "train"},
    )
    stepped, opt_state = run(tx, params, params)
    wide = [x for x in jax.tree.leaves(opt_state) if x.dtype == jnp.float32 and x.shape]
    assert len(wide) == 3  # master, mu and nu of "lora" alone
    np.testing.assert_array_equal(stepped["base"], params["base"])
    assert (stepped["lora"] != params["lora"]).all()
    assert mpopt.nonfinite_params(opt_state, params) == []
    assert masters(opt_state, stepped)["base"].dtype == jnp.float32


def test_frozen_params_as_none_gradients_are_refused_by_name():
    # deepspeedai/DeepSpeed#4055, #4776: frozen weights crash deep inside the optimizer.
    params = {"base": jnp.ones(3, BF16), "lora": jnp.ones(3, BF16)}
    tx = guarded(optax.adam(0.1))
    with pytest.raises(ValueError, match="'base' is None.*optax.partition"):
        tx.update({"base": None, "lora": params["lora"]}, tx.init(params), params)


def test_params_that_are_unfrozen_start_from_their_present_value():
    # deepspeedai/DeepSpeed#1767: an unfrozen part does not learn.
    params = {"base": jnp.full(3, 2.0, BF16), "head": jnp.ones(3, BF16)}
    frozen = optax.masked(optax.set_to_zero(), {"base": True, "head": False})
    tx = guarded(optax.chain(optax.sgd(1e-3), frozen))
    params, opt_state = run(tx, params, params, steps=3)
    np.testing.assert_array_equal(params["base"], 2)
    thawed = guarded(optax.sgd(1e-3))
    # The same loss scale, masters from the present params, another inner optimizer.
    opt_state = opt_state._replace(inner_state=thawed.init(params).inner_state)
    stepped, opt_state = run(thawed, params, params, steps=100, opt_state=opt_state)
    assert (stepped["base"] < 1.9).all()
