"""The whole transformation: the example of the README, compilation, kinds of leaves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, bits, both_dtypes, fill, jitted_step, numpy_cast, params_tree

import mpopt

POLICY = mpopt.Policy(jnp.float16, keep_float32=r"(?i)norm|bn")


def model_params():
    rng = np.random.RandomState(0)
    return {
        "dense": {"kernel": jnp.array(rng.randn(4, 3), jnp.float32), "bias": jnp.zeros(3)},
        "norm": {"scale": jnp.ones(3)},
    }


def transformation(inner=None, policy=POLICY, **rule):
    inner = optax.adamw(1e-2) if inner is None else inner
    rule = mpopt.dynamic_loss_scale(**{"initial": 1024.0, **rule})
    return mpopt.mixed_precision(inner, loss_scale=rule, policy=policy)


def started(tx, policy=POLICY):
    wide = model_params()
    return policy.cast_to_param(wide), tx.init(wide)


@pytest.mark.parametrize("param_dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_adoption_example(param_dtype):
    policy = mpopt.Policy(param_dtype=param_dtype, keep_float32=r"(?i)norm|bn")
    tx = mpopt.mixed_precision(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.01, momentum=0.9)), policy=policy
    )
    params_f32 = model_params()
    opt_state = tx.init(params_f32)
    params = policy.cast_to_param(params_f32)
    dtypes = jax.tree.map(lambda p: p.dtype, params)

    def model_loss(p, batch):
        x, y = policy.cast_to_compute(batch)
        x = x @ p["dense"]["kernel"] + p["dense"]["bias"]
        x = policy.cast_to_output(x) * p["norm"]["scale"]
        return jnp.mean((x - y) ** 2), x

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, batch):
        def loss_fn(p):
            loss, aux = model_loss(p, batch)
            return mpopt.scale_loss(loss, opt_state), aux  # value unchanged, gradient x scale

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, loss, mpopt.metrics(opt_state)

    rng = np.random.RandomState(1)
    x = jnp.array(rng.randn(16, 4), jnp.float32)
    y = jnp.tanh(x[:, :3])
    losses = []
    for _ in range(60):
        params, opt_state, loss, logged = train_step(params, opt_state, (x, y))
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    assert jax.tree.map(lambda p: p.dtype, params) == dtypes
    assert train_step._cache_size() == 1
    assert logged.keys() == {"loss_scale", "grads_finite", "consecutive_skips", "total_skips"}
    assert bool(logged["grads_finite"])
    # A batch that overflows is skipped, and training goes on.
    before = jax.tree.map(np.asarray, params)
    skips = int(logged["total_skips"])
    params, opt_state, loss, logged = train_step(params, opt_state, (x * jnp.inf, y))
    assert int(logged["total_skips"]) == skips + 1
    assert_same_bits(jax.tree.map(np.asarray, params), before)
    params, opt_state, loss, logged = train_step(params, opt_state, (x, y))
    assert np.isfinite(float(loss))
    masters = mpopt.master_params(opt_state, params)
    assert {m.dtype.name for m in jax.tree.leaves(masters)} == {"float32"}


def test_is_the_composition_of_its_two_halves():
    rule = mpopt.dynamic_loss_scale(64.0, growth_interval=2)
    inner = optax.adam(1e-2)
    whole = mpopt.mixed_precision(inner, loss_scale=rule, policy=POLICY)
    halves = mpopt.with_loss_scale(mpopt.with_master_params(inner, policy=POLICY), rule)
    results = []
    for tx in (whole, halves):
        step = jitted_step(tx)
        params, state = started(tx)
        for g in (1.0, jnp.inf, 2.0, 3.0):
            params, state = step(params, state, fill(params, g))
        results.append((params, state))
    assert_same_bits(*results)


def test_every_wrapper_is_an_optax_transformation():
    rule = mpopt.static_loss_scale(1.0)
    for tx in (
        mpopt.mixed_precision(optax.sgd(0.1)),
        mpopt.with_master_params(optax.sgd(0.1)),
        mpopt.with_loss_scale(optax.sgd(0.1), rule),
    ):
        assert isinstance(tx, optax.GradientTransformationExtraArgs)


# Compilation


def trace_counting(tx):
    traces = []

    @jax.jit
    def step(params, state, grads):
        traces.append(None)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, traces


@pytest.mark.parametrize(
    "inner",
    [
        lambda: optax.sgd(optax.cosine_decay_schedule(0.1, 100), momentum=0.9),
        lambda: optax.MultiSteps(optax.adamw(1e-2), 2),
        lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
        lambda: optax.contrib.schedule_free_adamw(1e-2),
    ],
    ids=["sgd", "MultiSteps", "inject_hyperparams", "schedule_free"],
)
def test_one_trace_over_all_steps_with_strong_and_stable_dtypes(inner):
    tx = transformation(inner(), growth_interval=2)
    params, state = started(tx)
    step, traces = trace_counting(tx)
    kinds = jax.tree.map(lambda x: (x.dtype, x.shape), state)
    for g in (1.0, 2.0, jnp.nan, 1.0, 3.0, 4.0):
        assert not any(x.weak_type for x in jax.tree.leaves(state))
        params, state = step(params, state, fill(params, g))
        assert jax.tree.map(lambda x: (x.dtype, x.shape), state) == kinds
    assert len(traces) == 1
    assert not any(x.weak_type for x in jax.tree.leaves((params, state)))


def test_eager_update_keeps_the_kinds_of_state_too():
    tx = transformation(optax.inject_hyperparams(optax.adam)(learning_rate=1e-2))
    params, state = started(tx)
    _, new_state = tx.update(fill(params, 1.0), state, params)
    step, traces = trace_counting(tx)
    step(params, state, fill(params, 1.0))
    step(params, new_state, fill(params, 1.0))
    assert len(traces) == 1


def aliasing():
    """An optimizer whose state holds the params that it was given, twice, and a Python float."""
    return optax.GradientTransformation(
        lambda params: {"anchor": params, "again": params, "rate": 0.5},
        lambda updates, state, params=None: (updates, state | {"rate": 0.25}),
    )


WRAPPERS = {
    "both": (transformation, POLICY),
    "masters": (lambda inner: mpopt.with_master_params(inner, policy=POLICY), POLICY),
    "loss scale": (
        lambda inner: mpopt.with_loss_scale(inner, mpopt.static_loss_scale(1.0)),
        mpopt.Policy(jnp.float32),
    ),
}


@pytest.mark.parametrize(("wrap", "policy"), WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("inner", [aliasing, lambda: optax.contrib.schedule_free_adamw(1e-2)])
def test_state_shares_no_buffer_with_params_or_within_and_is_strong(inner, wrap, policy):
    wide, tx = model_params(), wrap(inner())
    for params in (wide, policy.cast_to_param(wide)):
        state = tx.init(params)
        leaves = [x for x in jax.tree.leaves((params, state)) if x.size]
        pointers = [x.unsafe_buffer_pointer() for x in leaves]
        assert len(set(pointers)) == len(pointers)
        assert not any(x.weak_type for x in leaves)
    _, state = jax.jit(tx.update)(fill(params, 1.0), state, params)
    assert not any(x.weak_type for x in jax.tree.leaves(state))


def test_donation():
    tx = transformation(growth_interval=2)
    wide = model_params()
    state = tx.init(wide)
    params = POLICY.cast_to_param(wide)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    seen = []
    for g in (1.0, jnp.inf, 1.0):
        grads = fill(params, g)
        seen.append(
            (
                mpopt.loss_scale(state),
                mpopt.grads_finite(state),
                mpopt.metrics(state),
                mpopt.master_params(state, params),
            )
        )
        old = jax.tree.leaves((params, state.loss_scale_state, state.inner_state))
        params, state = step(params, state, grads)
        assert all(x.is_deleted() for x in old if x.size)
    # What the accessors returned outlives the donated state; so do the params init saw.
    assert [float(scale) for scale, *_ in seen] == [1024.0, 1024.0, 512.0]
    assert [bool(finite) for _, finite, *_ in seen] == [True, True, False]
    assert [int(metrics["total_skips"]) for *_, metrics, _ in seen] == [0, 0, 1]
    assert_same_bits(seen[0][-1], wide)


def test_where_applied_outlives_donation():
    tx = transformation()
    params, state = started(tx)
    old = {"mean": jnp.ones(3)}
    kept = mpopt.where_applied(state, {"mean": jnp.zeros(3)}, old)
    jax.jit(lambda *trees: trees, donate_argnums=(0, 1))(state, old)
    assert kept["mean"].tolist() == [0, 0, 0]


def test_scan_and_cond():
    tx = transformation(growth_interval=3)
    params, state = started(tx)
    gradients = jnp.float32([1.0, jnp.nan, 2.0, 3.0, 4.0])

    def body(carry, g):
        params, state = carry
        updates, state = tx.update(fill(params, g), state, params)
        return (optax.apply_updates(params, updates), state), mpopt.loss_scale(state)

    (scanned, _), scales = jax.jit(lambda c: jax.lax.scan(body, c, gradients))((params, state))
    assert scales.tolist() == [1024, 512, 512, 512, 1024]
    step = jitted_step(tx)
    looped, looped_state = params, state
    for g in gradients:
        looped, looped_state = step(looped, looped_state, fill(looped, g))
    for a, b in zip(jax.tree.leaves(scanned), jax.tree.leaves(looped), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-3)

    @jax.jit
    def maybe(train, params, state):
        return jax.lax.cond(train, lambda c: body(c, 1.0)[0], lambda c: c, (params, state))

    assert_same_bits(maybe(False, params, state), (params, state))
    assert not np.array_equal(
        bits(maybe(True, params, state)[0]["dense"]["kernel"]), bits(params["dense"]["kernel"])
    )


def test_init_under_jit_and_eval_shape():
    tx = transformation()
    wide = model_params()
    state = tx.init(wide)
    assert_same_bits(jax.jit(tx.init)(wide), state)
    shapes = jax.eval_shape(tx.init, wide)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    for shape, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(state), strict=True):
        assert (shape.shape, shape.dtype, shape.weak_type) == (leaf.shape, leaf.dtype, False)
    abstract = jax.eval_shape(tx.init, jax.eval_shape(lambda: wide))
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    updated = jax.eval_shape(
        tx.update, POLICY.cast_to_param(wide), shapes, POLICY.cast_to_param(wide)
    )
    assert jax.tree.structure(updated[1]) == jax.tree.structure(state)


FIELDS = [
    ("loss_scale", 1024.0),
    ("finite_steps", 0),
    ("hysteresis_left", 1),
    ("grads_finite", True),
    ("consecutive_skips", 0),
    ("total_skips", 0),
]


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_field_names_are_unique_in_a_nested_optax_state(field, value):
    inner = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-3, 0.0, 100)),
        optax.ema(0.9),
        optax.contrib.reduce_on_plateau(),
    )
    inner = optax.MultiSteps(
        optax.partition({"w": inner, "b": optax.sgd(0.1)}, {"w": "w", "b": "b"}), 2
    )
    tx = optax.chain(optax.identity(), transformation(inner, None))
    state = tx.init(params_tree(jnp.float16))
    assert optax.tree.get(state, field).item() == value
    assert optax.tree.get(state, "nonfinite_leaves").tolist() == [False, False]
    assert optax.tree.get(state, "leaf_digests").dtype == jnp.uint32
    assert optax.tree.get(state, "master_params").keys() == {"w", "b"}
    assert optax.tree.get(state, "loss_scale_state").loss_scale == 1024.0
    changed = optax.tree.set(state, loss_scale=jnp.float32(8.0))
    assert mpopt.loss_scale(changed) == 8.0


# Kinds of leaves


def test_leaves_that_are_not_trained_are_hidden_from_the_inner_optimizer():
    seen = []

    def update(updates, state, params=None):
        seen.append((updates, params))
        return updates, state

    def init(params):
        seen.append(params)
        return jax.tree.map(jnp.zeros_like, params)

    tx = transformation(optax.GradientTransformation(init, update), None)
    params = {
        "w": jnp.ones(2, jnp.float16),
        "n": jnp.arange(3),
        "key": jax.random.key(0),
        "none": None,
        "flag": jnp.array(True),
    }
    state = tx.init(params)
    grads = {
        "w": jnp.ones(2, jnp.float16),
        "n": np.zeros(3, jax.dtypes.float0),
        "key": np.zeros((), jax.dtypes.float0),
        "none": None,
        "flag": np.zeros((), jax.dtypes.float0),
    }
    updates, state = tx.update(grads, state, params)
    for tree in (seen[0], *seen[1]):
        assert [x.dtype.name for x in jax.tree.leaves(tree)] == ["float32"]
    assert updates.keys() == params.keys()
    assert updates["none"] is None
    np.testing.assert_array_equal(updates["n"], np.zeros(3))
    assert updates["n"].dtype == jnp.int32
    assert updates["key"].dtype == jax.dtypes.float0
    without_key = {name: params[name] for name in ("w", "n", "none", "flag")}
    new = optax.apply_updates(without_key, {name: updates[name] for name in without_key})
    assert_same_bits({n: new[n] for n in ("n", "flag")}, {n: params[n] for n in ("n", "flag")})
    assert new["w"].dtype == jnp.float16


@both_dtypes
def test_float0_gradients_of_allow_int(dtype):
    tx = transformation(optax.adam(0.1), None)
    params = {"w": jnp.ones(3, dtype), "table": jnp.array([2, 0, 1])}
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        def loss_fn(p):
            return mpopt.scale_loss(jnp.sum(p["w"][p["table"]].astype(jnp.float32)), state)

        grads = jax.grad(loss_fn, allow_int=True)(params)
        assert grads["table"].dtype == jax.dtypes.float0
        updates, new_state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), new_state

    for _ in range(2):
        params, state = step(params, state)
    np.testing.assert_array_equal(params["table"], [2, 0, 1])
    assert params["table"].dtype == jnp.int32
    np.testing.assert_allclose(np.float32(params["w"]), 0.8, rtol=5e-3)
    assert step._cache_size() == 1


@pytest.mark.parametrize("grad", [None, np.zeros(3, jax.dtypes.float0), jnp.zeros(3, jnp.int32)])
def test_untrained_leaf_may_have_any_gradient(grad):
    tx = transformation(optax.adam(0.1), None)
    params = {"w": jnp.ones(2, jnp.float16), "n": jnp.arange(3)}
    grads = {"w": jnp.ones(2, jnp.float16), "n": grad}
    updates, _ = tx.update(grads, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(new["n"], np.arange(3))
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_nonfinite_integer_like_leaves_do_not_count():
    tx = transformation(optax.sgd(0.1), None)
    params = {"w": jnp.ones(2, jnp.float16), "f": jax.nn.relu, "n": jnp.arange(2)}
    grads = {"w": jnp.ones(2, jnp.float16), "f": None, "n": None}
    _, state = tx.update(grads, tx.init(params), params)
    assert mpopt.grads_finite(state)
    assert state.nonfinite_leaves.shape == (1,)


def test_inner_state_may_hold_a_prng_key():
    tx = transformation(optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)))
    params, state = started(tx)
    step, traces = trace_counting(tx)
    _, skipped = step(params, state, fill(params, jnp.nan))
    assert_same_bits(skipped.inner_state, state.inner_state)
    _, applied = step(params, skipped, fill(params, 1.0))
    keys = [jax.random.key_data(s.inner_state.inner_state[0].rng_key) for s in (state, applied)]
    assert not np.array_equal(*keys)
    assert len(traces) == 1


def test_complex_params_train_without_master():
    inner = optax.sgd(0.5)
    tx = transformation(inner, None)
    params = {"c": jnp.complex64([1 + 2j, 3j]), "w": jnp.ones(1, jnp.float16)}
    state = tx.init(params)
    step = jitted_step(tx)
    grads = {"c": jnp.complex64([1024 - 512j, 0]), "w": jnp.float16([0])}
    params, state = step(params, state, grads)
    np.testing.assert_array_equal(params["c"], np.complex64([0.5 + 2.25j, 3j]))
    for bad in (complex(0, np.inf), complex(np.nan, 0)):
        new, state = step(params, state, grads | {"c": jnp.complex64([1, bad])})
        assert_same_bits(new, params)
        assert mpopt.nonfinite_params(state, params) == ["c"]


def test_float64_params_train_in_float64():
    with jax.enable_x64(True):
        inner = optax.sgd(1e-3, momentum=0.9)
        tx = transformation(inner, None)
        params = {"d": jnp.array([0.1, 1e300]), "w": jnp.ones(2, jnp.float16)}
        assert params["d"].dtype == jnp.float64
        state = tx.init(params)
        grads = {"d": jnp.array([0.3, -1e300]), "w": jnp.ones(2, jnp.float16)}
        new, state = jax.jit(tx.update)(grads, state, params)
        expected, _ = inner.update({"d": grads["d"] / 1024}, inner.init({"d": params["d"]}))
        assert_same_bits(new["d"], expected["d"])
        assert new["d"].dtype == jnp.float64
        assert mpopt.grads_finite(state)
        assert mpopt.loss_scale(state).dtype == jnp.float32
        assert state.loss_scale_state.finite_steps.dtype == jnp.int32
        step, traces = trace_counting(tx)
        for _ in range(3):
            params, state = step(params, state, grads)
        assert len(traces) == 1


@both_dtypes
def test_x64_mode_changes_nothing_for_narrow_params(dtype):
    def train():
        tx = transformation(optax.sgd(1e-2, momentum=0.9), None)
        params = params_tree(dtype)
        state = tx.init(params)
        step = jitted_step(tx)
        for g in (1.0, jnp.nan, -2.0):
            params, state = step(params, state, fill(params, g))
        return jax.tree.map(np.asarray, (params, state.loss_scale_state, state.total_skips))

    expected = train()
    with jax.enable_x64(True):
        assert_same_bits(train(), expected)


def test_numpy_params():
    tx = transformation(optax.sgd(1.0), None)
    params = {"h": np.ones(2, np.float16), "s": np.ones(2, np.float32), "x": np.ones(2)}
    state = tx.init(params)
    assert [type(x) for x in jax.tree.leaves(state.inner_state.master_params)] == [
        type(jnp.ones(1))
    ]
    updates, _ = tx.update(jax.tree.map(lambda p: p * 512, params), state, params)
    new = optax.apply_updates(params, updates)
    assert [(x.dtype.name, float(x[0])) for x in new.values()] == [
        ("float16", 0.5),
        ("float32", 0.5),
        ("float32", 0.5),
    ]


def test_python_float_params():
    tx = transformation(optax.adam(0.5), None)
    params = {"a": 1.0, "w": jnp.ones(2, jnp.float16)}
    state = tx.init(params)
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    updates, state = tx.update({"a": 1024.0, "w": jnp.ones(2, jnp.float16)}, state, params)
    new = optax.apply_updates(params, updates)
    np.testing.assert_allclose(new["a"], 0.5, rtol=1e-5)
    updates, new_state = tx.update({"a": float("inf"), "w": new["w"]}, state, new)
    assert float(updates["a"]) == 0.0
    assert_same_bits(new_state.inner_state, state.inner_state)


def test_mixed_16_bit_params_have_their_own_rounding():
    tx = transformation(optax.sgd(1.0), None)
    params = {"h": jnp.ones(1, jnp.float16), "b": jnp.ones(1, jnp.bfloat16)}
    params, state = jitted_step(tx)(params, tx.init(params), fill(params, 1024 * 0.00390625))
    masters = mpopt.master_params(state, params)
    for name, dtype in (("h", jnp.float16), ("b", jnp.bfloat16)):
        assert params[name].dtype == dtype
        assert masters[name] == 1 - 0.00390625
        np.testing.assert_array_equal(np.asarray(params[name]), numpy_cast(masters[name], dtype))


def test_gradients_of_another_float_dtype_are_accepted():
    # A float32 gradient of a float16 param: from a hand-written loss or accumulated outside.
    tx = transformation(optax.sgd(1.0), None)
    params = {"w": jnp.ones(1, jnp.float16)}
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        new, _ = jitted_step(tx)(params, tx.init(params), {"w": jnp.array([512.0], dtype)})
        assert_same_bits(new, {"w": jnp.float16([0.5])})


def test_scalar_params_and_params_that_are_one_array():
    tx = transformation(optax.sgd(1.0), None)
    for params in (jnp.float16(1.0), jnp.ones((2, 2), jnp.float16)):
        new, _ = jitted_step(tx)(params, tx.init(params), jnp.full_like(params, 512))
        np.testing.assert_array_equal(new, np.full(params.shape, 0.5, np.float16))


def test_leaf_without_elements():
    tx = transformation(optax.adam(1.0), None)
    params = {"w": jnp.ones(1, jnp.float16), "empty": jnp.zeros((0, 3), jnp.float16)}
    new, state = jitted_step(tx)(params, tx.init(params), fill(params, 1.0))
    assert new["empty"].shape == (0, 3)
    assert mpopt.grads_finite(state)


# Composition


def test_clip_inside_clips_true_gradients():
    tx = transformation(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), None)
    params = {"w": jnp.zeros(2, jnp.float16)}
    new, _ = jitted_step(tx)(params, tx.init(params), {"w": jnp.float16([3.0, 4.0]) * 1024})
    np.testing.assert_allclose(np.float32(new["w"]), [-0.6, -0.8], rtol=1e-3)


@both_dtypes
def test_masked_and_partition_inside(dtype):
    params = {"a": jnp.ones(2, dtype), "b": jnp.ones(2, dtype)}
    partition = optax.partition(
        {"fast": optax.sgd(1.0), "frozen": optax.set_to_zero()}, {"a": "fast", "b": "frozen"}
    )
    masked = optax.masked(optax.set_to_zero(), {"a": False, "b": True})
    for inner in (partition, optax.chain(optax.sgd(1.0), masked)):
        tx = transformation(inner, None)
        step = jitted_step(tx)
        new, state = step(params, tx.init(params), fill(params, 512.0))
        assert_same_bits(new, {"a": jnp.full(2, 0.5, dtype), "b": params["b"]})
        new, _ = step(new, state, fill(params, jnp.inf))
        assert_same_bits(new, {"a": jnp.full(2, 0.5, dtype), "b": params["b"]})


def test_mixed_precision_inside_a_partition_trains_its_part():
    tx = optax.partition(
        {"half": transformation(optax.sgd(1.0), None), "rest": optax.sgd(1.0)},
        {"h": "half", "s": "rest"},
    )
    params = {"h": jnp.ones(2, jnp.float16), "s": jnp.ones(2)}
    step, state = jitted_step(tx), tx.init(params)
    new, state = step(params, state, {"h": jnp.full(2, 512, jnp.float16), "s": jnp.full(2, 0.25)})
    assert_same_bits(new, {"h": jnp.full(2, 0.5, jnp.float16), "s": jnp.full(2, 0.75)})
    assert mpopt.loss_scale(state) == 1024


def test_vmapped_ensemble_decides_for_each_member():
    tx = transformation(optax.adam(0.1), None)
    params = jax.vmap(lambda i: {"w": jnp.full(3, i, jnp.float16)})(jnp.arange(4.0))
    states = jax.vmap(tx.init)(params)
    grads = fill(params, 1.0)
    grads["w"] = grads["w"].at[2, 1].set(jnp.nan)

    @jax.jit
    @jax.vmap
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    new, states = step(params, states, grads)
    assert mpopt.grads_finite(states).tolist() == [True, True, False, True]
    assert mpopt.loss_scale(states).tolist() == [1024, 1024, 512, 1024]
    assert_same_bits(new["w"][2], params["w"][2])
    assert np.all(np.asarray(new["w"])[[0, 1, 3]] != np.asarray(params["w"])[[0, 1, 3]])
