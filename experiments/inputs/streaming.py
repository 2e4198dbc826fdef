"""Batches of a set that is too large for the device, read and decoded by other processes."""

from collections.abc import Iterator

import jax
import numpy as np

from experiments.config import TrainConfig
from experiments.inputs.batches import Batches, TestBatch, TrainBatch
from experiments.inputs.data import Statistics
from experiments.inputs.datasets.prepared import PreparedSet
from experiments.inputs.loader import Batch, Stream, TestSource, TrainSource
from experiments.inputs.order import padded_batches
from experiments.inputs.records import Records
from experiments.parallel.placement import ONE_DEVICE, Placement


class StreamedBatches(Batches):
    """Batches that loader processes make ahead of their use.

    Args:
        prepared: the set.
        config: the run.
        records: the training and the test split.
        statistics: what images are normalised with.
        placement: where arrays live. This process reads its own part of each batch alone.
    """

    is_streamed = True

    def __init__(
        self,
        prepared: PreparedSet,
        config: TrainConfig,
        records: tuple[Records, Records],
        statistics: Statistics,
        placement: Placement = ONE_DEVICE,
    ) -> None:
        """Prepares the streams; the first batch starts the processes."""
        super().__init__(prepared, config, statistics, placement)
        part = placement.own_part(self.batch_size)
        own = range(part.start, part.stop)
        train = TrainSource(
            records[0], self.num_train, self.batch_size, self.seed, config.random_resized_crop, own
        )
        test = TestSource(records[1], self.num_test, self.batch_size, own)
        self._train, self._test = (
            Stream(source, config.loader_workers) for source in (train, test)
        )
        self._evaluations = 0
        self._indices = placement.everywhere(np.arange(self.batch_size, dtype=np.int32))

    def train_batches(self, epoch: int, first_batch: int = 0) -> Iterator[TrainBatch]:
        """See :meth:`Batches.train_batches`."""
        batches = self._put_ahead(self._train.batches(epoch - 1, first_batch))
        return ((*batch, self._indices) for batch in batches)

    def test_batches(self) -> Iterator[TestBatch]:
        """See :meth:`Batches.test_batches`."""
        batches = self._put_ahead(self._test.batches(self._evaluations))
        self._evaluations += 1
        padding = padded_batches(self.num_test, self.batch_size)
        return (
            (*batch, self._indices, self.placement.split(is_example))
            for batch, (_, is_example) in zip(batches, padding, strict=True)
        )

    def close(self) -> None:
        """Ends the loader processes."""
        try:
            self._train.close()
        finally:
            self._test.close()

    def _put_ahead(self, batches: Iterator[Batch]) -> Iterator[tuple[jax.Array, jax.Array]]:
        """Puts each batch on the device while the step before it runs."""
        ahead = None
        for batch in batches:
            images, labels = self.placement.join_parts(batch, self.batch_size)
            if ahead is not None:
                yield ahead
            ahead = images, labels
        if ahead is not None:
            yield ahead
