"""Images in the forms that TFDS takes without TensorFlow."""

import io

import numpy as np
from PIL import Image


def encode_png(image: np.ndarray) -> io.BytesIO:
    """Encodes an image as PNG, which keeps every pixel.

    TFDS encodes arrays with TensorFlow, but takes encoded files as they are.

    Args:
        image: uint8, `[height, width, channels]` with 1 or 3 channels.

    Returns:
        The PNG file, positioned at its start.
    """
    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(buffer, "PNG")
    buffer.seek(0)
    return buffer
