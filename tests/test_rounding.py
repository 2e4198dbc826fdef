"""Rounding to 16-bit values in float32, against NumPy's astype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import NUMPY_DTYPE, bits, both_dtypes, numpy_cast, random_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

import mpopt
from mpopt._rounding import round_to

jitted = jax.jit(round_to, static_argnums=1)


def assert_rounds_like_numpy(x, dtype, round_to=jitted):
    """Equal to the bit, the sign of zero included; NaN for NaN."""
    result = np.asarray(round_to(jnp.asarray(x), dtype))
    expected = numpy_cast(x, dtype).astype(np.float32)
    nan = np.isnan(x)
    assert result.dtype == np.float32
    assert np.all(np.isnan(result[nan]))
    np.testing.assert_array_equal(bits(result[~nan]), bits(expected[~nan]))


def all_values(dtype):
    """Every finite value of a 16-bit dtype, in order, as float32."""
    values = np.arange(2**16, dtype=np.uint16).view(NUMPY_DTYPE[jnp.dtype(dtype).name])
    with np.errstate(invalid="ignore"):  # NaN
        values = values.astype(np.float32)
    return np.unique(values[np.isfinite(values)])


@both_dtypes
@pytest.mark.parametrize("round_to", [round_to, jitted], ids=["eager", "jit"])
def test_random_bits(dtype, round_to):
    assert_rounds_like_numpy(random_bits(0, 300_000), dtype, round_to)


@both_dtypes
def test_every_tie_and_its_neighbours(dtype):
    values = all_values(dtype).astype(np.float64)
    ties = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    around = [ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))]
    if dtype == jnp.bfloat16:  # XLA flushes float32 subnormals only in arithmetic; bits stay
        assert np.any(np.abs(ties[ties != 0]) < np.finfo(np.float32).smallest_normal)
    for x in around:
        assert_rounds_like_numpy(x, dtype)


@both_dtypes
def test_values_of_the_format_stay(dtype):
    values = all_values(dtype)
    np.testing.assert_array_equal(bits(jitted(jnp.asarray(values), dtype)), bits(values))


@both_dtypes
def test_saturates_at_the_largest_finite_value(dtype):
    largest = float(jnp.finfo(dtype).max)
    step = float(all_values(dtype)[-1] - all_values(dtype)[-2])
    below_half = np.float32(largest + 0.49 * step)
    half = np.float32(largest + 0.5 * step)
    x = np.array([below_half, half, np.finfo(np.float32).max, np.inf], np.float32)
    for sign in (1, -1):
        result = jitted(jnp.asarray(sign * x), dtype)
        np.testing.assert_array_equal(result, np.full(4, sign * largest, np.float32))


@both_dtypes
def test_nan_zero_and_scalars(dtype):
    x = np.array([np.nan, -np.nan, 0.0, -0.0], np.float32)
    assert_rounds_like_numpy(x, dtype)
    assert jitted(jnp.float32(0.1), dtype).shape == ()
    assert jitted(jnp.zeros((0, 3)), dtype).shape == (0, 3)


def test_float16_subnormals():
    step = 2.0**-24
    x = np.float32([0.5, 0.50001, 1.5, 2.5, 1023.5, 1022.5, -0.5, -1.5, 0.49]) * np.float32(step)
    expected = np.float32([0.0, 1, 2, 2, 1024, 1022, -0.0, -2, 0]) * np.float32(step)
    np.testing.assert_array_equal(bits(jitted(jnp.asarray(x), jnp.float16)), bits(expected))


@both_dtypes
@settings(deadline=None, max_examples=50)
@given(x=st_numpy.arrays(np.float32, 8, elements=st.floats(width=32)))
def test_any_value(dtype, x):
    assert_rounds_like_numpy(x, dtype)


@both_dtypes
def test_compiler_keeps_the_rounding(dtype):
    # XLA may delete a pair of casts float32 -> float16 -> float32, but not this.
    x = random_bits(1, 1000)
    x = x[np.isfinite(x) & (np.abs(x) > 1e-3) & (np.abs(x) < 1e4)]
    lost = jax.jit(lambda x: x - round_to(x, dtype))(jnp.asarray(x))
    np.testing.assert_array_equal(lost, x - numpy_cast(x, dtype).astype(np.float32))
    assert np.count_nonzero(lost) > len(x) / 2


@both_dtypes
def test_vmap_rounds_the_same(dtype):
    x = random_bits(2, (6, 5))
    mapped = jax.jit(jax.vmap(lambda row: round_to(row, dtype), in_axes=1, out_axes=1))
    assert_rounds_like_numpy(x, dtype, lambda x, _: mapped(x))


@both_dtypes
def test_derivative_is_that_of_the_identity(dtype):
    x = jnp.array([0.1, 1e-9, -3.3, 1e6, 0.0])
    weights = jnp.arange(1.0, 6.0)
    grad = jax.jit(jax.grad(lambda x: jnp.vdot(weights, round_to(x, dtype))))(x)
    np.testing.assert_array_equal(grad, weights)
    value, tangent = jax.jvp(lambda x: round_to(x, dtype), (x,), (weights,))
    assert_rounds_like_numpy(np.asarray(x), dtype, lambda *_: value)
    np.testing.assert_array_equal(tangent, weights)
    # d(round(x)^2)/dx = 2 round(x), and its derivative is 2.
    square = jax.grad(lambda x: round_to(x, dtype) ** 2)
    np.testing.assert_array_equal(
        jax.vmap(square)(x), 2 * numpy_cast(np.asarray(x), dtype).astype(np.float32)
    )
    np.testing.assert_array_equal(jax.vmap(jax.grad(square))(x), np.full(5, 2.0))


@both_dtypes
def test_cast_to_param_rounds_the_same(dtype):
    x = random_bits(3, 100_000)
    x = x[~np.isnan(x)]
    cast = jax.jit(mpopt.Policy(dtype).cast_to_param)(jnp.asarray(x))
    assert cast.dtype == dtype
    expected = numpy_cast(x, dtype)
    # The final cast from float32 flushes bfloat16 subnormals on XLA:CPU.
    kept = np.abs(expected.astype(np.float32)) >= np.finfo(np.float32).smallest_normal
    kept |= expected == 0
    np.testing.assert_array_equal(bits(cast)[kept], bits(expected)[kept])
