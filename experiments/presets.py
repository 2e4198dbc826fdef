"""The presets: each a configuration with its source, its command and what it gives."""

import dataclasses
from typing import Annotated, Literal

import tyro

from experiments.config import Preset, Schedule, TrainConfig


@dataclasses.dataclass(frozen=True)
class Digits(TrainConfig):
    """Handwritten digits (scikit-learn's, 1,797 images of 8x8 scaled to 32x32), made for a CPU.

    A ResNet-50 of width 16. The loss scale starts too high, at 2**24, and doubles after 100 finite
    steps, so that the run shows skipped steps at its start and growth later on. For real work keep
    the library's defaults, 2**15 and 2000.

    Source: ResNet v1.5 and its initialisation as in Goyal et al. 2017, with a cosine schedule.

    Command: python -m experiments.train

    Expected: 96 to 98 % test accuracy (writers held out) in every precision, by the seed more than
    by the precision, in about 100 seconds on 2 CPU cores. README.md has the means.
    """

    preset: Annotated[Preset, tyro.conf.Positional] = "digits"
    epochs: int = 20
    width: int = 16
    crop_padding: int = 4
    learning_rate: float = 0.05
    weight_decay: float = 5e-4
    schedule: Schedule = "cosine"
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

    Expected: 89 to 90 % test accuracy, in less than 30 minutes on 2 CPU cores. README.md has the
    figures.
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
    schedule: Schedule = "cosine"
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


@dataclasses.dataclass(frozen=True)
class Cifar10Strong(TrainConfig):
    """CIFAR-10 with a modern recipe, made for one GPU.

    Source: DeVries and Taylor 2017 ("Improved Regularization of Convolutional Neural Networks with
    Cutout", and its code) for batch 128, 200 epochs, SGD 0.1 with Nesterov momentum 0.9, weight
    decay 5e-4, crops of 4 pixels of padding, flips, cutout of 16 pixels, and a first convolution of
    3x3 and stride 1. He, T. et al. 2019 ("Bag of Tricks for Image Classification with
    Convolutional Neural Networks") for the cosine, label smoothing of 0.1 (Szegedy et al. 2016), 5
    epochs of warm-up, and no weight decay on biases and norm layers.

    Command: python -m experiments.train cifar10_strong

    Expected: not measured. The recipe is meant to reach 95 %; DeVries and Taylor report 96.0 % for
    a ResNet-18 with their step schedule and no label smoothing.
    """

    preset: Annotated[Preset, tyro.conf.Positional] = "cifar10_strong"
    dataset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = "cifar10"
    epochs: int = 200
    batch_size: int = 128
    stem: Literal["imagenet", "cifar"] = "cifar"
    crop_padding: int = 4
    flip: bool = True
    cutout: int = 16
    learning_rate: float = 0.1
    nesterov: bool = True
    weight_decay: float = 5e-4
    label_smoothing: float = 0.1
    schedule: Schedule = "cosine"
    warmup_epochs: float = 5.0


@dataclasses.dataclass(frozen=True)
class Cifar100(Cifar10Strong):
    """CIFAR-100 (60,000 colour images of 32x32, 100 classes), made for one GPU.

    Source: as cifar10_strong, with the cutout of 8 pixels that DeVries and Taylor 2017 take for
    CIFAR-100.

    Command: python -m experiments.train cifar100

    Expected: not measured. DeVries and Taylor report 78.0 % for a ResNet-18 with their step
    schedule and no label smoothing.
    """

    preset: Annotated[Preset, tyro.conf.Positional] = "cifar100"
    dataset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = "cifar100"
    cutout: int = 8


@dataclasses.dataclass(frozen=True)
class Imagenet(TrainConfig):
    """ImageNet (ILSVRC 2012, 1,281,167 images of 1,000 classes), streamed, made for one GPU.

    TFDS prepares it, where TensorFlow is installed, from archives that its owners give out:
    tfds build imagenet2012 --data_dir DIR --file_format array_record

    Source: Goyal et al. 2017 ("Accurate, Large Minibatch SGD") for 90 epochs, SGD 0.1 at batch 256
    with Nesterov momentum 0.9, weight decay 1e-4 without biases and norm layers, 5 epochs of
    warm-up, random crops of 224 of varying area and aspect (Szegedy et al. 2015) and flips. He, T.
    et al. 2019 ("Bag of Tricks for Image Classification with Convolutional Neural Networks") for
    the cosine and label smoothing of 0.1. For the schedule of Goyal et al.: --schedule step
    --label-smoothing 0.

    Command: python -m experiments.train imagenet --data-dir DIR --precision bfloat16

    Expected: not measured. Goyal et al. report 76.4 % for their recipe.
    """

    preset: Annotated[Preset, tyro.conf.Positional] = "imagenet"
    dataset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = "imagenet2012"
    epochs: int = 90
    batch_size: int = 256
    input: Literal["auto", "resident", "streamed"] = "streamed"
    loader_workers: int = 12
    image_size: int = 224
    random_resized_crop: bool = True
    flip: bool = True
    learning_rate: float = 0.1
    nesterov: bool = True
    weight_decay: float = 1e-4
    label_smoothing: float = 0.1
    schedule: Schedule = "cosine"
    warmup_epochs: float = 5.0


PRESETS: dict[str, TrainConfig] = {
    "digits": Digits(),
    "fashion_mnist": FashionMnist(),
    "cifar10": Cifar10(),
    "cifar10_strong": Cifar10Strong(),
    "cifar100": Cifar100(),
    "imagenet": Imagenet(),
}
