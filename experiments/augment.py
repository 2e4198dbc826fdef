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
        cutout: side of a square that is blanked, with the mean, in each image; 0 for none.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_padding: int = 0
    flip: bool = False
    cutout: int = 0


def augment(key: jax.Array, images: jax.Array, augmentation: Augmentation) -> jax.Array:
    """Crops and mirrors each image at random, and blanks a square of it.

    Args:
        key: random key; the same key gives the same images.
        images: uint8, `[batch, height, width, channels]`.
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
    if augmentation.cutout:
        mean = jnp.rint(255 * jnp.asarray(augmentation.mean)).astype(images.dtype)
        images = jnp.where(
            _squares(jax.random.fold_in(key, 2), images.shape[:3], augmentation.cutout),
            mean,
            images,
        )
    return images


def _squares(key: jax.Array, shape: tuple[int, ...], side: int) -> jax.Array:
    """Marks a square in each image (DeVries and Taylor 2017).

    Its middle is any pixel, so that part of it may lie outside.
    """
    batch, height, width = shape
    middles = jax.random.randint(key, (2, batch, 1), 0, jnp.array([[[height]], [[width]]]))
    rows, columns = (
        (jnp.arange(size) >= middle - side // 2) & (jnp.arange(size) < middle - side // 2 + side)
        for middle, size in zip(middles, (height, width), strict=True)
    )
    return (rows[:, :, None] & columns[:, None, :])[..., None]


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
