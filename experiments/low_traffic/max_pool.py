"""A 3x3 max-pool of stride 2 that remembers where each maximum was, in one byte."""

import jax
import jax.numpy as jnp
from jax import lax

from experiments.resnet import at_least_float32

_WINDOW, _STRIDE = 3, 2
_OFFSETS = [(row, column) for row in range(_WINDOW) for column in range(_WINDOW)]


def max_pool(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes `nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")`.

    Args:
        x: `[batch, height, width, channels]`.

    Returns:
        The maxima, and the number of the first of them within each window, int8.
    """
    rows, columns = (_same_padding(size) for size in x.shape[1:3])
    lowest = jnp.array(-jnp.inf, x.dtype)
    padded = lax.pad(x, lowest, [(0, 0, 0), (*rows, 0), (*columns, 0), (0, 0, 0)])
    height, width = (-(-size // _STRIDE) for size in x.shape[1:3])
    best = jnp.full((x.shape[0], height, width, x.shape[3]), lowest)
    index = jnp.zeros(best.shape, jnp.int8)
    for number, (row, column) in enumerate(_OFFSETS):
        taken = padded[:, row::_STRIDE, column::_STRIDE][:, :height, :width]
        # NaN wins, as in XLA's own maximum.
        is_larger = (taken > best) | (jnp.isnan(taken) & ~jnp.isnan(best))
        best = jnp.where(is_larger, taken, best)
        index = jnp.where(is_larger, jnp.int8(number), index)
    return best, index


def max_pool_grad(grad: jax.Array, index: jax.Array, sizes: tuple[int, int]) -> jax.Array:
    """Returns the gradient of `max_pool`: that of a maximum goes to where it was.

    Args:
        grad: of the maxima.
        index: from `max_pool`.
        sizes: height and width of its input.

    Returns:
        The gradient of the input, `[batch, *sizes, channels]`.
    """
    # Windows overlap: up to four gradients meet in one place.
    wide = grad.astype(at_least_float32(grad.dtype))
    total = jnp.zeros((), wide.dtype)
    for number, offset in enumerate(_OFFSETS):
        total += _spread(jnp.where(index == number, wide, 0), offset, sizes)
    return total.astype(grad.dtype)


def _spread(x: jax.Array, offset: tuple[int, int], sizes: tuple[int, int]) -> jax.Array:
    """Puts each value of an output where `offset` of its window is in the input."""
    padding = [(0, 0, 0)]
    for first, size, num_windows in zip(offset, sizes, x.shape[1:3], strict=True):
        low = first - _same_padding(size)[0]
        covered = (num_windows - 1) * _STRIDE + 1
        padding.append((low, size - covered - low, _STRIDE - 1))
    return lax.pad(x, jnp.zeros((), x.dtype), [*padding, (0, 0, 0)])


def _same_padding(size: int) -> tuple[int, int]:
    total = max((-(-size // _STRIDE) - 1) * _STRIDE + _WINDOW - size, 0)
    return total // 2, total - total // 2
