"""CIFAR-100: 60,000 real 32×32 colour images of 100 classes, by download."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorflow_datasets.image_classification import cifar

from experiments.inputs.datasets.cifar_archive import read_members, split_records
from experiments.inputs.datasets.images import encode_png
from experiments.inputs.datasets.preparation import Source

URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
LABEL_FILES = {"coarse_label": "coarse_label_names.txt", "label": "fine_label_names.txt"}
"""Names of the labels, in the order of a record's label bytes."""


class Cifar100(cifar.Cifar100, skip_registration=True):
    """TFDS's set, same name, version and features, prepared without TensorFlow.

    `label` is the fine label, one of 100; `coarse_label` one of 20.
    """

    url_infos = {URL: (cifar.Cifar100.url_infos or {})[URL]}

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        archive = Path(dl_manager.download(URL))
        features: Any = self.info.features
        contents = read_members(archive, list(LABEL_FILES.values()), URL)
        for key, content in zip(LABEL_FILES, contents, strict=True):
            features[key].names = content.decode().split()
        return {
            split: self._generate_examples(split, archive, f"{split}.bin")
            for split in ("train", "test")
        }

    def _generate_examples(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, split: str, archive: Path, file: str
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        images, labels = split_records(read_members(archive, [file], URL)[0], num_labels=2)
        for index, (image, pair) in enumerate(zip(images, labels, strict=True)):
            yield (
                index,
                {
                    "id": f"{split}_{index:05d}",
                    "image": encode_png(image),
                    **{key: int(label) for key, label in zip(LABEL_FILES, pair, strict=True)},
                },
            )


CIFAR100 = Source(Cifar100, {"train": 50_000, "test": 10_000})
