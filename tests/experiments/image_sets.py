"""Small image sets as TFDS prepares them: photos of all sizes, and what else can be met."""

import io
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

COUNTS = {"train": 43, "validation": 11}
NUM_CLASSES = 7


def encode(rng: np.random.Generator, mode: str, file_format: str) -> io.BytesIO:
    """A smooth random image between 20 and 60 pixels wide and high."""
    width, height = (int(side) for side in rng.integers(20, 61, 2))
    channels = {"L": (), "RGB": (3,)}[mode]
    noise = Image.fromarray(rng.integers(0, 256, (5, 5, *channels), np.uint8))
    buffer = io.BytesIO()
    noise.resize((width, height), Image.Resampling.BICUBIC).save(buffer, file_format)
    buffer.seek(0)
    return buffer


class _Set(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """An image set whose parts subclasses replace."""

    VERSION = tfds.core.Version("1.0.0")
    image: tfds.features.FeatureConnector = tfds.features.Image(encoding_format="jpeg")
    label: tfds.features.FeatureConnector = tfds.features.ClassLabel(num_classes=NUM_CLASSES)
    keys = ("image", "label")
    mode, file_format = "RGB", "JPEG"
    counts = COUNTS
    test_label: int | None = None

    def _info(self):
        features = {self.keys[0]: self.image, self.keys[1]: self.label}
        features["file_name"] = tfds.features.Text()
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in self.counts}

    def _generate_examples(self, split):
        rng = np.random.default_rng(len(split))
        for index in range(self.counts[split]):
            label = int(rng.integers(NUM_CLASSES))
            if split == "test" and self.test_label is not None:
                label = self.test_label
            image = encode(rng, self.mode, self.file_format)
            yield index, {self.keys[0]: image, self.keys[1]: label, "file_name": f"{index}"}


class Photos(_Set, skip_registration=True):
    """As imagenet2012: JPEGs of all sizes, and a test split whose labels are -1."""

    counts = {**COUNTS, "test": 5}
    test_label = -1


class GreyPhotos(_Set, skip_registration=True):
    """One channel, PNG."""

    image = tfds.features.Image(shape=(None, None, 1), encoding_format="png")
    mode, file_format = "L", "PNG"


class NoLabels(_Set, skip_registration=True):
    label = tfds.features.Scalar(np.int64)


class NoImages(_Set, skip_registration=True):
    keys = ("photo", "label")


class NoTest(_Set, skip_registration=True):
    counts = {"train": 4}


class Deep(_Set, skip_registration=True):
    """16 bits a pixel."""

    image = tfds.features.Image(shape=(None, None, 1), dtype=np.uint16, encoding_format="png")
    mode, file_format = "L", "PNG"


class Sized(_Set, skip_registration=True):
    """In several configurations."""

    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name=name, version=tfds.core.Version("2.0.0"))
        for name in ("small", "large")
    ]


def prepare(builder_class: type[_Set], data_dir: Path, **options) -> Path:
    """Prepares a set as array_record and returns its directory."""
    builder = builder_class(data_dir=data_dir, file_format="array_record", **options)
    builder.download_and_prepare()
    return Path(builder.data_dir)
