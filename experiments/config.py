"""The typed configuration of a run, and the presets."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from experiments.errors import UsageError

Precision = Literal["float16", "bfloat16", "float32"]
Preset = Literal["digits", "fashion_mnist", "cifar10"]


def _path_option(default: str) -> Any:
    return tyro.conf.arg(metavar="PATH", help_behavior_hint=default)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run of a ResNet-50 (bottleneck blocks 3-4-6-3, v1.5).

    Raises:
        UsageError: where a value is out of range.
    """

    preset: Annotated[Preset, tyro.conf.Positional] = "digits"
    """The set-up to start from; the options below change single values of it."""
    precision: Precision = "float16"
    """Dtype of params, activations and gradients; norm layers, loss and masters are float32."""
    epochs: int = 10
    """Passes over the training split."""
    batch_size: int = 64
    """Examples a step; the last partial batch of an epoch is left out, another one each time."""
    seed: int = 0
    """Decides the initial params, the order of the examples and the augmentation."""
    out: Annotated[Path | None, _path_option("(default: runs/PRESET-PRECISION)")] = None
    """Directory for config.json and metrics.jsonl; an earlier run in it is moved aside."""
    data_dir: Annotated[
        Path | None, _path_option("(default: $TFDS_DATA_DIR or ~/tensorflow_datasets)")
    ] = None
    """TFDS data directory, where image sets are prepared and read."""

    image_size: int = 32
    """Height and width that images are resized to."""
    width: int = 64
    """Channels of the first stage; 64 is the standard ResNet-50."""
    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    """Bottleneck blocks in each stage; 3 4 6 3 is ResNet-50."""
    stem: Literal["imagenet", "cifar"] = "imagenet"
    """imagenet: 7x7 convolution and max-pool, each of stride 2; cifar: one 3x3 convolution."""
    crop_padding: int = 0
    """Pixels of padding before a random crop; 0 for no crop."""
    flip: bool = False
    """Whether half of the training images are mirrored."""

    learning_rate: float = 0.01
    """Peak learning rate of SGD."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Added to the gradient of convolution and dense kernels, times the kernel."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a cosine down to 0."""
    warmup_epochs: float = 0.0
    """Epochs in which the learning rate rises from 0 to its peak."""

    initial_loss_scale: float = 2.0**15
    """Loss scale of the first step (float16 only)."""
    growth_interval: int = 2000
    """Finite steps in a row after which the loss scale doubles (float16 only)."""
    max_consecutive_skips: int = 50
    """Skipped steps in a row after which the run stops with an error."""

    def __post_init__(self) -> None:
        """Checks the values."""
        for name in ("epochs", "batch_size", "image_size", "width", "growth_interval"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("crop_padding", "weight_decay", "warmup_epochs", "max_consecutive_skips"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        sizes_are_valid = len(self.stage_sizes) > 0 and min(self.stage_sizes) >= 1
        self._require("stage_sizes", sizes_are_valid, "one or more numbers of at least 1")
        self._require("seed", 0 <= self.seed < 2**32, "between 0 and 2**32 - 1")
        self._require("momentum", 0 <= self.momentum < 1, "at least 0 and less than 1")
        self._require("learning_rate", 0 < self.learning_rate < math.inf, "finite and above 0")
        scale_is_valid = 2.0**-14 <= self.initial_loss_scale <= 2.0**24
        self._require("initial_loss_scale", scale_is_valid, "between 2**-14 and 2**24")

    def _require(self, name: str, is_met: bool, what: str) -> None:
        if not is_met:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} must be {what}, got {getattr(self, name)}.")

    @property
    def model_name(self) -> str:
        """The ResNet's name by its depth: three convolutions a block, the stem and the head."""
        return f"ResNet-{3 * sum(self.stage_sizes) + 2}"

    @property
    def dataset(self) -> str:
        """Name of the image set, as in `experiments.datasets`."""
        return self.preset

    @property
    def run_dir(self) -> Path:
        """Where the run writes."""
        return self.out or Path("runs") / f"{self.preset}-{self.precision}"


@dataclasses.dataclass(frozen=True)
class Digits(TrainConfig):
    """Handwritten digits (scikit-learn's, 1,797 images of 8x8 scaled to 32x32), made for a CPU.

    A ResNet-50 of width 16. The loss scale starts too high, at 2**24, and doubles after 100 finite
    steps, so that the run shows skipped steps at its start and growth later on. For real work keep
    the library's defaults, 2**15 and 2000.

    Source: ResNet v1.5 and its initialisation as in Goyal et al. 2017, with a cosine schedule.

    Command: python -m experiments.train

    Expected: 97.4 % test accuracy in float16, 96.8 % in float32 (means of seeds 0, 1 and 2, writers
    held out), in about 2 minutes on 2 CPU cores.
    """

    preset: Annotated[Preset, tyro.conf.Positional] = "digits"
    epochs: int = 20
    width: int = 16
    crop_padding: int = 4
    learning_rate: float = 0.05
    weight_decay: float = 5e-4
    schedule: Literal["constant", "cosine"] = "cosine"
    warmup_epochs: float = 2.0
    initial_loss_scale: float = 2.0**24
    growth_interval: int = 100


@dataclasses.dataclass(frozen=True)
class FashionMnist(TrainConfig):
    """Fashion-MNIST (70,000 images of 28x28), sized for a CPU.

    A ResNet-50 of width 16. It takes the files of Debian's package dataset-fashion-mnist where they
    are, and TFDS's download otherwise.

    Source: as digits.

    Command: python -m experiments.train fashion_mnist

    Expected: not measured; about 15 minutes on 2 CPU cores.
    """

    preset: Annotated[Preset, tyro.conf.Positional] = "fashion_mnist"
    epochs: int = 5
    batch_size: int = 128
    image_size: int = 28
    width: int = 16
    crop_padding: int = 2
    flip: bool = True
    learning_rate: float = 0.1
    weight_decay: float = 5e-4
    schedule: Literal["constant", "cosine"] = "cosine"
    warmup_epochs: float = 1.0


@dataclasses.dataclass(frozen=True)
class Cifar10(TrainConfig):
    """CIFAR-10 (60,000 colour images of 32x32), the classic set-up, made for a GPU.

    Batch 64, SGD 0.01 with momentum 0.9, 10 epochs, a full-width ResNet-50.

    Source: the usual first run of mixed-precision training.

    Command: python -m experiments.train cifar10

    Expected: not measured, as its host is not reachable from everywhere; 4 hours on 2 CPU cores at
    1.8 s a step.
    """

    preset: Annotated[Preset, tyro.conf.Positional] = "cifar10"
    crop_padding: int = 4
    flip: bool = True


PRESETS: dict[str, TrainConfig] = {
    "digits": Digits(),
    "fashion_mnist": FashionMnist(),
    "cifar10": Cifar10(),
}
