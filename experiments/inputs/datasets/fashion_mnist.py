"""Fashion-MNIST: 70,000 real 28×28 images, from Debian's package or by download."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tensorflow_datasets.image_classification import mnist

from experiments.errors import UserError
from experiments.inputs.datasets.images import encode_png
from experiments.inputs.datasets.preparation import Source

DEBIAN_DIR = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package `dataset-fashion-mnist` puts the four files."""

FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}


class FashionMNIST(mnist.FashionMNIST, skip_registration=True):
    """TFDS's set, same name, version and features, prepared without TensorFlow."""

    url_infos = mnist.FashionMNIST.url_infos

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        if has_debian_files():
            paths = {name: DEBIAN_DIR / name for pair in FILES.values() for name in pair}
        else:
            names = [name for pair in FILES.values() for name in pair]
            paths = dl_manager.download({name: self.URL + name for name in names})
        return {
            split: self._generate_examples(Path(paths[images]), Path(paths[labels]))
            for split, (images, labels) in FILES.items()
        }

    def _generate_examples(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, images_path: Path, labels_path: Path
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        images, labels = read_idx(images_path), read_idx(labels_path)
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            yield index, {"image": encode_png(image[..., None]), "label": int(label)}


def has_debian_files() -> bool:
    """Whether Debian's package is installed."""
    return all((DEBIAN_DIR / name).exists() for pair in FILES.values() for name in pair)


def read_idx(path: Path) -> np.ndarray:
    """Reads a gzipped file in the idx format of MNIST.

    Args:
        path: the file.

    Returns:
        Its bytes as uint8, in the shape that its header gives.

    Raises:
        UserError: where it is no such file.
    """
    try:
        data = gzip.decompress(path.read_bytes())
        # Two zero bytes, type 8 (unsigned byte), the number of axes, then their sizes.
        if data[:3] != b"\x00\x00\x08":
            raise ValueError("no idx header")
        shape = np.frombuffer(data, ">i4", count=data[3], offset=4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise UserError(
            f"{path} is not a complete gzipped idx file ({error}). Install or download it again."
        ) from error


FASHION_MNIST = Source(
    FashionMNIST,
    {"train": 60_000, "test": 10_000},
    find_local_files=has_debian_files,
    hint="Or, on Debian and Ubuntu: apt-get install dataset-fashion-mnist",
)
