"""Image sets that TFDS has prepared already: finds them, and says what they hold."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from experiments.errors import UserError
from experiments.inputs import datasets
from experiments.inputs.framing import MODES
from experiments.inputs.records import Records

INFO_FILE = "dataset_info.json"
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_NAME = re.compile(r"\w+(/[\w.-]+)?(:\d+\.\d+\.\d+)?")


@dataclasses.dataclass(frozen=True)
class PreparedSet:
    """An image set on disk, readable by index.

    Attributes:
        name: name, configuration and version, such as `mnist/3.0.1`.
        folder: directory of the prepared version.
        test_split: the split to measure on: `test`, or `validation` where there is no labelled
            `test`.
        num_train: examples of the split `train`.
        num_test: examples of `test_split`.
        num_classes: number of labels.
        image_shape: height, width and channels; None for height and width that differ.
    """

    name: str
    folder: Path
    test_split: str
    num_train: int
    num_test: int
    num_classes: int
    image_shape: tuple[int | None, int | None, int]

    @property
    def channels(self) -> int:
        """Channels of the images."""
        return self.image_shape[-1]


def find_set(
    name: str, data_dir: Path, *, report: Callable[[str], None] = lambda message: None
) -> PreparedSet:
    """Finds an image set; this project's own sets are prepared first where they must be.

    Args:
        name: one of `datasets.NAMES`, or what TFDS calls the set: `name`, `name/config`, either
            followed by `:version`. The newest version is taken where none is given.
        data_dir: TFDS data directory.
        report: called with a line on what is being done, when it takes time.

    Returns:
        The set.

    Raises:
        UserError: where the set is not there, not complete, not in array_record format, or not
            for image classification.
    """
    if name not in datasets.NAMES:
        return describe(tfds.builder_from_directory(_find_version(name, data_dir)))
    source = datasets.source(name)
    builder = datasets.prepare(source, data_dir, report=report)
    for split, expected in source.num_examples.items():
        actual = builder.info.splits[split].num_examples
        if actual != expected:
            raise UserError(
                f"{split} of {name} in {builder.data_dir} has {actual} examples where {expected} "
                "are expected.\nMove that directory away and run again to prepare it anew."
            )
    return describe(builder)


def list_sets(data_dir: Path) -> list[str]:
    """Lists what is prepared.

    Args:
        data_dir: TFDS data directory.

    Returns:
        Names with their configurations, sorted.
    """
    infos = [*data_dir.glob(f"*/*/{INFO_FILE}"), *data_dir.glob(f"*/*/*/{INFO_FILE}")]
    versions = [info.parent for info in infos if _VERSION.fullmatch(info.parent.name)]
    return sorted({version.parent.relative_to(data_dir).as_posix() for version in versions})


def describe(builder: Any) -> PreparedSet:
    """Checks that a set is one of labelled images, and says what it holds.

    Args:
        builder: a TFDS builder of a prepared set.

    Returns:
        The set.

    Raises:
        UserError: where it is not.
    """
    splits, folder = builder.info.splits, Path(builder.data_dir)
    features = builder.info.features
    features = dict(features) if isinstance(features, tfds.features.FeaturesDict) else {}
    image, label = features.get("image"), features.get("label")
    if not isinstance(image, tfds.features.Image) or not isinstance(
        label, tfds.features.ClassLabel
    ):
        raise UserError(
            f"{builder.name} in {folder} is not a set for image classification: it needs the "
            f"features image (Image) and label (ClassLabel), and has "
            f"{', '.join(f'{key} ({type(value).__name__})' for key, value in features.items())}.\n"
            "Choose another --dataset."
        )
    shape: Any = image.shape
    np_dtype: Any = image.np_dtype
    dtype = np.dtype(np_dtype)
    if shape[-1] not in MODES or dtype != np.uint8:
        raise UserError(
            f"Images of {builder.name} in {folder} have shape {shape} and dtype "
            f"{dtype}; 1, 3 or 4 channels of uint8 are supported.\n"
            "Choose another --dataset."
        )
    test_split = next((name for name in ("test", "validation") if splits.get(name)), None)
    if not splits.get("train") or test_split is None:
        raise UserError(
            f"{builder.name} in {folder} needs the splits train, and test or validation; it has "
            f"{', '.join(splits) or 'none'}.\nPrepare them, or choose another --dataset."
        )
    # The test split of some sets, such as imagenet2012, carries no labels.
    if test_split == "test" and splits.get("validation"):
        if Records(str(folder), "test", shape[-1], image_size=1).label(0) < 0:
            test_split = "validation"
    return PreparedSet(
        name=builder.info.full_name,
        folder=folder,
        test_split=test_split,
        num_train=splits["train"].num_examples,
        num_test=splits[test_split].num_examples,
        num_classes=label.num_classes or 0,
        image_shape=tuple(shape),
    )


def _find_version(name: str, data_dir: Path) -> Path:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"--dataset {name} is not the name of a TFDS set: a name, then /CONFIG and :VERSION "
            "where they are needed, such as imagenet_resized/64x64."
        )
    path, _, version = name.partition(":")
    folder = data_dir / path
    versions = sorted(
        (child for child in folder.glob("*") if _VERSION.fullmatch(child.name)),
        key=lambda child: [int(number) for number in child.name.split(".")],
    )
    if version:
        versions = [child for child in versions if child.name == version]
    if not versions:
        raise _not_prepared(name, data_dir)
    try:
        info = json.loads((versions[-1] / INFO_FILE).read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"The prepared set in {versions[-1]} is damaged: {INFO_FILE} cannot be read ({error})."
            "\nMove that directory away and prepare it anew."
        ) from error
    file_format = info.get("fileFormat", "tfrecord")
    if file_format != "array_record":
        raise UserError(
            f"The prepared set in {versions[-1]} is in {file_format} format, and only array_record "
            "can be read by index. Convert it, where TensorFlow is installed:\n"
            f"  tfds convert_format --dataset_version_dir={versions[-1]} "
            f"--out_file_format=array_record --out_dir=OTHER_DATA_DIR/{path}/{versions[-1].name}\n"
            "and run again with --data-dir OTHER_DATA_DIR."
        )
    return versions[-1]


def _not_prepared(name: str, data_dir: Path) -> UserError:
    path, _, version = name.partition(":")
    prepared = list_sets(data_dir)
    configs = [other for other in prepared if other.startswith(f"{path}/")]
    if configs:
        return UserError(
            f"{path} in {data_dir} needs a configuration: one of {', '.join(configs)}."
        )
    return UserError(
        f"--dataset {name} is not prepared in {data_dir}. Prepared there: "
        f"{', '.join(prepared) or 'nothing'}. Prepared by themselves: {', '.join(datasets.NAMES)}."
        f"\nPrepare it, where TensorFlow is installed:\n"
        f"  tfds build {name} --data_dir {data_dir} --file_format array_record\n"
        "or say with --data-dir where it is."
    )
