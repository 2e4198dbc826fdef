"""Which examples make which batch: a function of seed, epoch and position, and nothing else."""

from collections.abc import Iterable, Iterator

import numpy as np


def train_order(seed: int, epoch: int, num_examples: int, batch_size: int) -> np.ndarray:
    """Shuffles a split and cuts it into whole batches.

    Args:
        seed: the run's seed.
        epoch: from 1; each has another order.
        num_examples: examples in the split.
        batch_size: examples in a batch; what is left over at the end is left out.

    Returns:
        Indices of the examples, int32, `[batches, batch_size]`.
    """
    order = np.random.default_rng((seed, epoch)).permutation(num_examples)
    num_batches = num_examples // batch_size
    return order[: num_batches * batch_size].reshape(num_batches, batch_size).astype(np.int32)


def crop_generators(
    seed: int, epoch: int, batch: int, batch_size: int, positions: Iterable[int] | None = None
) -> Iterator[np.random.Generator]:
    """Makes a random generator for each example of a batch.

    Args:
        seed: the run's seed.
        epoch: from 1.
        batch: the batch's number in the epoch, from 0.
        batch_size: examples in a batch.
        positions: which examples of the batch; None for all.

    Yields:
        Generators, each a function of seed, epoch and the example's position in the epoch.
    """
    # From 1, as (seed, epoch, 0) would be the generator of the epoch's order: numpy pads with 0.
    first = 1 + batch * batch_size
    for position in range(batch_size) if positions is None else positions:
        yield np.random.default_rng((seed, epoch, first + position))


def padded_batches(num_examples: int, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cuts a split into batches of one size, so that one compiled program serves all.

    Args:
        num_examples: examples in the split.
        batch_size: size of every batch.

    Yields:
        The indices of a batch, and a mask that is False where an index only fills the last one.
    """
    for start in range(0, num_examples, batch_size):
        indices = np.arange(start, start + batch_size, dtype=np.int32)
        is_example = indices < num_examples
        yield np.where(is_example, indices, 0).astype(np.int32), is_example
