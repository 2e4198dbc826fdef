"""The image sets, each a TFDS builder that prepares itself without TensorFlow."""

from experiments.datasets.preparation import Source as Source
from experiments.datasets.preparation import prepare as prepare

NAMES = ("digits", "fashion_mnist", "cifar10")


def source(name: str) -> Source:
    """Finds an image set by name.

    Args:
        name: one of `NAMES`.

    Returns:
        Its source.
    """
    # Imported here, as each of the modules imports tensorflow_datasets' own builders.
    if name == "digits":
        from experiments.datasets.digits import DIGITS

        return DIGITS
    if name == "fashion_mnist":
        from experiments.datasets.fashion_mnist import FASHION_MNIST

        return FASHION_MNIST
    if name == "cifar10":
        from experiments.datasets.cifar10 import CIFAR10

        return CIFAR10
    raise ValueError(f"dataset must be one of {', '.join(NAMES)}, got {name!r}.")
