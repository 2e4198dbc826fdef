"""Where arrays live in a run on all devices of all processes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import mpopt
from experiments.config import TrainConfig
from experiments.errors import UsageError
from experiments.parallel.collect import on_host
from experiments.parallel.group import Group
from experiments.parallel.placement import ONE_DEVICE, Placement

AXIS = "data"
"""Name of the mesh's only axis."""


class MeshPlacement(Placement):
    """Batches split over all devices, params on all of them.

    Args:
        config: the run.
        group: the processes.

    Raises:
        UsageError: where a batch cannot be split evenly.
    """

    def __init__(self, config: TrainConfig, group: Group) -> None:
        """Makes the mesh, the devices of a process side by side."""
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        self.num_devices = len(devices)
        if config.batch_size % self.num_devices:
            below = config.batch_size // self.num_devices * self.num_devices
            near = [str(size) for size in (below, below + self.num_devices) if size]
            raise UsageError(
                f"--batch-size must be a multiple of the {self.num_devices} devices, such as "
                f"{' or '.join(near)}, got {config.batch_size}."
            )
        self._mesh = Mesh(np.array(devices), (AXIS,))
        self._everywhere = NamedSharding(self._mesh, PartitionSpec())
        self._shards_optimizer = config.shard_optimizer
        self.batch_sharding = NamedSharding(self._mesh, PartitionSpec(AXIS))
        mebibytes = group.gather(super().memory_bytes() >> 20)
        self._memory_bytes = min(mebibytes) << 20
        # The first collective of these devices waits 30 s for late ones, later ones far longer.
        # Here all come at the same time, after preparing data or compiling they do not.
        jax.jit(jnp.sum)(self.split(np.zeros(self.num_devices, np.int32))).block_until_ready()

    def memory_bytes(self) -> int:
        """See :meth:`Placement.memory_bytes`."""
        return self._memory_bytes

    def everywhere(self, tree: Any) -> Any:
        """See :meth:`Placement.everywhere`."""
        return jax.tree.map(lambda leaf: _put(leaf, self._everywhere), tree)

    def split(self, array: np.ndarray) -> Any:
        """See :meth:`Placement.split`."""
        return _put(array, self.batch_sharding)

    def own_part(self, batch_size: int) -> slice:
        """See :meth:`Placement.own_part`."""
        assert self.batch_sharding is not None
        parts = self.batch_sharding.addressable_devices_indices_map((batch_size,)).values()
        bounds = [part[0].indices(batch_size) for part in parts if part is not None]
        return slice(min(start for start, _, _ in bounds), max(stop for _, stop, _ in bounds))

    def join_parts(self, tree: Any, batch_size: int) -> Any:
        """See :meth:`Placement.join_parts`."""
        return jax.tree.map(
            lambda part: jax.make_array_from_process_local_data(
                self.batch_sharding, part, (batch_size, *part.shape[1:])
            ),
            tree,
        )

    def spec(self, shape: tuple[int, ...], dtype: Any, *, is_split: bool) -> jax.ShapeDtypeStruct:
        """See :meth:`Placement.spec`."""
        sharding = self.batch_sharding if is_split else self._everywhere
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def state_shardings(self, state: Any) -> Any:
        """See :meth:`Placement.state_shardings`."""
        shardings = jax.tree.map(lambda _: self._everywhere, state)
        if not self._shards_optimizer:
            return shardings
        opt_state = mpopt.opt_state_sharding(state.opt_state, self._mesh, AXIS)
        return shardings._replace(opt_state=opt_state)

    def template(self, tree: Any) -> Any:
        """See :meth:`Placement.template`."""
        local = SingleDeviceSharding(jax.local_devices()[0])
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=local), tree
        )

    def place_like(self, tree: Any, like: Any) -> Any:
        """See :meth:`Placement.place_like`."""
        return jax.tree.map(lambda leaf, other: _put(leaf, other.sharding), tree, like)

    def on_one_device(self, tree: Any) -> Any:
        """See :meth:`Placement.on_one_device`."""
        return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(on_host(leaf))), tree)


def make_placement(config: TrainConfig, group: Group) -> Placement:
    """Decides where a run's arrays live; all processes have to call this.

    Args:
        config: the run.
        group: the processes.

    Returns:
        One device, or all of them with `--data-parallel`.

    Raises:
        UsageError: where a batch cannot be split evenly.
    """
    return MeshPlacement(config, group) if config.data_parallel else ONE_DEVICE


def _put(leaf: Any, sharding: Any) -> jax.Array:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _put(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    array = np.asarray(leaf)
    # A copy for each device: the steps donate what they get.
    return jax.make_array_from_callback(array.shape, sharding, lambda part: np.array(array[part]))
