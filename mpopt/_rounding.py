"""Rounding float32 to the values of a narrower format, in a way that XLA keeps."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    below_half = (1 << (dropped - 1)) - 1
    kept_bits = 0xFFFFFFFF << dropped & 0xFFFFFFFF
    smallest_normal = float(info.smallest_normal)

    # lax, not jnp: an optimizer has hundreds of leaves, and jnp takes five times as long to trace.
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = lax.bitwise_and(bits, np.uint32(0x7FFFFFFF))
    sign = lax.bitwise_xor(bits, magnitude)
    last_kept_bit = lax.bitwise_and(
        lax.shift_right_logical(magnitude, np.uint32(dropped)), np.uint32(1)
    )
    rounded = lax.add(lax.add(magnitude, np.uint32(below_half)), last_kept_bit)
    rounded = lax.bitwise_and(rounded, np.uint32(kept_bits))
    rounded = lax.min(rounded, _bits_of(info.max))
    result = lax.bitcast_convert_type(lax.bitwise_or(sign, rounded), jnp.float32)

    if smallest_normal > float(jnp.finfo(jnp.float32).smallest_normal):
        # Below the smallest normal the format is a grid of fixed step.
        step = np.float32(info.smallest_subnormal)
        steps = lax.round(lax.div(x, step), lax.RoundingMethod.TO_NEAREST_EVEN)
        on_grid = lax.mul(steps, step)
        subnormal = lax.lt(magnitude, _bits_of(smallest_normal))
        result = lax.select(subnormal, on_grid, result)
    return lax.select(lax.gt(magnitude, _bits_of(np.inf)), x, result)


@round_to.defjvp
def _round_to_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return round_to(primals[0], dtype), tangents[0]


def _bits_of(value: Any) -> np.uint32:
    return np.float32(value).view(np.uint32)
