"""Rounding float32 to the values of a narrower format, in a way that XLA keeps."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 values to the nearest value of a 16-bit format, ties to even.

    The result stays float32, so that a float32 difference with it is exact. Where a cast would
    overflow to infinity it gives the largest finite value: an infinity added to a parameter
    never goes away again. NaN stays NaN. The derivative is that of the identity.

    XLA deletes a pair of casts float32 -> float16 -> float32 (`xla_allow_excess_precision`), and
    `lax.reduce_precision` flushes float16 subnormals. Arithmetic on the bits does neither, and
    it fuses with the update around it.

    Args:
        x: float32 values of any shape.
        dtype: float16 or bfloat16.

    Returns:
        float32 values of the same shape, each a value of `dtype`.
    """
    info = jnp.finfo(dtype)
    dropped = 23 - info.nmant
    below_half = jnp.uint32((1 << (dropped - 1)) - 1)
    kept_bits = jnp.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF)
    largest = _bits(jnp.float32(info.max))

    bits = _bits(x)
    magnitude = bits & jnp.uint32(0x7FFFFFFF)
    sign = bits & jnp.uint32(0x80000000)
    last_kept_bit = (magnitude >> jnp.uint32(dropped)) & jnp.uint32(1)
    rounded = (magnitude + below_half + last_kept_bit) & kept_bits
    result = _floats(sign | jnp.minimum(rounded, largest))

    if info.smallest_normal > jnp.finfo(jnp.float32).smallest_normal:
        # Below the smallest normal the format is a grid of fixed step.
        step = float(info.smallest_subnormal)
        on_grid = lax.round(x * (1.0 / step), lax.RoundingMethod.TO_NEAREST_EVEN) * step
        result = jnp.where(magnitude < _bits(jnp.float32(info.smallest_normal)), on_grid, result)
    return jnp.where(magnitude > jnp.uint32(0x7F800000), x, result)


@round_to.defjvp
def _round_to_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return round_to(primals[0], dtype), tangents[0]


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _floats(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
