"""CIFAR-10: 60,000 real 32×32 colour images, by download."""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tensorflow_datasets.image_classification import cifar

from experiments.datasets.images import encode_png
from experiments.datasets.preparation import Source
from experiments.errors import UserError

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
RECORD_BYTES = 1 + 3 * 32 * 32
"""A record is the label, then 32×32 red, green and blue bytes."""


class Cifar10(cifar.Cifar10, skip_registration=True):
    """TFDS's set, same name, version and features, prepared without TensorFlow."""

    url_infos = {URL: (cifar.Cifar10.url_infos or {})[URL]}

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        archive = Path(dl_manager.download(URL))
        names = read_members(archive, ["batches.meta.txt"])[0].decode().split()
        features: Any = self.info.features
        features["label"].names = names
        train_files = [f"data_batch_{number}.bin" for number in range(1, 6)]
        return {
            "train": self._generate_examples("train", archive, train_files),
            "test": self._generate_examples("test", archive, ["test_batch.bin"]),
        }

    def _generate_examples(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, split: str, archive: Path, files: list[str]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        records = np.frombuffer(b"".join(read_members(archive, files)), np.uint8)
        for index, record in enumerate(records.reshape(-1, RECORD_BYTES)):
            image = record[1:].reshape(3, 32, 32).transpose(1, 2, 0)
            yield (
                index,
                {
                    "id": f"{split}_{index:05d}",
                    "image": encode_png(image),
                    "label": int(record[0]),
                },
            )


def read_members(archive: Path, names: list[str]) -> list[bytes]:
    """Reads files of the archive's only folder.

    Args:
        archive: a gzipped tar file.
        names: names within `cifar-10-batches-bin/`.

    Returns:
        Their contents, in the order of `names`.

    Raises:
        UserError: where the archive is damaged or lacks one.
    """
    contents = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                file = tar.extractfile(member)
                if file is not None and Path(member.name).name in names:
                    contents[Path(member.name).name] = file.read()
        return [contents[name] for name in names]
    except (OSError, EOFError, tarfile.TarError, KeyError) as error:
        raise UserError(
            f"{archive} is not a complete CIFAR-10 archive ({error}). Download {URL} again."
        ) from error


CIFAR10 = Source(Cifar10, {"train": 50_000, "test": 10_000})
