"""ZeRO-1: which part of the optimizer's state each device holds."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def optimizer_shardings(opt_state: Any, mesh: Mesh, axis: str) -> Any:
    """Splits masters and moments over a mesh axis, each along its largest divisible dimension.

    Args:
        opt_state: the optimizer's state, or its shapes.
        mesh: the devices.
        axis: name of the axis to split over.

    Returns:
        A tree of shardings like `opt_state`. Scalars, vectors and what no dimension of can be
        divided are on every device.
    """
    parts = mesh.shape[axis]

    def sharding(leaf: Any) -> NamedSharding:
        divisible = [size if size % parts == 0 else 0 for size in leaf.shape]
        if len(divisible) < 2 or not max(divisible):
            return NamedSharding(mesh, PartitionSpec())
        dimension = divisible.index(max(divisible))
        return NamedSharding(mesh, PartitionSpec(*[None] * dimension, axis))

    return jax.tree.map(sharding, opt_state)
