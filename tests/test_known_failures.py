"""Reported failures of loss scales and skipped steps elsewhere. See known_failures.md."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import mpopt

INF = float("inf")
NAN = float("nan")


def grads_like(params, *values):
    return [jax.tree.map(lambda p, v=v: jnp.full_like(p, v), params) for v in values]


def run(tx, params, grads, opt_state=None):
    """Steps through scaled gradients; returns params, state and the scale after each step."""
    step = jax.jit(tx.update)
    opt_state = tx.init(params) if opt_state is None else opt_state
    scales = []
    for g in grads:
        updates, opt_state = step(g, opt_state, params)
        params = optax.apply_updates(params, updates)
        scales.append(float(mpopt.loss_scale(opt_state)))
    return params, opt_state, scales


def half(*values):
    return {"w": jnp.array(values, jnp.float16)}


def unscaled(inner, **kwargs):
    """An optimizer whose scale is 1, so that the gradients of a test are plain numbers."""
    return mpopt.mixed_precision(inner, loss_scale=mpopt.static_loss_scale(1.0), **kwargs)


def assert_same_bits(tree, other):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# The scale ------------------------------------------------------------------------------------


def test_scale_is_capped_and_comes_down_after_one_inf():
    # google/flax#2547, pytorch/pytorch#98828: doubled until inf, and inf halved is inf.
    rule = mpopt.dynamic_loss_scale(growth_factor=10.0, growth_interval=1)
    params = half(1.0)
    tx = mpopt.mixed_precision(optax.sgd(0.1), loss_scale=rule)
    _, opt_state, scales = run(tx, params, grads_like(params, *[0.0] * 70))
    assert scales[-1] == 2.0**24
    _, _, scales = run(tx, params, grads_like(params, INF, INF), opt_state)
    assert scales == [2.0**23, 2.0**22]


@pytest.mark.parametrize(
    "initial",
    [
        1024,
        np.float16(1024),
        np.int32(1024),
        np.float64(1024),
        np.array(1024),
        jnp.float16(1024),
        jnp.int32(1024),
        jnp.bfloat16(1024),
    ],
    ids=lambda x: f"{type(x).__name__}-{getattr(x, 'dtype', '')}",
)
def test_any_scalar_becomes_a_strong_float32_scale(initial):
    # google-deepmind/jmp#47, #39: a float16 scale breaks adjust, an integer one warns.
    rule = mpopt.dynamic_loss_scale(initial)
    state = jax.jit(rule.adjust)(rule.init(), jnp.array(False))
    for scale in (rule.init().loss_scale, state.loss_scale):
        assert scale.dtype == jnp.float32 and not scale.weak_type
    assert float(state.loss_scale) == 512


def test_min_scale_survives_a_pytree_round_trip():
    # google-deepmind/jmp#44: the floor was lost by flatten and unflatten.
    params = half(1.0)
    rule = mpopt.dynamic_loss_scale(4.0, min_scale=0.25)
    tx = mpopt.mixed_precision(optax.sgd(0.1), loss_scale=rule)
    opt_state, scales = tx.init(params), []
    for g in grads_like(params, *[INF] * 6):
        opt_state = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), opt_state)
        _, opt_state, new = run(tx, params, [g], opt_state)
        scales += new
    assert scales == [2, 1, 0.5, 0.25, 0.25, 0.25]


def test_scale_may_fall_below_one():
    # google-deepmind/jmp#18, keras-team/keras#16100, tensorflow/tensorflow#38357, NVIDIA/apex#452.
    rule = mpopt.dynamic_loss_scale(1.0, min_scale=2.0**-10)
    tx = mpopt.mixed_precision(optax.sgd(2.0**-20), loss_scale=rule)
    params = half(1.0)
    opt_state, scales = tx.init(params), []
    for _ in range(8):
        # A true gradient of 2^21: finite in float16 from a scale of 2^-6 down.
        loss_scale = mpopt.loss_scale(opt_state)
        grads = {"w": jnp.full(1, 2.0**21 * loss_scale).astype(jnp.float16)}
        params, opt_state, new = run(tx, params, [grads], opt_state)
        scales += new
    assert scales == [0.5, 0.25, 0.125, 2.0**-4, 2.0**-5, 2.0**-6, 2.0**-6, 2.0**-6]
    assert params["w"][0] == 1 - 2 * 2.0


def test_scale_never_becomes_zero():
    # facebookresearch/WSL-Images#9, Junjue-Wang/FactSeg#6, intel/auto-round#207: halved until 0,
    # then a division by zero. At the default floor gradients still unscale to what they were.
    params = half(1.0)
    tx = mpopt.mixed_precision(optax.sgd(1.0))
    nan_grads = grads_like(params, NAN)[0]

    @jax.jit
    def many(opt_state):
        return lax.scan(
            lambda s, _: (tx.update(nan_grads, s, params)[1], None), opt_state, None, length=2000
        )[0]

    opt_state = many(tx.init(params))
    assert float(mpopt.loss_scale(opt_state)) == 2.0**-14
    stepped, opt_state, _ = run(tx, params, grads_like(params, 2.0**-14 * 0.25), opt_state)
    assert float(stepped["w"][0]) == 0.75


def test_dead_run_is_counted_and_named():
    # NVIDIA/apex#318, #715, #834: nothing but "overflow" for thousands of steps.
    # ymcui/Chinese-LLaMA-Alpaca#534: the opposite, a run killed at the first touch of the floor.
    params = {"embed": half(1.0), "head": half(1.0)}
    grads = {"embed": half(1.0), "head": half(NAN)}
    tx = mpopt.mixed_precision(optax.sgd(1.0), loss_scale=mpopt.dynamic_loss_scale(2.0**-13))
    stepped, opt_state, _ = run(tx, params, [grads] * 50)
    assert_same_bits(stepped, params)
    assert int(mpopt.metrics(opt_state)["consecutive_skips"]) == 50
    mpopt.raise_if_stalled(opt_state, params, 50)
    with pytest.raises(FloatingPointError, match="50 steps.*head/w"):
        mpopt.raise_if_stalled(opt_state, params, 49)


def test_which_parameter_overflowed():
    # NVIDIA/apex#192.
    params = {"a": half(1.0), "b": [half(1.0), half(1.0, 2.0)]}
    grads = {"a": half(1.0), "b": [half(INF), half(0.0, NAN)]}
    _, opt_state, _ = run(unscaled(optax.sgd(1.0)), params, [grads])
    assert mpopt.nonfinite_params(opt_state, params) == ["b/0/w", "b/1/w"]


def test_gradients_are_exact_on_steps_where_the_scale_grows():
    # mpx: the scale changed before it was used to unscale.
    # deepspeedai/DeepSpeed#2686: the reported norm was divided by the next step's scale.
    rule = mpopt.dynamic_loss_scale(4.0, growth_interval=1)
    tx = mpopt.mixed_precision(optax.sgd(0.5), loss_scale=rule)
    params = half(1.0)
    opt_state = tx.init(params)
    for i in range(4):
        grads = {"w": jnp.full(1, 0.25 * 4.0 * 2**i, jnp.float16)}
        assert float(mpopt.unscale(grads, opt_state)["w"][0]) == 0.25
        updates, opt_state = tx.update(grads, opt_state, params)
        assert float(updates["w"][0]) == -0.125
        params = optax.apply_updates(params, updates)
    assert float(mpopt.loss_scale(opt_state)) == 64


def test_every_transformation_keeps_a_scale_of_its_own():
    # NVIDIA/apex#232, #616, #922: which loss belongs to which scaler.
    tx = mpopt.mixed_precision(optax.sgd(0.1), loss_scale=mpopt.dynamic_loss_scale(8.0))
    params = half(1.0)
    states = {"generator": tx.init(params), "critic": tx.init(params)}
    _, states["critic"], _ = run(tx, params, grads_like(params, INF), states["critic"])
    assert float(mpopt.loss_scale(states["generator"])) == 8
    assert float(mpopt.loss_scale(states["critic"])) == 4
    with pytest.raises(ValueError, match="2 loss scales.*pass the part"):
        mpopt.loss_scale(states)


# Skipped steps --------------------------------------------------------------------------------


def test_schedule_stands_still_on_a_skipped_step():
    # pytorch/pytorch#44511, #55585, Lightning-AI/pytorch-lightning#18828.
    params = half(0.0)
    step = jax.jit(unscaled(optax.sgd(optax.linear_schedule(1.0, 0.0, 10))).update)
    opt_state = unscaled(optax.sgd(optax.linear_schedule(1.0, 0.0, 10))).init(params)
    moves = []
    for g in grads_like(params, 1.0, INF, 1.0):
        updates, opt_state = step(g, opt_state, params)
        moves.append(float(updates["w"][0]))
    np.testing.assert_allclose(moves, [-1.0, 0.0, -0.9], rtol=1e-3)


def test_skipped_step_decays_nothing():
    # marin-community/levanter#973: a skip by zero gradients still decays weights and moments.
    params = half(1.0, -2.0)
    tx = unscaled(optax.adamw(0.1, weight_decay=0.1))
    params, opt_state, _ = run(tx, params, grads_like(params, 1.0))
    skipped, skipped_state, _ = run(tx, params, grads_like(params, NAN), opt_state)
    assert_same_bits((skipped, skipped_state.inner_state), (params, opt_state.inner_state))
    decayed, _, _ = run(tx, params, grads_like(params, 0.0), opt_state)
    assert (decayed["w"] != params["w"]).all()


def test_skipping_never_gives_up():
    # optax.apply_if_finite lets the NaN in after max_consecutive_errors.
    params = half(1.0, -2.0)
    tx = mpopt.mixed_precision(optax.adam(0.1))
    nans = grads_like(params, NAN)[0]

    @jax.jit
    def many(params, opt_state):
        def body(carry, _):
            updates, opt_state = tx.update(nans, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), opt_state), None

        return lax.scan(body, (params, opt_state), None, length=1000)[0]

    stepped, opt_state = many(params, tx.init(params))
    assert_same_bits(stepped, params)
    assert int(mpopt.metrics(opt_state)["total_skips"]) == 1000


def test_accumulator_survives_an_overflow():
    # optax.MultiSteps, speechbrain/speechbrain#1936: one inf stays in the sum for ever.
    params = half(1.0)
    tx = unscaled(optax.MultiSteps(optax.sgd(0.5), 2))
    stepped, opt_state, _ = run(tx, params, grads_like(params, 1.0, INF, 1.0, 1.0))
    assert float(stepped["w"][0]) == 0.5
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(opt_state.inner_state))
    stepped, _, _ = run(tx, stepped, grads_like(params, 1.0), opt_state)
    assert float(stepped["w"][0]) == 0.0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_one_non_finite_element_of_the_last_leaf_is_enough(bad):
    # Azure/MS-AMP#56: only inf was looked for, a NaN went through.
    params = {"a": half(1.0, 1.0), "z": half(1.0, 1.0, 1.0)}
    grads = {"a": half(1.0, 1.0), "z": half(0.0, 0.0, bad)}
    stepped, opt_state, _ = run(unscaled(optax.sgd(1.0)), params, [grads])
    assert_same_bits(stepped, params)
    assert mpopt.nonfinite_params(opt_state, params) == ["z/w"]


def test_large_norm_of_finite_gradients_is_no_overflow():
    # facebookresearch/fairseq#2384, #4555: the norm overflows where no gradient does.
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    grads = grads_like(params, 1e30)  # squares to inf
    assert not np.isfinite(optax.tree.norm(jax.tree.map(jnp.float32, grads[0])))
    stepped, opt_state, _ = run(unscaled(optax.sign_sgd(0.5)), params, grads)
    assert bool(mpopt.grads_finite(opt_state))
    np.testing.assert_array_equal(stepped["w"], 0.5 * jnp.ones(4))


def test_a_skipped_step_is_seen_without_leaving_jit():
    # pytorch/pytorch#67590, #152279: step() does not tell whether it stepped.
    # huggingface/accelerate#1714, #4242: reading the scale to find out forces a synchronisation.
    params = half(1.0)
    tx = mpopt.mixed_precision(optax.sgd(1.0))

    @jax.jit
    def step(g, opt_state, counter):
        _, opt_state = tx.update(g, opt_state, params)
        return opt_state, counter + mpopt.grads_finite(opt_state), mpopt.metrics(opt_state)

    opt_state, counter = tx.init(params), jnp.array(0)
    finite = []
    for g in grads_like(params, 1.0, INF, 1.0):
        opt_state, counter, metrics = step(g, opt_state, counter)
        finite.append(bool(metrics["grads_finite"]))
    assert finite == [True, False, True] and int(counter) == 2


def test_statistics_of_an_overflowing_batch_are_dropped():
    # Flax ImageNet example; petuum/adaptdl#75: averages beside the optimizer became NaN.
    params = half(1.0)
    tx = unscaled(optax.sgd(1.0))
    statistics, opt_state = {"mean": jnp.zeros(2)}, tx.init(params)

    @jax.jit
    def step(g, opt_state, statistics):
        new = {"mean": 0.9 * statistics["mean"] + 0.1 * g["w"].astype(jnp.float32)}
        _, opt_state = tx.update(g, opt_state, params)
        return opt_state, mpopt.where_applied(opt_state, new, statistics)

    for g in grads_like(params, 1.0, NAN, 1.0):
        opt_state, statistics = step(g, opt_state, statistics)
    np.testing.assert_allclose(statistics["mean"], 0.19, rtol=1e-6)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs the 8 devices of conftest.py")
@pytest.mark.parametrize("agree", [True, False])
def test_devices_agree_whether_to_skip(agree):
    # pytorch/pytorch#115710, facebookresearch/fairseq2#1374: one device skips, the others step.
    mesh = jax.sharding.Mesh(jax.devices()[:8], ("data",))
    params = half(1.0)
    tx = mpopt.mixed_precision(
        optax.sgd(1.0),
        loss_scale=mpopt.dynamic_loss_scale(1.0, growth_interval=1),
        axis_name="data" if agree else None,
    )

    # Gradients stay local, as those of expert or tensor parallel params do.
    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    def step(g):
        updates, opt_state = tx.update({"w": g}, tx.init(params), params)
        stepped = optax.apply_updates(params, updates)
        return stepped["w"], mpopt.loss_scale(opt_state)[None]

    grads = jnp.zeros(8, jnp.float16).at[5].set(INF)
    _, scales = step(grads)
    assert len(set(np.asarray(scales).tolist())) == (1 if agree else 2)
    stepped, scales = step(jnp.ones(8, jnp.float16).at[5].set(INF))
    moved = np.asarray(stepped) != 1
    assert moved.sum() == (0 if agree else 7)
    assert float(scales[5]) == 0.5


# Losses and wrappers --------------------------------------------------------------------------


def test_logged_loss_is_the_true_loss_even_in_float16():
    # tensorflow/tensorflow#33484: float16 loss times float32 scale is a type error.
    # huggingface/transformers#552: is the reported loss scaled or not?
    tx = mpopt.mixed_precision(optax.sgd(1.0), loss_scale=mpopt.static_loss_scale(2.0**15))
    params = half(3.0)
    loss, grads = mpopt.value_and_grad(lambda p: jnp.sum(p["w"]))(params, opt_state=tx.init(params))
    assert loss.dtype == jnp.float32 and float(loss) == 3
    assert grads["w"].dtype == jnp.float16 and float(grads["w"][0]) == 2.0**15


def test_unscale_may_be_called_any_number_of_times():
    # microsoft/Swin-Transformer#311, Haian-Jin/LVSM#19: "unscale_() has already been called".
    # huggingface/diffusers#1246: "Attempting to unscale FP16 gradients".
    tx = mpopt.mixed_precision(optax.sgd(1.0), loss_scale=mpopt.static_loss_scale(4.0))
    params = half(1.0)
    opt_state = tx.init(params)
    grads = grads_like(params, 2.0)[0]
    norms = [float(optax.tree.norm(mpopt.unscale(grads, opt_state))) for _ in range(3)]
    assert norms == [0.5] * 3
    stepped, _, _ = run(tx, params, [grads], opt_state)
    assert float(stepped["w"][0]) == 0.5


@pytest.mark.parametrize("params", [{}, {"frozen": None}, {"index": jnp.array([1, 2])}])
def test_optimizer_without_a_gradient_takes_a_finite_step(params):
    # nerfstudio-project/nerfstudio#1883, Lightning-AI/pytorch-lightning#4524: "No inf checks were
    # recorded for this optimizer".
    tx = mpopt.mixed_precision(optax.adam(0.1))
    updates, opt_state = jax.jit(tx.update)(params, tx.init(params), params)
    assert bool(mpopt.grads_finite(opt_state))
    stepped = optax.apply_updates(params, updates)
    assert_same_bits(stepped, params)


def test_norm_of_float16_gradients_does_not_overflow_before_the_clip():
    # facebookresearch/fairscale#263, tracel-ai/burn#5699: 300 squared is inf in float16, and the
    # clipped gradient is 0.
    params = half(1.0, 2.0)
    tx = unscaled(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    updates, _ = tx.update(half(300.0, 400.0), tx.init(params), params)
    np.testing.assert_allclose(updates["w"], [-0.6, -0.8], atol=1e-3)


def test_clip_sees_unscaled_gradients():
    # allenai/allennlp#5426, TorchSSL/TorchSSL#59, allenai/allennlp#5413: scaled gradients clipped.
    params = half(1.0)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    tx = mpopt.mixed_precision(inner, loss_scale=mpopt.static_loss_scale(1024.0))
    updates, _ = tx.update(half(512.0), tx.init(params), params)
    assert float(updates["w"][0]) == -0.5  # below the limit: not clipped


def test_extra_arguments_pass_through_the_wrapper():
    # tensorflow/models#10319, keras-team/keras#17225: the loss-scale wrapper hides its inner
    # optimizer's arguments. pfnet/pytorch-pfn-extras#636: GradScaler takes no closure.
    params = half(4.0, -3.0)

    def value_fn(p):
        assert p["w"].dtype == jnp.float32  # the masters
        return jnp.sum(jnp.square(p["w"]))

    inner = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(20))
    tx = mpopt.mixed_precision(inner)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state):
        value, grads = mpopt.value_and_grad(lambda p: value_fn({"w": p["w"].astype(jnp.float32)}))(
            params, opt_state=opt_state
        )
        # Gradients scaled by 2^15 overflow float16 at first.
        updates, opt_state = tx.update(
            grads, opt_state, params, value=value, grad=grads, value_fn=value_fn
        )
        return optax.apply_updates(params, updates), opt_state

    for _ in range(12):
        params, opt_state = step(params, opt_state)
    assert 0 < int(mpopt.metrics(opt_state)["total_skips"]) < 6
    np.testing.assert_allclose(params["w"], 0, atol=0.1)


def test_state_restored_without_its_structure_is_refused_with_a_remedy():
    # google-deepmind/ferminet#105: the checkpoint gave a list where the optimizer had a tuple.
    tx = mpopt.mixed_precision(optax.sgd(1.0))
    state = tx.init(half(1.0))._asdict() | {"loss_scale_state": [1.0, 0, 1]}
    with pytest.raises(ValueError, match="no loss scale.*pass the opt_state of its init or update"):
        mpopt.loss_scale(state)
    with pytest.raises(ValueError, match="opt_state"):
        tx.update(half(1.0), state, half(1.0))


def test_every_row_of_the_table_names_tests_that_exist():
    here = Path(__file__).parent
    text = (here / "known_failures.md").read_text()
    files = dict(re.findall(r"\b([A-Z]) = `(\w+\.py)`", text))
    rows = [line.split("|")[-2] for line in text.splitlines() if re.match(r"\| (?!issue)", line)]
    cited = [cite for row in rows for cite in re.findall(r"\b([A-Z]) ((?:`\w+…?`(?:, )?)+)", row)]
    names = [(letter, n) for letter, group in cited for n in re.findall(r"`(\w+)", group)]
    assert len(rows) > 60 and len(names) > 60
    for letter, name in names:
        source = (here / files[letter]).read_text()
        assert re.search(rf"^def test_{name}", source, re.M), f"{files[letter]} has no {name}"
