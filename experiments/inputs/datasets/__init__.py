"""The image sets, each a TFDS builder that prepares itself without TensorFlow."""

from experiments.inputs.datasets.preparation import Source as Source
from experiments.inputs.datasets.preparation import prepare as prepare

NAMES = ("digits", "fashion_mnist", "cifar10", "cifar100")


def source(name: str) -> Source:
    """Finds an image set by name.

    Args:
        name: one of `NAMES`.

    Returns:
        Its source.
    """
    # Imported here, as each of the modules imports tensorflow_datasets' own builders.
    if name == "digits":
        from experiments.inputs.datasets.digits import DIGITS

        return DIGITS
    if name == "fashion_mnist":
        from experiments.inputs.datasets.fashion_mnist import FASHION_MNIST

        return FASHION_MNIST
    if name == "cifar10":
        from experiments.inputs.datasets.cifar10 import CIFAR10

        return CIFAR10
    if name == "cifar100":
        from experiments.inputs.datasets.cifar100 import CIFAR100

        return CIFAR100
    raise ValueError(f"dataset must be one of {', '.join(NAMES)}, got {name!r}.")
