"""Decoding and cropping: the right pixels, the same for the same generator."""

import io

import numpy as np
import pytest
from PIL import Image

from experiments.inputs.framing import CROP_AREA, central_square, decode, random_resized_crop


def encoded(image, file_format="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, file_format)
    return buffer.getvalue()


def gradient(width, height):
    """Red grows to the right and green downwards, one level a pixel."""
    columns, rows = np.meshgrid(np.arange(width), np.arange(height))
    return Image.fromarray(np.stack([columns, rows, 0 * rows], axis=-1).astype(np.uint8))


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "CMYK", "1"])
@pytest.mark.parametrize("channels", [1, 3])
def test_decode_converts_to_the_channels_of_the_set(mode, channels):
    image = Image.new("RGB", (4, 3), (200, 200, 200)).convert(mode)
    actual = np.asarray(decode(encoded(image, "JPEG" if mode == "CMYK" else "PNG"), channels))
    assert actual.shape == ((3, 4) if channels == 1 else (3, 4, 3))
    if mode in ("RGB", "L"):
        assert set(actual.ravel().tolist()) == {200}


def test_decode_refuses_what_is_no_image():
    with pytest.raises(OSError):
        decode(b"nothing", 3)
    with pytest.raises(OSError):
        decode(encoded(gradient(100, 100))[:-200], 3)


def test_image_of_the_right_size_keeps_every_pixel():
    image = gradient(9, 9)
    np.testing.assert_array_equal(central_square(image, 9), np.asarray(image))
    assert central_square(image.convert("L"), 9).shape == (9, 9, 1)


@pytest.mark.parametrize(("width", "height"), [(100, 60), (60, 100)])
def test_central_square_is_the_middle(width, height):
    actual = central_square(gradient(width, height), 60).astype(int)
    left, top = (width - 60) // 2, (height - 60) // 2
    np.testing.assert_array_equal(actual[0, :, 0], np.arange(left, left + 60))
    np.testing.assert_array_equal(actual[:, 0, 1], np.arange(top, top + 60))


def test_central_share_is_that_of_resizing_to_256_and_cropping_224():
    actual = central_square(gradient(256, 256), 224, 224 / 256).astype(int)
    np.testing.assert_array_equal(actual[5, :, 0], np.arange(16, 240))


def test_resizing_averages_over_the_pixels_it_merges():
    """Without that, alternating columns would alias to one colour."""
    stripes = Image.fromarray(np.tile(np.array([0, 200], np.uint8), (64, 32)))
    actual = central_square(stripes, 16)[4:-4, 4:-4]
    np.testing.assert_allclose(actual, 100, atol=2)


def test_random_crops_cover_the_areas_and_aspects_asked_for():
    image = gradient(200, 160)
    areas, aspects = [], []
    for seed in range(300):
        crop = random_resized_crop(image, 100, np.random.default_rng(seed)).astype(float)
        # The gradient's span is the rectangle's size, less half a result pixel at either end.
        width, height = (np.ptp(crop[..., channel]) * 100 / 99 for channel in (0, 1))
        areas.append(width * height / (200 * 160))
        aspects.append(width / height)
    assert 0.07 < min(areas) < 0.12 and 0.85 < max(areas) < 1.02
    assert 0.72 < min(aspects) < 0.8 and 1.25 < max(aspects) < 1.37
    assert 0.45 < np.mean(areas) < np.mean(CROP_AREA) + 0.03
    assert abs(np.mean(np.log(aspects))) < 0.05


def test_same_generator_gives_the_same_crop_and_another_one_another():
    image = gradient(90, 70)
    crops = [random_resized_crop(image, 32, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(crops[0], crops[1])
    assert not np.array_equal(crops[0], crops[2])


def test_image_too_narrow_for_any_crop_gives_its_middle():
    image = gradient(200, 2)
    actual = random_resized_crop(image, 2, np.random.default_rng(0))
    np.testing.assert_array_equal(actual, central_square(image, 2))
