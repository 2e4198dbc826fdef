"""CIFAR-10: 60,000 real 32×32 colour images, by download."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorflow_datasets.image_classification import cifar

from experiments.inputs.datasets.cifar_archive import read_members, split_records
from experiments.inputs.datasets.images import encode_png
from experiments.inputs.datasets.preparation import Source

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"


class Cifar10(cifar.Cifar10, skip_registration=True):
    """TFDS's set, same name, version and features, prepared without TensorFlow."""

    url_infos = {URL: (cifar.Cifar10.url_infos or {})[URL]}

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        archive = Path(dl_manager.download(URL))
        names = read_members(archive, ["batches.meta.txt"], URL)[0].decode().split()
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
        images, labels = split_records(b"".join(read_members(archive, files, URL)), num_labels=1)
        for index, (image, (label,)) in enumerate(zip(images, labels, strict=True)):
            yield (
                index,
                {
                    "id": f"{split}_{index:05d}",
                    "image": encode_png(image),
                    "label": int(label),
                },
            )


CIFAR10 = Source(Cifar10, {"train": 50_000, "test": 10_000})
