"""scikit-learn's handwritten digits as a TFDS set: 1,797 real images that need no download."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from experiments.inputs.datasets.images import encode_png
from experiments.inputs.datasets.preparation import Source

NUM_TRAIN = 1437
NUM_TEST = 360


class Digits(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """8×8 greyscale digits, 10 classes, by Alpaydin and Kaynak (CC BY 4.0).

    The rows are in the order of the writers. The first 1,437 are for training and the last 360
    for the test, so that no writer is in both: a shuffled or strided split lets a model know the
    test's handwriting and scores a percent higher.
    """

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Optical recognition of handwritten digits, 8x8 greyscale.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1)),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://archive.ics.uci.edu/dataset/80",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        # Imported here: it takes over a second, and only the preparation needs it.
        from sklearn.datasets import load_digits

        digits: Any = load_digits()
        images: np.ndarray = digits["images"]
        labels: np.ndarray = digits["target"]
        # Stored as intensities 0 to 16; as an ordinary image 0 is black and 255 white.
        pixels = np.rint(images * (255 / 16)).astype(np.uint8)[..., None]
        return {
            "train": self._generate_examples(pixels[:NUM_TRAIN], labels[:NUM_TRAIN]),
            "test": self._generate_examples(pixels[-NUM_TEST:], labels[-NUM_TEST:]),
        }

    def _generate_examples(
        self, pixels: np.ndarray, labels: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            yield index, {"image": encode_png(image), "label": int(label)}


DIGITS = Source(Digits, {"train": NUM_TRAIN, "test": NUM_TEST})
