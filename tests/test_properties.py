"""Random and hostile input: what holds for any settings, any gradients and any tree."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, both_dtypes, fill, jitted_step, params_tree
from hypothesis import given, settings
from hypothesis import strategies as st

import mpopt

DTYPES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16, "float32": jnp.float32}
deterministic = partial(settings, deadline=None, derandomize=True)


# The rule against ten lines of Python


def oracle(pattern, initial, growth, backoff, interval, low, high, hysteresis, reset):
    """The scales after each step; factors are powers of two, so Python's floats are exact."""
    scale, count, left, scales = initial, 0, hysteresis, []
    for finite in pattern:
        count, left = (count + 1, left) if finite else (0, left - 1)
        grows = count >= interval
        if grows or (finite and reset == "finite"):
            left = hysteresis
        if grows:
            scale, count = scale * growth, 0
        elif not finite and left <= 0:
            scale *= backoff
        scale = min(max(scale, low), high)
        scales.append(scale)
    return scales


@st.composite
def rule_settings(draw):
    low = draw(st.integers(-14, 10))
    initial = draw(st.integers(low, 20))
    high = draw(st.integers(initial, 24))
    return {
        "initial": 2.0**initial,
        "growth": 2.0 ** draw(st.integers(0, 3)),
        "backoff": 2.0 ** draw(st.integers(-3, 0)),
        "interval": draw(st.integers(1, 9)),
        "low": 2.0**low,
        "high": 2.0**high,
        "hysteresis": draw(st.integers(1, 4)),
        "reset": draw(st.sampled_from(["growth", "finite"])),
    }


@deterministic(max_examples=50)
@given(rule_settings(), st.sampled_from([0.05, 0.3, 0.5, 0.9]), st.integers(0, 2**31))
def test_rule_equals_ten_lines_of_python_on_random_overflows(rule, overflow_rate, seed):
    """50 settings × 200 patterns of 40 steps: 10,000 patterns."""
    patterns = np.random.RandomState(seed).rand(200, 40) >= overflow_rate
    loss_scale = mpopt.dynamic_loss_scale(
        rule["initial"],
        rule["growth"],
        rule["backoff"],
        rule["interval"],
        rule["low"],
        rule["high"],
        rule["hysteresis"],
        rule["reset"],
    )

    @jax.jit
    @jax.vmap
    def scales(pattern):
        def body(state, finite):
            state = loss_scale.adjust(state, finite)
            return state, state.loss_scale

        return jax.lax.scan(body, loss_scale.init(), pattern)[1]

    actual = np.asarray(scales(jnp.asarray(patterns)))
    expected = np.array([oracle(pattern, **rule) for pattern in patterns], np.float32)
    np.testing.assert_array_equal(actual, expected)
    assert np.all((actual >= rule["low"]) & (actual <= rule["high"]))


