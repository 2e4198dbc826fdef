"""Loss-scale rules, against the peers' sequences (PEERS.md) and a model in plain Python."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, fill, jitted_step, params_tree
from hypothesis import given, settings
from hypothesis import strategies as st

import mpopt

PATTERN = "GGGGBBGBGGGGBGGB"  # G: a finite step, B: a non-finite one


def scales_after(rule, pattern, state=None):
    """The scale after each step of `pattern`."""
    adjust = jax.jit(rule.adjust)
    state = rule.init() if state is None else state
    scales = []
    for step in pattern:
        state = adjust(state, jnp.array(step == "G"))
        scales.append(float(state.loss_scale))
    return scales


def state_at(scale, finite_steps=0, hysteresis_left=1):
    return mpopt.LossScaleState(
        jnp.float32(scale), jnp.int32(finite_steps), jnp.int32(hysteresis_left)
    )


@pytest.mark.parametrize(
    ("rule_settings", "pattern", "expected"),
    [
        pytest.param(
            dict(initial=16.0, growth_interval=3),
            PATTERN,
            [16, 16, 32, 32, 16, 8, 8, 4, 4, 4, 8, 8, 4, 4, 4, 2],
            id="torch GradScaler, apex amp, Keras",
        ),
        pytest.param(
            dict(initial=16.0, growth_interval=3, hysteresis=2, min_scale=1.0),
            PATTERN,
            [16, 16, 32, 32, 32, 16, 16, 8, 8, 8, 16, 16, 16, 16, 16, 8],
            id="Megatron: hysteresis refilled on growth",
        ),
        pytest.param(
            dict(initial=16.0, growth_interval=3, hysteresis=2, hysteresis_reset="finite"),
            PATTERN,
            [16, 16, 32, 32, 32, 16, 16, 16, 16, 16, 32, 32, 32, 32, 32, 32],
            id="apex fused kernel: hysteresis refilled on every finite step",
        ),
        pytest.param(
            dict(initial=4.0, growth_factor=2.0, backoff_factor=0.25, growth_interval=2),
            "GGB",
            [4, 8, 2],
            id="torch kernel",
        ),
        pytest.param(
            dict(initial=3.21, growth_factor=1.23, backoff_factor=0.876, growth_interval=1),
            "GBGGBG",
            [3.9483, 3.458711, 4.254214, 5.232684, 4.583831, 5.638112],
            id="apex distributed Adam",
        ),
        pytest.param(
            dict(initial=4.0, min_scale=0.25), "BBBBBB", [2, 1, 0.5, 0.25, 0.25, 0.25], id="floor"
        ),
        pytest.param(
            dict(initial=4.0, max_scale=10.0, growth_interval=1), "GGG", [8, 10, 10], id="cap"
        ),
    ],
)
def test_scales_follow_the_peers(rule_settings, pattern, expected):
    scales = scales_after(mpopt.dynamic_loss_scale(**rule_settings), pattern)
    np.testing.assert_allclose(scales, expected, rtol=2e-7)
    if all(float(x).is_integer() or x in (0.25, 0.5) for x in expected):
        assert scales == expected


@pytest.mark.parametrize("hysteresis", [1, 2, 3, 5])
@pytest.mark.parametrize("hysteresis_reset", ["growth", "finite"])
def test_backoff_starts_when_hysteresis_is_used_up(hysteresis, hysteresis_reset):
    rule = mpopt.dynamic_loss_scale(
        1024.0, hysteresis=hysteresis, hysteresis_reset=hysteresis_reset
    )
    scales = scales_after(rule, "B" * (hysteresis + 3))
    assert scales == [1024.0] * (hysteresis - 1) + [512.0, 256.0, 128.0, 64.0]


def test_defaults():
    rule = mpopt.dynamic_loss_scale()
    state = rule.init()
    assert_same_bits(state, state_at(2.0**15))
    assert scales_after(rule, "G" * 2000) == [2.0**15] * 1999 + [2.0**16]
    assert scales_after(rule, "B", state_at(2.0**-14)) == [2.0**-14]
    assert scales_after(rule, "G", state_at(2.0**24, finite_steps=1999)) == [2.0**24]
    default = mpopt.mixed_precision(optax.sgd(0.1)).init(jnp.zeros(2))
    assert_same_bits(default.loss_scale_state, state)


def test_growth_fires_on_the_nth_finite_step_in_a_row():
    rule = mpopt.dynamic_loss_scale(8.0, growth_interval=4)
    assert scales_after(rule, "GGGBGGGGGGGG") == [8, 8, 8, 4, 4, 4, 4, 8, 8, 8, 8, 16]


@pytest.mark.parametrize(
    ("scale", "step", "expected"),
    [(2.0**20, "G", 64), (2.0**20, "B", 64), (0.5, "G", 4), (0.5, "B", 4)],
)
@pytest.mark.parametrize("hysteresis_left", [1, 3])
def test_resume_with_other_bounds_is_clamped_at_the_next_step(
    scale, step, expected, hysteresis_left
):
    rule = mpopt.dynamic_loss_scale(8.0, min_scale=4.0, max_scale=64.0, hysteresis=3)
    state = state_at(scale, hysteresis_left=hysteresis_left)
    assert scales_after(rule, step, state) == [expected]


def test_resume_with_a_shorter_interval_grows_at_the_next_finite_step():
    rule = mpopt.dynamic_loss_scale(growth_interval=10)
    assert scales_after(rule, "GG", state_at(8.0, finite_steps=100)) == [16.0, 16.0]


def test_resume_with_another_static_scale_is_in_force_from_the_second_step():
    assert scales_after(mpopt.static_loss_scale(8.0), "GB", state_at(64.0)) == [8.0, 8.0]


def test_counters_saturate():
    rule = mpopt.dynamic_loss_scale(growth_interval=2**31 - 1)
    state = rule.adjust(state_at(8.0, finite_steps=2**31 - 1, hysteresis_left=0), jnp.array(True))
    assert (float(state.loss_scale), int(state.finite_steps)) == (16.0, 0)
    state = rule.adjust(state_at(8.0, hysteresis_left=0), jnp.array(False))
    assert (float(state.loss_scale), int(state.hysteresis_left)) == (4.0, 0)
    static = mpopt.static_loss_scale(8.0)
    state = static.adjust(state_at(8.0, finite_steps=2**31 - 1), jnp.array(True))
    assert int(state.finite_steps) == 2**31 - 1


def test_static_scale_stays():
    assert scales_after(mpopt.static_loss_scale(128), "GBBGGB") == [128.0] * 6


@settings(deadline=None, max_examples=25)
@given(
    pattern=st.text("GB", min_size=1, max_size=20),
    initial=st.sampled_from([1.0, 3.3, 2.0**10, 1e5]),
    growth_factor=st.sampled_from([1.0, 1.37, 2.0, 1e30]),
    backoff_factor=st.sampled_from([1e-30, 0.5, 0.77, 1.0]),
    growth_interval=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    hysteresis_reset=st.sampled_from(["growth", "finite"]),
    width=st.sampled_from([1.0, 5.0, 2.0**100]),
)
def test_rule_equals_its_definition(pattern, initial, hysteresis_reset, width, **rest):
    initial = float(np.float32(initial))
    low, high = np.float32(initial / width), np.float32(initial * width)
    rule = mpopt.dynamic_loss_scale(
        initial, min_scale=low, max_scale=high, hysteresis_reset=hysteresis_reset, **rest
    )
    growth, backoff = np.float32(rest["growth_factor"]), np.float32(rest["backoff_factor"])
    scale, count, left = np.float32(initial), 0, rest["hysteresis"]
    expected = []
    with np.errstate(over="ignore"):
        for step in pattern:
            if step == "G":
                count += 1
                grows = count >= rest["growth_interval"]
                if grows:
                    scale, count = scale * growth, 0
                if grows or hysteresis_reset == "finite":
                    left = rest["hysteresis"]
            else:
                count, left = 0, left - 1
                if left <= 0:
                    scale = scale * backoff
            scale = min(max(scale, low), high)
            expected.append(float(scale))
    assert scales_after(rule, pattern) == expected


@pytest.mark.parametrize(
    "scalar",
    [
        1024,
        1024.0,
        np.float16(1024),
        np.float32(1024),
        np.float64(1024),
        np.int32(1024),
        np.array(1024),
        ml_dtypes.bfloat16(1024),
        jnp.array(1024, jnp.float16),
        jnp.array(1024, jnp.bfloat16),
        jnp.float32(1024),
        jnp.array(1024),
    ],
    ids=lambda x: f"{type(x).__name__}-{getattr(x, 'dtype', '')}",
)
def test_any_scalar_becomes_a_strong_float32(scalar):
    for rule in (
        mpopt.static_loss_scale(scalar),
        mpopt.dynamic_loss_scale(scalar, max_scale=scalar),
        mpopt.dynamic_loss_scale(1024, min_scale=scalar, growth_interval=np.int64(3)),
    ):
        state = rule.init()
        for _ in range(2):
            kinds = [(x.dtype.name, x.weak_type, x.shape) for x in state]
            assert kinds == [("float32", False, ()), ("int32", False, ()), ("int32", False, ())]
            assert float(state.loss_scale) == 1024.0
            state = jax.jit(rule.adjust)(state, jnp.array(True))


REAL_SETTINGS = ["initial", "growth_factor", "backoff_factor", "min_scale", "max_scale"]
BAD_REALS = [0, 0.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e39, 1e-39, 10**400]


@pytest.mark.parametrize("value", BAD_REALS)
@pytest.mark.parametrize("name", [*REAL_SETTINGS, "scale"])
def test_setting_that_is_no_positive_float32_is_refused(name, value):
    make = mpopt.static_loss_scale if name == "scale" else mpopt.dynamic_loss_scale
    with pytest.raises(
        ValueError, match=rf"^{name} must be.*positive.*got {re.escape(str(value))}\.$"
    ):
        make(**{name: value})


@pytest.mark.parametrize("value", [None, "high", [1.0, 2.0], np.ones(2)])
def test_setting_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="^initial must be a positive number, got"):
        mpopt.dynamic_loss_scale(value)
    with pytest.raises(ValueError, match="^scale must be a positive number, got"):
        mpopt.static_loss_scale(value)


@pytest.mark.parametrize("name", ["growth_interval", "hysteresis"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "must lie between 1 and 2147483647"),
        (-1, "must lie between 1 and 2147483647"),
        (2**31, "must lie between 1 and 2147483647"),
        (True, "must lie between 1 and 2147483647"),
        (2.5, "must be a positive integer, got 2.5"),
        (100.0, "must be a positive integer, got 100.0"),
        (None, "must be a positive integer, got None"),
    ],
)
def test_interval_that_is_no_positive_int32_is_refused(name, value, message):
    with pytest.raises(ValueError, match=f"^{name} {message}"):
        mpopt.dynamic_loss_scale(**{name: value})


@pytest.mark.parametrize(
    ("rule_settings", "message"),
    [
        (dict(growth_factor=0.99), "growth_factor must be at least 1, got 0.99"),
        (dict(backoff_factor=1.01), "backoff_factor must be at most 1, got 1.01"),
        (dict(initial=2.0**25), r"initial=33554432.0 must lie between min_scale=.* and max_scale="),
        (dict(initial=1.0, min_scale=2.0), "initial=1.0 must lie between min_scale=2.0"),
        (dict(initial=4.0, min_scale=8.0, max_scale=2.0), "initial=4.0 must lie between"),
        (dict(hysteresis_reset="never"), "must be 'growth' or 'finite', got 'never'"),
    ],
)
def test_contradicting_settings_are_refused(rule_settings, message):
    with pytest.raises(ValueError, match=message):
        mpopt.dynamic_loss_scale(**rule_settings)


def constant_rule(scale):
    state = mpopt.LossScaleState(scale, 0, 1)
    return mpopt.LossScale(lambda: state, lambda state, grads_finite: state)


def test_rule_of_python_numbers_trains_in_one_trace():
    def adjust(state, grads_finite):
        return mpopt.LossScaleState(jnp.where(grads_finite, 2.0, 1) * 512, 7, 1.0)

    rule = mpopt.LossScale(lambda: mpopt.LossScaleState(65536, 0, 1), adjust)
    tx = mpopt.mixed_precision(optax.sgd(0.5), loss_scale=rule)
    params = params_tree(jnp.float16)
    state = tx.init(params)
    kinds = jax.tree.map(lambda x: (x.dtype, x.weak_type), state)
    step = jitted_step(tx)
    for gradient, expected in [(65504.0, 1024.0), (1.0, 1024.0), (jnp.nan, 512.0)]:
        params, state = step(params, state, fill(params, gradient))
        assert float(mpopt.loss_scale(state)) == expected
        assert jax.tree.map(lambda x: (x.dtype, x.weak_type), state) == kinds
    assert step._cache_size() == 1
    assert int(state.loss_scale_state.finite_steps) == 7


@pytest.mark.parametrize("scale", [float("inf"), 0.0, float("nan"), -1.0])
def test_scale_that_is_not_finite_and_positive_skips_the_step(scale):
    tx = mpopt.mixed_precision(optax.adam(0.5), loss_scale=constant_rule(scale))
    params = params_tree(jnp.float16)
    state = tx.init(params)
    new_params, new_state = jitted_step(tx)(params, state, fill(params, 0.0))
    assert not mpopt.grads_finite(new_state)
    assert int(mpopt.metrics(new_state)["consecutive_skips"]) == 1
    assert_same_bits(new_params, params)
    assert_same_bits(new_state.inner_state, state.inner_state)
    # Nor does a tree without gradients make it a good one.
    assert not mpopt.grads_finite(tx.update({}, tx.init({}), {})[1])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1024.0, r"must return LossScaleState\(loss_scale, finite_steps, hysteresis_left\)"),
        (None, "must return LossScaleState"),
        ((1024.0, 0), "must return LossScaleState"),
        (("high", 0, 1), "must return LossScaleState"),
        ((jnp.ones(3), 0, 1), r"must return scalars, got shapes.*\(3,\)"),
    ],
)
def test_rule_that_returns_something_else_is_refused(returned, message):
    tx = mpopt.with_loss_scale(optax.sgd(0.1), mpopt.LossScale(lambda: returned, None))
    with pytest.raises(ValueError, match=message):
        tx.init(jnp.ones(2))
    rule = mpopt.LossScale(mpopt.static_loss_scale(1.0).init, lambda *_: returned)
    tx = mpopt.with_loss_scale(optax.sgd(0.1), rule)
    with pytest.raises(ValueError, match=message):
        jax.jit(tx.update)(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


def test_bounds_are_compared_as_float32():
    rule = mpopt.dynamic_loss_scale(3.3, max_scale=np.float32(3.3))  # 3.3 > float(float32(3.3))
    assert float(rule.init().loss_scale) == float(np.float32(3.3))


def test_a_string_is_no_scale():
    with pytest.raises(ValueError, match="scale must be a positive number, got '3'"):
        mpopt.static_loss_scale("3")
