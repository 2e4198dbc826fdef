"""Encoded images to squares of one size: decoding, central and random crops, on the host."""

import io
import math

import numpy as np
from PIL import Image

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's name of an image with so many channels."""

CROP_AREA = (0.08, 1.0)
"""Share of the image that a random crop covers (Szegedy et al. 2015)."""

CROP_ASPECT = (3 / 4, 4 / 3)
"""Width of a random crop over its height (Szegedy et al. 2015)."""

CROP_ATTEMPTS = 10
"""How often a random crop is drawn that does not fit, before the central square is taken."""


def decode(content: bytes, channels: int) -> Image.Image:
    """Decodes a PNG, a JPEG or what else Pillow reads.

    Args:
        content: the encoded image.
        channels: 1, 3 or 4; an image of another kind, such as a CMYK JPEG, is converted.

    Returns:
        The image.

    Raises:
        OSError: where it is damaged or no image.
    """
    image = Image.open(io.BytesIO(content))
    return image.convert(MODES[channels])


def central_square(image: Image.Image, size: int, share: float = 1.0) -> np.ndarray:
    """Cuts out the middle of an image and resizes it, bilinearly.

    Args:
        image: the image, of any size.
        size: height and width of the result.
        share: side of the square over the image's shorter side.

    Returns:
        uint8, `[size, size, channels]`.
    """
    side = min(image.size) * share
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return _resized(image, size, (left, top, left + side, top + side))


def random_resized_crop(image: Image.Image, size: int, rng: np.random.Generator) -> np.ndarray:
    """Cuts out a random rectangle and resizes it to a square (Szegedy et al. 2015).

    Area and aspect ratio are those of `CROP_AREA` and `CROP_ASPECT`, the area uniform and the
    ratio log-uniform.

    Args:
        image: the image, of any size.
        size: height and width of the result.
        rng: decides the rectangle.

    Returns:
        uint8, `[size, size, channels]`.
    """
    for _ in range(CROP_ATTEMPTS):
        area = image.width * image.height * rng.uniform(CROP_AREA[0], CROP_AREA[1])
        aspect = math.exp(rng.uniform(math.log(CROP_ASPECT[0]), math.log(CROP_ASPECT[1])))
        width, height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < width <= image.width and 0 < height <= image.height:
            left = int(rng.integers(image.width - width + 1))
            top = int(rng.integers(image.height - height + 1))
            return _resized(image, size, (left, top, left + width, top + height))
    return central_square(image, size)


def _resized(image: Image.Image, size: int, box: tuple[float, float, float, float]) -> np.ndarray:
    if image.size != (size, size) or box != (0, 0, size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    array = np.asarray(image)
    return array[..., None] if array.ndim == 2 else array