@deterministic(max_examples=40)
@given(
    factors=st.tuples(st.floats(1, 2.0**100, width=32), st.floats(2.0**-100, 1, width=32)),
    bounds=st.lists(
        st.floats(2.0**-126, 2.0**127, width=32, exclude_min=True), min_size=3, max_size=3
    ).map(sorted),
    interval=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_scale_stays_within_its_bounds_and_finite(factors, bounds, interval, seed):
    low, initial, high = bounds
    rule = mpopt.dynamic_loss_scale(initial, *factors, interval, low, high)
    adjust, state = jax.jit(rule.adjust), rule.init()
    for finite in np.random.RandomState(seed).rand(30) < 0.6:
        state = adjust(state, jnp.array(finite))
        assert np.float32(low) <= np.asarray(state.loss_scale) <= np.float32(high)


# Any step


INNER = {"adamw": optax.adamw(0.05), "momentum": optax.sgd(0.05, momentum=0.9)}


@deterministic(max_examples=20)
@given(
    dtype=st.sampled_from(["float16", "bfloat16"]),
    inner=st.sampled_from(sorted(INNER)),
    overflows=st.lists(st.sampled_from([None, None, jnp.nan, jnp.inf, -jnp.inf]), max_size=8),
    log_magnitude=st.integers(-20, 4),
    seed=st.integers(0, 2**31),
)
def test_finite_steps_equal_float32_and_the_others_change_counters_only(
    dtype, inner, overflows, log_magnitude, seed
):
    """Op by op: masters and inner state to the bit."""
    inner, policy = INNER[inner], mpopt.Policy(DTYPES[dtype])
    rule = mpopt.dynamic_loss_scale(2.0**8, growth_interval=2)
    tx = mpopt.mixed_precision(inner, loss_scale=rule, policy=policy)
    wide = params_tree()
    params, state = policy.cast_to_param(wide), tx.init(wide)
    control, control_state = wide, inner.init(wide)
    random = np.random.RandomState(seed)
    for bad in overflows:
        grads = jax.tree.map(
            lambda p: jnp.asarray(random.randn(*p.shape) * 2.0**log_magnitude, p.dtype), params
        )
        scale = np.float32(mpopt.loss_scale(state))
        unscaled = jax.tree.map(lambda g, s=scale: jnp.asarray(np.float32(g) / s), grads)
        if bad is not None:
            grads["b"] = grads["b"].at[random.randint(4)].set(bad)
        updates, new_state = tx.update(grads, state, params)
        new_params = optax.apply_updates(params, updates)
        if bad is None:
            updates, control_state = inner.update(unscaled, control_state, control)
            control = optax.apply_updates(control, updates)
            assert_same_bits(mpopt.master_params(new_state, new_params), control)
            assert_same_bits(new_state.inner_state.inner_state, control_state)
        else:
            assert_same_bits(new_params, params)
            assert_same_bits(new_state.inner_state, state.inner_state)
            assert mpopt.loss_scale(new_state) == scale / 2
        params, state = new_params, new_state
    skips = sum(bad is not None for bad in overflows)
    assert mpopt.metrics(state)["total_skips"] == skips


# Any tree


def leaf():
    shape = st.sampled_from([(), (0,), (1,), (3,), (0, 2), (2, 1)])
    floats = st.builds(
        lambda shape, dtype: jnp.ones(shape, DTYPES[dtype]), shape, st.sampled_from(sorted(DTYPES))
    )
    others = [jnp.arange(3), jnp.array(True), jax.random.PRNGKey(0), jax.random.key(0), 7]
    return st.one_of(floats, floats, st.none(), st.sampled_from(others))


trees = st.recursive(
    leaf(),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=6,
)


def floating(x):
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def bits_of(tree):
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.extended) else x)
        for x in map(jnp.asarray, jax.tree.leaves(tree))
    ]


@deterministic(max_examples=60)
@given(tree=trees, missing=st.booleans())
def test_any_tree_takes_a_step_and_skips_one(tree, missing):
    """Floats of any width move; None, integers, keys and empty containers stay."""
    tx = mpopt.mixed_precision(optax.sgd(0.25, momentum=0.9), loss_scale=mpopt.static_loss_scale(4))
    state = tx.init(tree)

    def grads_of(value):
        other = None if missing else 0
        return jax.tree.map(lambda p: jnp.full_like(p, value) if floating(p) else other, tree)

    def check(updates, expected):
        assert jax.tree.structure(updates, is_leaf=lambda x: x is None) == jax.tree.structure(
            grads_of(0), is_leaf=lambda x: x is None
        )
        rows = zip(jax.tree.leaves(tree), leaves_or_none(updates), strict=True)
        for p, u in rows:
            if floating(p):
                assert u.dtype == jnp.float32 and u.shape == p.shape
                np.testing.assert_array_equal(u, np.full(p.shape, expected))
            elif u is not None:
                assert u.dtype == jax.dtypes.float0 or not np.any(bits_of(u)[0])

    def leaves_or_none(updates):
        return jax.tree.structure(tree).flatten_up_to(updates)

    updates, new_state = tx.update(grads_of(4.0), state, tree)
    check(updates, -0.25)
    assert mpopt.grads_finite(new_state)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert [x.dtype for x in jax.tree.leaves(new_state)] == [
        x.dtype for x in jax.tree.leaves(state)
    ]

    updates, skipped = tx.update(grads_of(jnp.inf), new_state, tree)
    has_elements = any(floating(p) and p.size for p in jax.tree.leaves(tree))
    assert bool(mpopt.grads_finite(skipped)) != has_elements
    if has_elements:
        check(updates, 0.0)
        assert_same_bits(skipped.inner_state, new_state.inner_state)
        infinite = {p.size > 0 for p in jax.tree.leaves(tree) if floating(p)}
        assert bool(mpopt.nonfinite_params(skipped, tree)) == (True in infinite)


# Extremes


