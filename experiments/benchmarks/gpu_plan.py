"""What is measured on a GPU, the most telling first."""

import dataclasses
from typing import Literal

from experiments.benchmarks.contenders import REFERENCE
from experiments.resnet import Blocks, Stem

COMMAND_BUFFERS = {
    # XLA's default and convolutions, so that the step is one CUDA graph. In XLA_FLAGS that is
    # +CONVOLUTION; an option of a single program must be the whole list.
    "on": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,CONVOLUTION",
    # An empty list would leave the default in force.
    "off": "INVALID",
}
"""Values of `xla_gpu_enable_command_buffer`."""

FLAX = "Flax DynamicScale float16"
TORCH = "PyTorch AMP float16, channels last"


@dataclasses.dataclass(frozen=True)
class Workload:
    """A ResNet-50 and its images."""

    name: str
    batch_size: int
    image_size: int
    num_classes: int
    stem: Stem = "imagenet"
    width: int = 64
    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)


IMAGENET = Workload("ImageNet", 256, 224, 1000)
CIFAR = Workload("CIFAR", 128, 32, 10, stem="cifar")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One program to time.

    Attributes:
        workload: what is trained.
        contender: a name in `contenders.CONTENDERS`, or `TORCH`.
        precision: of float32 products: XLA's default is TF32.
        command_buffers: a key of `COMMAND_BUFFERS`, or XLA's default.
        scan: steps that one call takes in `lax.scan`; None for one step without it.
        blocks: which blocks the ResNet has.
    """

    workload: Workload
    contender: str
    precision: Literal["default", "highest"] = "default"
    command_buffers: Literal["default", "on", "off"] = "default"
    scan: int | None = None
    blocks: Blocks = "plain"

    @property
    def name(self) -> str:
        """What the table shows; different for each measurement of a plan."""
        parts = [self.workload.name, self.contender]
        if self.contender == REFERENCE:
            parts.append("TF32" if self.precision == "default" else "highest")
        if self.command_buffers != "default":
            parts.append(f"command buffers {self.command_buffers}")
        if self.scan is not None:
            parts.append(f"scan of {self.scan}")
        if self.blocks != "plain":
            parts.append(self.blocks)
        return ", ".join(parts)


def make_plan(imagenet: Workload = IMAGENET, cifar: Workload = CIFAR) -> list[Measurement]:
    """Lists the measurements in the order in which they are taken.

    Args:
        imagenet: the large workload.
        cifar: the small one.

    Returns:
        The measurements; those at the end are dropped first where time is short.
    """
    float16, bfloat16 = "mpopt float16", "mpopt bfloat16"
    return [
        Measurement(imagenet, float16),
        Measurement(imagenet, bfloat16),
        Measurement(imagenet, FLAX),
        Measurement(imagenet, float16, blocks="low_traffic"),
        Measurement(imagenet, REFERENCE),
        Measurement(imagenet, float16, command_buffers="on"),
        Measurement(cifar, float16),
        Measurement(cifar, REFERENCE),
        Measurement(cifar, FLAX),
        Measurement(cifar, float16, scan=8),
        Measurement(imagenet, TORCH),
        Measurement(imagenet, float16, command_buffers="off"),
        Measurement(imagenet, float16, scan=8),
        Measurement(cifar, bfloat16),
        Measurement(cifar, float16, command_buffers="on"),
        Measurement(cifar, float16, command_buffers="off"),
        Measurement(imagenet, REFERENCE, precision="highest"),
        Measurement(imagenet, float16, blocks="low_traffic", command_buffers="on"),
        Measurement(cifar, float16, scan=1),
        Measurement(imagenet, float16, scan=1),
        Measurement(cifar, REFERENCE, precision="highest"),
        Measurement(cifar, TORCH),
    ]
