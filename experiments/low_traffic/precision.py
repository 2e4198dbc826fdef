"""Where the low-traffic gradients leave half precision, and how they keep within its range."""

import jax
import jax.numpy as jnp
from jax import lax


def power_of_two_above(*values: jax.Array) -> jax.Array:
    """Returns a unit to measure small values in, so that a narrow dtype holds them.

    Dividing by it rounds nothing. It is never above 1: what is large stays as it is, so that an
    overflow of the narrow dtype stays one.

    Args:
        *values: scalars of at least 0.

    Returns:
        A power of two above all values and at most 1, float32; 1 where a value is not finite, and
        where all are zero or too small for float32 to divide by.
    """
    largest = jnp.max(jnp.stack([value.astype(jnp.float32) for value in values]))
    # With the mantissa cleared, the bits are those of the power of two below.
    exponent_bits = lax.bitcast_convert_type(largest, jnp.int32) & jnp.int32(0x7F800000)
    unit = 2 * lax.bitcast_convert_type(exponent_bits, jnp.float32)
    return jnp.where((unit >= 2.0**-100) & (unit < 1), unit, 1.0)
