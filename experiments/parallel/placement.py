"""Where arrays live: the interface, and a run on one device."""

import os
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding


class Placement:
    """Everything on the device that JAX chooses.

    Attributes:
        num_devices: devices that a batch is split over.
        batch_sharding: how a batch is split inside a step, or None.
    """

    num_devices: int = 1
    batch_sharding: NamedSharding | None = None

    def memory_bytes(self) -> int:
        """Returns the memory of the smallest device or host, whichever is less."""
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        stats = jax.local_devices()[0].memory_stats() or {}
        return min(host_bytes, stats.get("bytes_limit", host_bytes))

    def everywhere(self, tree: Any) -> Any:
        """Puts arrays on every device, whole.

        Args:
            tree: arrays on the host or on one device, the same in every process.

        Returns:
            Arrays on the devices.
        """
        return jax.device_put(tree)

    def split(self, array: np.ndarray) -> Any:
        """Splits something that has an entry for each example of a batch.

        Args:
            array: on the host, the whole batch's.

        Returns:
            The array; each device has its part.
        """
        return array

    def own_part(self, batch_size: int) -> slice:
        """Returns which examples of a batch this process has to read.

        Args:
            batch_size: examples in a batch.
        """
        return slice(0, batch_size)

    def join_parts(self, tree: Any, batch_size: int) -> Any:
        """Makes a batch of the parts that the processes have read.

        Args:
            tree: arrays on the host, this process's part.
            batch_size: examples in the batch.

        Returns:
            Arrays of the whole batch; each device has its part.
        """
        return jax.device_put(tree)

    def spec(self, shape: tuple[int, ...], dtype: Any, *, is_split: bool) -> jax.ShapeDtypeStruct:
        """Describes an argument of a step, to compile with.

        Args:
            shape: its shape.
            dtype: its dtype.
            is_split: whether it comes from :meth:`split` or :meth:`join_parts`.
        """
        return jax.ShapeDtypeStruct(shape, dtype)

    def state_shardings(self, state: Any) -> Any:
        """Returns where the parts of a training state live.

        Args:
            state: a `TrainState` of shapes.

        Returns:
            A tree of shardings, or None for JAX's choice.
        """
        return None

    def template(self, tree: Any) -> Any:
        """Describes what to restore from a checkpoint.

        Args:
            tree: arrays as the steps have them.

        Returns:
            A template of arrays on one device of this process.
        """
        return tree

    def place_like(self, tree: Any, like: Any) -> Any:
        """Puts a restored tree where the steps want it.

        Args:
            tree: restored with :meth:`template`.
            like: arrays as the steps have them.

        Returns:
            The tree, with the shardings of `like`.
        """
        return tree

    def on_one_device(self, tree: Any) -> Any:
        """Collects arrays on one device of each process.

        Args:
            tree: arrays as the steps have them; all processes have to call this.

        Returns:
            The same values.
        """
        return tree


ONE_DEVICE = Placement()