def one_step(inner, scale, params, grads):
    tx = mpopt.mixed_precision(inner, loss_scale=mpopt.static_loss_scale(scale))
    state = tx.init(params)
    new, state = jitted_step(tx)(params, state, grads)
    return new, state, mpopt.master_params(state, new)


@both_dtypes
@pytest.mark.parametrize("scale", [2.0**-14, 1.0, 2.0**24])
def test_extreme_gradients_at_extreme_scales_are_unscaled_exactly(scale, dtype):
    info = jnp.finfo(dtype)
    smallest = info.smallest_subnormal if dtype == jnp.float16 else info.smallest_normal * 2.0**24
    grads = jnp.array([info.max, -info.max, smallest, -smallest], dtype)
    if dtype == jnp.bfloat16 and scale < 1:  # max / 2^-14 is above float32's largest value
        grads = grads.at[:2].set(jnp.array([1.0, -1.0], dtype))
    params = jnp.zeros(4, dtype)
    _, state, masters = one_step(optax.sgd(1.0), scale, params, grads)
    assert mpopt.grads_finite(state)
    np.testing.assert_array_equal(masters, -np.asarray(grads, np.float32) / np.float32(scale))


@both_dtypes
@pytest.mark.parametrize("inner", [optax.adam(0.1), optax.rmsprop(0.1)], ids=["adam", "rmsprop"])
def test_zero_gradients_move_nothing(inner, dtype):
    params = params_tree(dtype)
    new, state, masters = one_step(inner, 2.0**15, params, fill(params, 0.0))
    assert_same_bits(new, params)
    assert_same_bits(masters, jax.tree.map(lambda p: p.astype(jnp.float32), params))
    assert mpopt.grads_finite(state)


@both_dtypes
@pytest.mark.parametrize("bad", [[np.nan], [np.inf], [-np.inf], [np.inf, -np.inf]])
def test_one_bad_element_of_the_last_leaf_skips(bad, dtype):
    # Both infinities: their sum is NaN, and their difference from zero is not.
    params = {"a": jnp.ones(5, dtype), "z": jnp.ones((3, 4), dtype)}
    grads = fill(params, 1.0)
    grads["z"] = grads["z"].at[2, -len(bad) :].set(jnp.array(bad, dtype))
    new, state, _ = one_step(optax.adam(0.1), 1.0, params, grads)
    assert_same_bits(new, params)
    assert mpopt.nonfinite_params(state, params) == ["z"]


def test_gradient_that_only_overflows_when_unscaled_skips():
    params = jnp.ones(2)
    new, state, _ = one_step(optax.sgd(1.0), 2.0**-14, params, jnp.float32([1e35, 1.0]))
    assert_same_bits(new, params)
    assert not mpopt.grads_finite(state)


def test_nan_in_aux_is_no_overflow():
    tx = mpopt.mixed_precision(optax.sgd(0.5))
    params = {"w": jnp.ones(2, jnp.float16)}
    state = tx.init(params)

    def loss_fn(params):
        return jnp.sum(params["w"].astype(jnp.float32)), {"accuracy": jnp.nan * params["w"]}

    (loss, aux), grads = mpopt.value_and_grad(loss_fn, has_aux=True)(params, opt_state=state)
    params, state = jitted_step(tx)(params, state, grads)
    assert loss == 2.0 and jnp.all(jnp.isnan(aux["accuracy"]))
    assert mpopt.grads_finite(state)
    assert params["w"].tolist() == [0.5, 0.5]


def test_a_thousand_nan_steps_keep_every_bit_and_name_the_leaf():
    tx = mpopt.mixed_precision(optax.adamw(0.1, weight_decay=0.1))
    params = {"encoder": {"kernel": jnp.ones(3, jnp.float16)}, "head": jnp.ones(2, jnp.float16)}
    state = tx.init(params)
    params_before, state_before = params, state
    grads = fill(params, 1.0)
    grads["encoder"]["kernel"] = grads["encoder"]["kernel"].at[1].set(jnp.nan)
    step = jitted_step(tx)
    for count in range(1, 1001):
        params, state = step(params, state, grads)
        if count == 20:
            mpopt.raise_if_stalled(state, params, 20)
    assert_same_bits(params, params_before)
    assert_same_bits(state.inner_state, state_before.inner_state)
    assert mpopt.loss_scale(state) == 2.0**-14
    with pytest.raises(FloatingPointError, match="1000 steps .* scale 6.1.*: encoder/kernel$"):
        mpopt.raise_if_stalled(state, params, 999)
