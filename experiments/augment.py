"""Image augmentation and normalisation, made to run on the device inside the jitted step."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What happens to images between the set and the model.

    Attributes:
        mean: mean of each channel over the training split, of pixels in 0 to 1.
        std: standard deviation of each channel, likewise.
        crop_padding: black pixels added on each side before a random crop of the former size; 0
            for no crop.
        flip: whether half of the images are mirrored left to right.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_padding: int = 0
    flip: bool = False


def augment(key: jax.Array, images: jax.Array, augmentation: Augmentation) -> jax.Array:
    """Crops and mirrors each image at random.

    Args:
        key: random key; the same key gives the same images.
        images: `[batch, height, width, channels]`, any dtype.
        augmentation: what to do.

    Returns:
        Images of the same shape and dtype.
    """
    crop_key, flip_key = jax.random.split(key)
    padding = augmentation.crop_padding
    if padding:
        offsets = jax.random.randint(crop_key, (len(images), 2), 0, 2 * padding + 1)
        padded = jnp.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
        size = images.shape[1:]
        images = jax.vmap(
            lambda image, offset: jax.lax.dynamic_slice(image, (offset[0], offset[1], 0), size)
        )(padded, offsets)
    if augmentation.flip:
        mirrored = jax.random.bernoulli(flip_key, 0.5, (len(images), 1, 1, 1))
        images = jnp.where(mirrored, images[:, :, ::-1], images)
    return images


def normalise(images: jax.Array, augmentation: Augmentation) -> jax.Array:
    """Turns bytes into numbers with mean 0 and standard deviation 1.

    Args:
        images: uint8, `[batch, height, width, channels]`.
        augmentation: holds the statistics.

    Returns:
        float32 of the same shape.
    """
    mean = jnp.asarray(augmentation.mean, jnp.float32)
    std = jnp.asarray(augmentation.std, jnp.float32)
    return (images.astype(jnp.float32) / 255 - mean) / std
