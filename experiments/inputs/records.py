"""Reads examples of a prepared image set by their index.

Runs in loader processes too, so it must not use jax: each process would claim device memory.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from experiments.errors import UserError
from experiments.inputs.framing import central_square, decode, random_resized_crop


@dataclasses.dataclass(frozen=True)
class Records:
    """One split of a prepared set, read as squares of one size.

    It can be sent to another process, which opens the files anew.

    Attributes:
        folder: directory of the prepared version.
        split: the split's name.
        channels: 1, 3 or 4.
        image_size: height and width of the images that are returned.
        central_share: side of the central square over the image's shorter side, for images that
            are not cropped at random.
    """

    folder: str
    split: str
    channels: int
    image_size: int
    central_share: float = 1.0

    def read(
        self, indices: Sequence[int] | np.ndarray, rngs: Iterable[np.random.Generator] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Reads and decodes examples.

        Args:
            indices: which.
            rngs: a generator for each of them, to crop at random; None for the central square.

        Returns:
            Images, uint8, `[examples, image_size, image_size, channels]`, and labels, int32.

        Raises:
            UserError: names the record that cannot be read or decoded, or has no label.
        """
        shape = (len(indices), self.image_size, self.image_size, self.channels)
        images, labels = np.empty(shape, np.uint8), np.empty(len(indices), np.int32)
        examples = self._examples([int(index) for index in indices])
        generators = iter(rngs) if rngs is not None else None
        for i, (index, example) in enumerate(zip(indices, examples, strict=True)):
            try:
                image = decode(example["image"], self.channels)
            except (OSError, ValueError, SyntaxError) as error:  # Pillow raises all of them
                raise self._unreadable(index, error) from error
            if generators is None:
                images[i] = central_square(image, self.image_size, self.central_share)
            else:
                images[i] = random_resized_crop(image, self.image_size, next(generators))
            labels[i] = example["label"]
            if labels[i] < 0:
                raise UserError(
                    f"Record {index} of {self.split} in {self.folder} has no label "
                    f"({labels[i]}). Prepare the set with labels, or choose another one."
                )
        return images, labels

    def label(self, index: int) -> int:
        """Reads the label of one example, which is negative where there is none.

        Args:
            index: which.

        Returns:
            The label.

        Raises:
            UserError: where the record cannot be read.
        """
        return int(self._examples([index])[0]["label"])

    def _examples(self, indices: list[int]) -> Sequence[Any]:
        try:
            return _open(self.folder, self.split).__getitems__(indices)
        except Exception as error:  # whatever the reader of the files raises
            if len(indices) == 1:
                raise self._unreadable(indices[0], error) from error
        # One at a time, to find the record.
        return [self._examples([index])[0] for index in indices]

    def _unreadable(self, index: int, error: Exception) -> UserError:
        reason = str(error).strip().split("\n", 1)[0][:200] or type(error).__name__
        return UserError(
            f"Record {index} of {self.split} in {self.folder} cannot be read: {reason}\n"
            "Move that directory away and prepare the set anew."
        )


def _open(folder: str, split: str) -> Any:
    # One thread at a time: TFDS imports its parts when they are first used, and two threads that
    # do so at once can wait for each other for ever.
    with _open_lock:
        return _open_once(folder, split)


_open_lock = threading.Lock()


@functools.cache
def _open_once(folder: str, split: str) -> Any:
    builder: Any = tfds.builder_from_directory(folder)
    # Everything but the label stays encoded: it is not needed, or is decoded here.
    names = [name for name in builder.info.features if name != "label"]
    decoders = {name: tfds.decode.SkipDecoding() for name in names}
    source = builder.as_data_source(split=split, decoders=decoders)
    with contextlib.suppress(Exception):  # it shows when that record is asked for
        source.__getitems__([0])  # imports what reading needs
    return source
