"""Batches for the training and evaluation steps, from a set on the device or from a stream.

A batch is a function of seed, epoch and number. A step gets images, labels and the indices of the
batch in them: the whole set and the shuffled indices where the set is on the device, or the batch
itself and 0, 1, 2 and so on where it is streamed.
"""

import abc
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from experiments.augment import Augmentation
from experiments.config import TrainConfig
from experiments.errors import UserError
from experiments.files import one_at_a_time
from experiments.inputs import data
from experiments.inputs.data import Statistics
from experiments.inputs.datasets.prepared import PreparedSet, find_set
from experiments.inputs.order import padded_batches, train_order
from experiments.inputs.records import Records
from experiments.parallel.placement import ONE_DEVICE, Placement

TrainBatch = tuple[jax.Array, jax.Array, Any]  # images, labels, indices
TestBatch = tuple[jax.Array, jax.Array, Any, Any]  # and a mask

RESIDENT_SHARE = 0.25
"""Share of the memory that a set may take to be held on the device; see `fits_device`."""

CENTRAL_SHARE = 224 / 256
"""Central share of test images where training images are cropped at random: 224 of 256 pixels."""


class Batches(abc.ABC):
    """Where the steps get their examples from. Use it as a context manager.

    Args:
        prepared: the set.
        config: the run.
        statistics: what images are normalised with.
        placement: where arrays live.

    Attributes:
        num_train: examples of the training split.
        num_test: examples of the test split.
        num_classes: number of labels.
        image_shape: height, width and channels.
        steps_per_epoch: whole batches in an epoch.
        augmentation: what happens to the images on the device.
    """

    is_streamed: ClassVar[bool]
    """Whether batches come from a stream."""

    def __init__(
        self,
        prepared: PreparedSet,
        config: TrainConfig,
        statistics: Statistics,
        placement: Placement = ONE_DEVICE,
    ) -> None:
        """Takes down the facts."""
        self.placement = placement
        self.num_train, self.num_test = prepared.num_train, prepared.num_test
        self.num_classes = prepared.num_classes
        self.image_shape = (config.image_size, config.image_size, prepared.channels)
        self.batch_size, self.seed = config.batch_size, config.seed
        self.steps_per_epoch = self.num_train // self.batch_size
        self.augmentation = Augmentation(
            *statistics, config.crop_padding, config.flip, config.cutout
        )

    @property
    def train_spec(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of a training batch, to compile the step with."""
        count = self.batch_size if self.is_streamed else self.num_train
        spec = self.placement.spec
        return (
            spec((count, *self.image_shape), jnp.uint8, is_split=self.is_streamed),
            spec((count,), jnp.int32, is_split=self.is_streamed),
            spec((self.batch_size,), jnp.int32, is_split=not self.is_streamed),
        )

    @abc.abstractmethod
    def train_batches(self, epoch: int, first_batch: int = 0) -> Iterator[TrainBatch]:
        """Gives an epoch's batches, from any one on.

        Whatever takes time to start has started when this returns.

        Args:
            epoch: from 1.
            first_batch: the batch to begin with, from 0; those before it are not read.

        Returns:
            An iterator over images, labels and the indices of the batch in them.
        """

    @abc.abstractmethod
    def test_batches(self) -> Iterator[TestBatch]:
        """Gives the test split, each example once.

        Returns:
            An iterator over images, labels, indices, and a mask that is False where an index only
            fills the last batch.
        """

    def close(self) -> None:
        """Ends what runs in the background."""
        return

    def __enter__(self) -> Self:
        """Returns the batches."""
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends what runs in the background."""
        self.close()


class ResidentBatches(Batches):
    """Batches of a set that is on the device as a whole.

    Args:
        prepared: the set.
        config: the run.
        splits: the training and the test split, on the host.
        placement: where arrays live. Every device has the whole set, and gathers its own part of
            each batch from it.
    """

    is_streamed = False

    def __init__(
        self,
        prepared: PreparedSet,
        config: TrainConfig,
        splits: tuple[data.Split, data.Split],
        placement: Placement = ONE_DEVICE,
    ) -> None:
        """Puts the set on the device."""
        sample = splits[0].images[data.statistics_indices(prepared.num_train)]
        super().__init__(prepared, config, data.mean_and_std(sample), placement)
        self._train, self._test = placement.everywhere(splits)

    def train_batches(self, epoch: int, first_batch: int = 0) -> Iterator[TrainBatch]:
        """See :meth:`Batches.train_batches`."""
        order = train_order(self.seed, epoch, self.num_train, self.batch_size)
        split = self.placement.split
        return ((*self._train, split(indices)) for indices in order[first_batch:])

    def test_batches(self) -> Iterator[TestBatch]:
        """See :meth:`Batches.test_batches`."""
        batches = padded_batches(self.num_test, self.batch_size)
        split = self.placement.split
        return ((*self._test, split(indices), split(mask)) for indices, mask in batches)


def open_batches(
    config: TrainConfig,
    placement: Placement = ONE_DEVICE,
    *,
    report: Callable[[str], None] = lambda message: None,
) -> Batches:
    """Opens the image set of a run, preparing it first where it must be.

    With `input="auto"` a set is held on the device where :func:`fits_device` says so, and streamed
    where not, or where images are cropped at random from their original size.

    Args:
        config: the run.
        placement: where arrays live.
        report: called with a line on what is being done, when it takes time.

    Returns:
        The batches.

    Raises:
        UserError: where the set cannot be had, is not complete or is smaller than a batch.
    """
    data_dir = config.data_dir or data.default_data_dir()
    # Of several processes that share the directory, the first prepares the set for all.
    with one_at_a_time(data_dir) if config.coordinator else contextlib.nullcontext():
        return _open(config, placement, data_dir, report)


def _open(
    config: TrainConfig, placement: Placement, data_dir: Path, report: Callable[[str], None]
) -> Batches:
    prepared = find_set(config.dataset_name, data_dir, report=report)
    if prepared.num_train < config.batch_size:
        raise UserError(
            f"--batch-size {config.batch_size} is more than the {prepared.num_train} examples."
        )
    share = CENTRAL_SHARE if config.random_resized_crop else 1.0
    splits = [
        Records(str(prepared.folder), split, prepared.channels, config.image_size, share)
        for split in ("train", prepared.test_split)
    ]
    if is_resident(prepared, config, placement):
        train, test = (
            data.load_split(prepared, records, data_dir, report=report) for records in splits
        )
        return ResidentBatches(prepared, config, (train, test), placement)
    # Imported here, as only a stream needs grain.
    from experiments.inputs.streaming import StreamedBatches

    statistics = data.read_statistics(prepared, splits[0], data_dir, report=report)
    return StreamedBatches(prepared, config, (splits[0], splits[1]), statistics, placement)


def is_resident(
    prepared: PreparedSet, config: TrainConfig, placement: Placement = ONE_DEVICE
) -> bool:
    """Decides whether a set is held on the device.

    Args:
        prepared: the set.
        config: the run.
        placement: where arrays live.

    Returns:
        Whether it is, rather than streamed.
    """
    if config.input != "auto":
        return config.input == "resident"
    pixels = config.image_size**2 * prepared.channels
    num_bytes = (prepared.num_train + prepared.num_test) * pixels
    return not config.random_resized_crop and fits_device(num_bytes, placement)


def fits_device(num_bytes: int, placement: Placement = ONE_DEVICE) -> bool:
    """Decides whether a decoded set can be held on the device.

    Args:
        num_bytes: size of both splits' images, resized, as bytes.
        placement: where arrays live.

    Returns:
        Whether that is at most `RESIDENT_SHARE` of the device's memory and of this machine's. The
        rest is for params, activations, and a copy of the set while it is decoded.
    """
    return num_bytes <= RESIDENT_SHARE * placement.memory_bytes()
