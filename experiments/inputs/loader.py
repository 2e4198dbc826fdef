"""Loader processes: each makes every n-th batch, ahead of its use.

This module runs in the loader processes too, so it must not use jax: each process would claim
device memory.
"""

import dataclasses
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from absl import flags
from grain import python as grain

from experiments.errors import UserError
from experiments.inputs.order import crop_generators, padded_batches, train_order
from experiments.inputs.records import Records

Batch = tuple[np.ndarray, np.ndarray]  # images, labels

BATCHES_AHEAD = 2
"""Batches that each process holds ready."""

_ENDLESS = 2**31  # batches
_PARENT_POLL_SECONDS = 1.0
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # the parent handles them


@dataclasses.dataclass(frozen=True)
class TrainSource:
    """The batches of all epochs, counted from the first one of epoch 1.

    Attributes:
        records: the training split.
        num_examples: examples in it.
        batch_size: examples in a batch.
        seed: the run's seed.
        random_resized_crop: whether images are cropped at random.
        positions: which examples of each batch are read; None for all.
    """

    records: Records
    num_examples: int
    batch_size: int
    seed: int
    random_resized_crop: bool
    positions: range | None = None

    @property
    def batches_per_pass(self) -> int:
        """Batches in an epoch."""
        return self.num_examples // self.batch_size

    def read(self, number: int) -> Batch:
        """Makes a batch.

        Args:
            number: counted over all epochs, from 0.

        Returns:
            Images and labels.
        """
        epoch, batch = divmod(number, self.batches_per_pass)
        epoch += 1
        order = _train_order(self.seed, epoch, self.num_examples, self.batch_size)
        positions = range(self.batch_size) if self.positions is None else self.positions
        rngs = crop_generators(self.seed, epoch, batch, self.batch_size, positions)
        return self.records.read(
            order[batch][positions], rngs if self.random_resized_crop else None
        )


@dataclasses.dataclass(frozen=True)
class TestSource:
    """The test split, over and over, each pass with a last batch that is filled up.

    Attributes:
        records: the test split.
        num_examples: examples in it.
        batch_size: examples in a batch.
        positions: which examples of each batch are read; None for all.
    """

    __test__ = False  # not a test for pytest

    records: Records
    num_examples: int
    batch_size: int
    positions: range | None = None

    @property
    def batches_per_pass(self) -> int:
        """Batches in a pass."""
        return -(-self.num_examples // self.batch_size)

    def read(self, number: int) -> Batch:
        """Makes a batch.

        Args:
            number: counted over all passes, from 0.

        Returns:
            Images and labels.
        """
        order = _test_order(self.num_examples, self.batch_size)
        indices = order[number % self.batches_per_pass]
        return self.records.read(indices if self.positions is None else indices[self.positions])


# An epoch's order is used for each of its batches.
_train_order = functools.lru_cache(maxsize=2)(train_order)


@functools.lru_cache(maxsize=1)
def _test_order(num_examples: int, batch_size: int) -> list[np.ndarray]:
    return [indices for indices, _ in padded_batches(num_examples, batch_size)]


class Stream:
    """Reads a source's batches in order, in other processes, and goes on from pass to pass.

    Args:
        source: what to read.
        num_workers: number of processes; 0 to read in threads of this one.
    """

    def __init__(self, source: TrainSource | TestSource, num_workers: int) -> None:
        """Takes down the arguments; nothing runs yet."""
        self.source = source
        self.num_workers = num_workers
        self._iterator: Any = None
        self._next = 0

    def batches(self, pass_number: int, first_batch: int = 0) -> Iterator[Batch]:
        """Gives the batches of a pass, from any one on.

        Args:
            pass_number: from 0.
            first_batch: the batch to begin with, from 0; those before it are not read.

        Returns:
            An iterator. Its first batch is there when this returns.

        Raises:
            UserError: where a record cannot be read.
        """
        number = pass_number * self.source.batches_per_pass + first_batch
        count = self.source.batches_per_pass - first_batch
        if count == 0:
            return iter(())
        if self._iterator is None or self._next != number:
            # New processes inherit the mask: a signal to all must not end them while they start.
            former = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
            try:
                self._restart(number)
                first = self._read()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, former)
        else:
            first = self._read()

        def rest() -> Iterator[Batch]:
            yield first
            for _ in range(count - 1):
                yield self._read()

        return rest()

    def close(self) -> None:
        """Ends the processes. The stream can be read again, which starts others."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator.close()

    def _restart(self, number: int) -> None:
        self.close()
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # grain reads its flags
        threads = BATCHES_AHEAD if self.num_workers else max(BATCHES_AHEAD, os.cpu_count() or 1)
        dataset = grain.MapDataset.source(_From(self.source, number)).to_iter_dataset(
            grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
        )
        if self.num_workers:
            options = grain.MultiprocessingOptions(
                num_workers=self.num_workers, per_worker_buffer_size=BATCHES_AHEAD
            )
            start = functools.partial(_start_process, os.getpid())
            dataset = dataset.mp_prefetch(options, worker_init_fn=start)
        self._iterator = iter(dataset)
        self._next = number

    def _read(self) -> Batch:
        try:
            batch = next(self._iterator)
        except RuntimeError as error:  # grain's, where a process has died
            self.close()
            raise UserError(
                f"A loader process ended early: {str(error).strip().splitlines()[0]} Where memory "
                "ran out, lower --loader-workers or --batch-size."
            ) from error
        self._next += 1
        if isinstance(batch, str):
            self.close()
            raise UserError(batch)
        # Copied out of the memory shared with the process that made it, which is freed with this.
        images, labels = batch
        return np.array(images), np.array(labels)


@dataclasses.dataclass(frozen=True)
class _From:
    """A source from some batch on, as grain takes it.

    An error is handed over as its message: not every release of grain keeps an exception's type.
    """

    source: TrainSource | TestSource
    first: int

    def __len__(self) -> int:
        return _ENDLESS - self.first

    def __getitem__(self, index: Any) -> Batch | str:
        try:
            return self.source.read(self.first + int(index))
        except UserError as error:
            return str(error)


def _start_process(parent: int, worker_index: int, worker_count: int) -> None:
    """Makes a process outlive the signals that its parent handles, and end with its parent."""
    del worker_index, worker_count
    for number in _PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(
    parent: int,
    poll_seconds: float = _PARENT_POLL_SECONDS,
    end: Callable[[int], None] = os._exit,
) -> None:
    while os.getppid() == parent:
        time.sleep(poll_seconds)
    end(1)
