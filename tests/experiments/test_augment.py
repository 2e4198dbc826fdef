"""Augmentation: the right values, the same for the same key."""

import jax
import numpy as np

from experiments.augment import Augmentation, augment, normalise


def make_images(count=64, size=6):
    return np.random.default_rng(0).integers(1, 256, (count, size, size, 2), np.uint8)


def run(key, images, **options):
    settings = Augmentation(mean=(0.0, 0.0), std=(1.0, 1.0), **options)
    return np.asarray(
        jax.jit(lambda key, x: augment(key, x, settings))(jax.random.key(key), images)
    )


def test_normalise_subtracts_mean_and_divides_by_std():
    images = make_images()
    settings = Augmentation(mean=(0.5, 0.25), std=(0.2, 0.1))
    actual = jax.jit(lambda x: normalise(x, settings))(images)
    assert actual.dtype == np.float32
    expected = (images / 255 - np.array([0.5, 0.25])) / np.array([0.2, 0.1])
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_no_augmentation_is_the_identity():
    images = make_images()
    np.testing.assert_array_equal(run(0, images), images)


def test_flip_mirrors_about_half_of_the_images_and_no_other():
    images = make_images()
    actual = run(0, images, flip=True)
    is_mirrored = [np.array_equal(a, b[:, ::-1]) for a, b in zip(actual, images, strict=True)]
    is_same = [np.array_equal(a, b) for a, b in zip(actual, images, strict=True)]
    assert all(m != s for m, s in zip(is_mirrored, is_same, strict=True))
    assert 16 < sum(is_mirrored) < 48


def test_crop_is_a_window_of_the_padded_image():
    images = make_images()
    actual = run(0, images, crop_padding=2)
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)))
    offsets = set()
    for image, source in zip(actual, padded, strict=True):
        found = [
            (i, j)
            for i in range(5)
            for j in range(5)
            if np.array_equal(image, source[i : i + 6, j : j + 6])
        ]
        assert len(found) == 1
        offsets.update(found)
    assert len(offsets) > 15  # of 25
    assert {i for i, _ in offsets} == {j for _, j in offsets} == set(range(5))


def test_cutout_blanks_a_square_with_the_mean_anywhere_in_the_image():
    images = make_images(count=400)
    settings = Augmentation(mean=(0.5, 0.0), std=(1.0, 1.0), cutout=3)
    actual = np.asarray(jax.jit(lambda x: augment(jax.random.key(0), x, settings))(images))
    is_blank = actual[..., 1] == 0  # no pixel of the images is
    corners, sizes = set(), set()
    for blank, image in zip(is_blank, actual, strict=True):
        rows, columns = (np.flatnonzero(blank.any(axis=axis)) for axis in (1, 0))
        assert blank.sum() == len(rows) * len(columns)  # a rectangle
        assert (image[blank] == (128, 0)).all()
        corners.add((rows[0], columns[0]))
        sizes.add((len(rows), len(columns)))
    # Part of the square may lie outside: its middle is any pixel.
    assert sizes == {(i, j) for i in (2, 3) for j in (2, 3)}
    assert corners == {(i, j) for i in range(5) for j in range(5)}
    assert (actual[~is_blank] == images[~is_blank]).all()


def test_cutout_leaves_crop_and_flip_as_they_are():
    images = make_images()
    options = {"crop_padding": 2, "flip": True}
    plain, cut = run(0, images, **options), run(0, images, cutout=2, **options)
    is_blank = (cut == 0).all(axis=-1)
    np.testing.assert_array_equal(cut[~is_blank], plain[~is_blank])


def test_same_key_gives_same_images_and_another_key_others():
    images = make_images()
    options = {"crop_padding": 2, "flip": True}
    np.testing.assert_array_equal(run(3, images, **options), run(3, images, **options))
    assert not np.array_equal(run(3, images, **options), run(4, images, **options))
