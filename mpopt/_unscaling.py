"""The arithmetic of a step's gradients: divide out the scale, decide whether all are finite."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpopt import _tree
from mpopt._masters import upcast

PyTree = Any

# More save few kernels and take longer to compile.
_LEAVES_PER_REDUCTION = 8


def divide(grads: PyTree, scale: jax.Array) -> PyTree:
    """Divides by the scale, exactly where it is a power of two.

    XLA turns a division by a broadcast scalar into a product with its reciprocal, which is
    subnormal, and so flushed to zero, from 2^127 on. So float32 divides by two factors of about
    the square root each.
    """
    exponent = (lax.bitcast_convert_type(scale, jnp.int32) >> 23) - 127
    root = _power_of_two(exponent >> 1)
    # Behind a barrier, so that XLA computes them once instead of in the kernel of every leaf.
    inverse_root, rest = lax.optimization_barrier((_power_of_two(-(exponent >> 1)), root / scale))

    def unscaled(g: Any) -> Any:
        if not _tree.is_inexact(g):
            return g
        g = jnp.asarray(upcast(g))
        if jnp.iscomplexobj(g):
            return lax.complex(unscaled(g.real), unscaled(g.imag))
        if g.dtype != jnp.float32:
            return g / align_leading(scale.astype(g.dtype), g)
        return lax.mul(lax.mul(g, align_leading(inverse_root, g)), align_leading(rest, g))

    return jax.tree.map(unscaled, grads)


def align_leading(scalars: jax.Array, leaf: jax.Array) -> jax.Array:
    """Lines up a scalar of each member of an ensemble with the leading axes of its leaves."""
    if scalars.ndim == 0:
        return scalars
    shape = scalars.shape + (1,) * (leaf.ndim - scalars.ndim)
    return jnp.broadcast_to(scalars.reshape(shape), leaf.shape)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def finite_leaves(grads: PyTree, axis_name: str | Sequence[str] | None) -> jax.Array:
    """Tells for each leaf whether all its elements are finite, on all devices of `axis_name`."""
    leaves = jax.tree.leaves(grads)
    flags: list[Any] = [None] * len(leaves)
    for indices in _groups(leaves):
        for index, flag in zip(indices, _all_finite([leaves[i] for i in indices]), strict=True):
            flags[index] = flag
    finite = jnp.stack(flags) if flags else jnp.zeros(0, jnp.bool_)
    if axis_name is None:
        return finite
    axis_names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    # A collective takes no mixture of axes over which a value varies and axes over which it does
    # not. Zero times the device's index makes it vary over all.
    varying = sum((0 * lax.axis_index(name) for name in axis_names), finite.astype(jnp.int32))
    return lax.pmin(varying, axis_names) > 0


def _groups(leaves: Sequence[Any]) -> list[list[int]]:
    """Groups the indices of leaves that one reduction can go over.

    Those of one shape on one device. Leaves on a mesh stay alone: there a reduction over several
    moves them to one sharding, and gathers its flags one by one instead of in one all-reduce.
    """
    groups: dict[Any, list[list[int]]] = {}
    for index, leaf in enumerate(leaves):
        on_mesh = not jax.typeof(leaf).sharding.mesh.empty
        chunks = groups.setdefault((leaf.shape, index if on_mesh else None), [[]])
        if len(chunks[-1]) == _LEAVES_PER_REDUCTION:
            chunks.append([])
        chunks[-1].append(index)
    return [chunk for chunks in groups.values() for chunk in chunks]


def _all_finite(leaves: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Tells for each of some leaves of one shape whether all its elements are finite.

    One reduction over several operands is one or two GPU kernels; one for each leaf is as many for
    each.
    """
    return lax.reduce(
        tuple(_is_finite(leaf) for leaf in leaves),
        (np.bool_(True),) * len(leaves),
        lambda a, b: tuple(lax.bitwise_and(x, y) for x, y in zip(a, b, strict=True)),
        tuple(range(leaves[0].ndim)),
    )


def _is_finite(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return lax.bitwise_and(lax.is_finite(x.real), lax.is_finite(x.imag))
    return lax.is_finite(x)
