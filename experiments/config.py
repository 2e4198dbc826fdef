"""The typed configuration of a run."""

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from experiments.errors import UsageError

Precision = Literal["float16", "bfloat16", "float32"]
Preset = Literal["digits", "fashion_mnist", "cifar10", "cifar10_strong", "cifar100", "imagenet"]
Schedule = Literal["constant", "cosine", "step"]

MIN_LOSS_SCALE, MAX_LOSS_SCALE = 2.0**-14, 2.0**24
"""The range of the dynamic loss scale."""

MAX_FLOAT32 = (2 - 2.0**-23) * 2.0**127

MAX_LOADER_WORKERS = 128
"""Each takes 100 MB: a slip of the keyboard would take all memory of a machine."""


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
    out: Annotated[Path | None, _path_option("(default: runs/PRESET[-DATASET]-PRECISION)")] = None
    """Directory of the run: configuration, metrics, events, checkpoints; an earlier run in it is
    moved aside."""
    resume: bool = False
    """Goes on from the newest complete checkpoint in --out; starts anew where there is none."""
    checkpoint_every: int = 0
    """Steps between two checkpoints, beside the one after each epoch; 0 for none."""
    keep: int = 2
    """Newest checkpoints that are kept, beside the one with the best test accuracy."""

    data_dir: Annotated[
        Path | None, _path_option("(default: $TFDS_DATA_DIR or ~/tensorflow_datasets)")
    ] = None
    """TFDS data directory, where image sets are prepared and read."""
    dataset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Image set: one of this project's (digits, fashion_mnist, cifar10, cifar100), or any with an
    image and a label that TFDS has prepared as array_record, as NAME, NAME/CONFIG or either with
    :VERSION; the preset's where it is not given."""
    input: Literal["auto", "resident", "streamed"] = "auto"
    """resident: the whole set on the device; streamed: read by other processes as it is needed;
    auto: resident where the decoded set takes at most a quarter of the device's memory."""
    loader_workers: int = 2
    """Processes that read a streamed set, 0 to 128; 0 for threads of this process."""

    data_parallel: bool = False
    """Splits every batch over all devices; each has all params. Batch statistics are those of the
    whole batch, as on one device."""
    shard_optimizer: bool = False
    """With --data-parallel: each device holds and updates its part of masters and momentum alone
    (ZeRO-1)."""
    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """With --data-parallel: the address of process 0, for several processes that train together
    and share --out; auto: all three are taken from the environment of Slurm, Open MPI, Kubernetes
    or a TPU pod. When a process dies, the others end with an error within 60 seconds."""
    num_processes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """With --coordinator: how many processes there are."""
    process_id: Annotated[int | None, tyro.conf.arg(metavar="I")] = None
    """With --coordinator: the number of this one, from 0; process 0 prints and writes metrics."""

    image_size: int = 32
    """Height and width that images are resized to, from their central square."""
    width: int = 64
    """Channels of the first stage; 64 is the standard ResNet-50."""
    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    """Bottleneck blocks in each stage; 3 4 6 3 is ResNet-50."""
    stem: Literal["imagenet", "cifar"] = "imagenet"
    """imagenet: 7x7 convolution and max-pool, each of stride 2; cifar: one 3x3 convolution."""
    blocks: Literal["plain", "low_traffic"] = "plain"
    """plain: the layers one after another; low_traffic: the same function of the same params, whose
    training step reads and writes fewer bytes on a GPU. A run can go on with either."""
    crop_padding: int = 0
    """Pixels of padding before a random crop; 0 for no crop."""
    random_resized_crop: bool = False
    """Whether training images are random crops of 8 to 100 % of the original's area, resized, and
    test images the central 87.5 %; such a set is streamed."""
    flip: bool = False
    """Whether half of the training images are mirrored."""
    cutout: int = 0
    """Side of a square, in pixels, that is blanked at a random place; 0 for none."""

    learning_rate: float = 0.01
    """Peak learning rate of SGD."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """Whether the momentum is Nesterov's."""
    weight_decay: float = 0.0
    """Added to the gradient of convolution and dense kernels, times the kernel."""
    label_smoothing: float = 0.0
    """Share of each label that is spread evenly over all classes."""
    schedule: Schedule = "constant"
    """Learning rate after the warm-up: constant, a cosine down to 0, or a tenth after each of
    --step-epochs."""
    step_epochs: tuple[int, ...] = (30, 60, 80)
    """Epochs after which the step schedule divides the learning rate by 10."""
    warmup_epochs: float = 0.0
    """Epochs in which the learning rate rises from 0 to its peak."""

    initial_loss_scale: float = 2.0**15
    """Loss scale of the first step (float16 only)."""
    growth_interval: int = 2000
    """Finite steps in a row after which the loss scale doubles (float16 only)."""
    max_consecutive_skips: int = 50
    """Skipped steps in a row that a run may have; it stops with an error after more, and after more
    than 5 at the smallest loss scale or in another precision than float16."""

    def __post_init__(self) -> None:
        """Checks the values."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # What float32 and int32 hold: the program computes with these.
            if isinstance(value, float):
                self._require(field.name, abs(value) <= MAX_FLOAT32, "finite in float32")
            elif isinstance(value, int) and field.name != "seed":
                self._require(field.name, value < 2**31, "less than 2**31")
        for name in ("epochs", "batch_size", "image_size", "width", "growth_interval", "keep"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in (
            *("crop_padding", "weight_decay", "warmup_epochs", "max_consecutive_skips"),
            *("checkpoint_every", "cutout"),
        ):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        workers_are_few = 0 <= self.loader_workers <= MAX_LOADER_WORKERS
        self._require("loader_workers", workers_are_few, f"between 0 and {MAX_LOADER_WORKERS}")
        sizes_are_valid = len(self.stage_sizes) > 0 and min(self.stage_sizes) >= 1
        self._require("stage_sizes", sizes_are_valid, "one or more numbers of at least 1")
        self._require("seed", 0 <= self.seed < 2**32, "between 0 and 2**32 - 1")
        self._require("momentum", 0 <= self.momentum < 1, "at least 0 and less than 1")
        self._require("label_smoothing", 0 <= self.label_smoothing < 1, "at least 0, less than 1")
        steps = (0, *self.step_epochs)
        steps_rise = len(steps) > 1 and all(a < b for a, b in zip(steps, steps[1:], strict=False))
        self._require("step_epochs", steps_rise, "one or more rising numbers above 0")
        padding_fits = self.crop_padding <= self.image_size
        self._require("crop_padding", padding_fits, "at most --image-size")
        is_possible = self.input != "resident" or not self.random_resized_crop
        self._require("input", is_possible, "auto or streamed with --random-resized-crop")
        self._require("learning_rate", self.learning_rate > 0, "above 0")
        scale_is_valid = MIN_LOSS_SCALE <= self.initial_loss_scale <= MAX_LOSS_SCALE
        self._require("initial_loss_scale", scale_is_valid, "between 2**-14 and 2**24")
        self._check_processes()

    def _check_processes(self) -> None:
        """Checks that the options of several devices and processes go together."""
        for name in ("shard_optimizer", "coordinator"):
            if getattr(self, name) and not self.data_parallel:
                raise UsageError(f"{option_name(name)} needs --data-parallel.")
        numbers = {name: getattr(self, name) for name in ("num_processes", "process_id")}
        given = [name for name, number in numbers.items() if number is not None]
        if self.coordinator in (None, "auto"):
            if given:
                raise UsageError(f"{option_name(given[0])} needs --coordinator HOST:PORT.")
            return
        is_address = re.fullmatch(r"\S+:\d{1,5}", self.coordinator) is not None
        self._require("coordinator", is_address, "HOST:PORT or auto")
        for name in numbers.keys() - given:
            raise UsageError(f"--coordinator {self.coordinator} needs {option_name(name)} too.")
        assert self.num_processes is not None and self.process_id is not None
        self._require("num_processes", self.num_processes >= 1, "at least 1")
        id_is_valid = 0 <= self.process_id < self.num_processes
        last = self.num_processes - 1
        self._require("process_id", id_is_valid, f"between 0 and {last}, as --num-processes says")

    def _require(self, name: str, is_met: bool, what: str) -> None:
        if not is_met:
            raise UsageError(f"{option_name(name)} must be {what}, got {getattr(self, name)}.")

    @property
    def model_name(self) -> str:
        """The ResNet's name by its depth: three convolutions a block, the stem and the head."""
        return f"ResNet-{3 * sum(self.stage_sizes) + 2}"

    @property
    def dataset_name(self) -> str:
        """Name of the image set, as `experiments.inputs.datasets.prepared.find_set` takes it."""
        return self.dataset or self.preset

    @property
    def run_dir(self) -> Path:
        """Where the run writes."""
        parts = [self.preset, self.precision]
        if self.dataset != type(self).dataset:
            parts.insert(1, re.sub(r"\W+", "-", self.dataset_name))
        return self.out or Path("runs") / "-".join(parts)


def option_name(field_name: str) -> str:
    """Returns a field of the configuration as it is written on the command line."""
    return "--" + field_name.replace("_", "-")
