"""From a prepared set to arrays."""

import numpy as np
import pytest

from experiments import data
from experiments.errors import UserError


def test_load_gives_whole_splits_as_bytes(data_dir):
    image_set = data.load("digits", data_dir, 32)
    assert image_set.train.images.shape == (1437, 32, 32, 1)
    assert image_set.test.images.shape == (360, 32, 32, 1)
    assert image_set.train.images.dtype == np.uint8
    assert image_set.test.labels.dtype == np.int32
    assert image_set.num_classes == 10


def test_second_load_reads_the_decoded_arrays(data_dir, monkeypatch):
    first = data.load("digits", data_dir, 8)
    assert len(list((data_dir / "decoded").glob("digits-*.npy"))) == 4
    lines = []
    second = data.load("digits", data_dir, 8, report=lines.append)
    np.testing.assert_array_equal(first.train.images, second.train.images)
    np.testing.assert_array_equal(first.test.labels, second.test.labels)
    assert lines == []


def test_damaged_decoded_array_is_decoded_again(data_dir):
    first = data.load("digits", data_dir, 8)
    path = next((data_dir / "decoded").glob("digits-*-test-*-images.npy"))
    path.write_bytes(path.read_bytes()[:50])
    np.testing.assert_array_equal(data.load("digits", data_dir, 8).test.images, first.test.images)


def test_damaged_prepared_files_are_named(tmp_path):
    data.load("digits", tmp_path, 8)
    for path in (tmp_path / "decoded").iterdir():
        path.unlink()
    path = next((tmp_path / "digits" / "1.0.0").glob("*train.array_record*"))
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(UserError, match="cannot be read"):
        data.load("digits", tmp_path, 8)


def test_resize_keeps_constant_images_and_shape():
    images = np.full((3, 8, 8, 1), 77, np.uint8)
    np.testing.assert_array_equal(data.resize(images, 32), np.full((3, 32, 32, 1), 77, np.uint8))
    assert data.resize(images, 8) is images


def test_mean_and_std_are_those_of_each_channel():
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), np.uint8)
    mean, std = data.mean_and_std(images)
    np.testing.assert_allclose(mean, (images / 255).mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(std, (images / 255).std(axis=(0, 1, 2)), rtol=1e-12)


def test_default_data_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    assert data.default_data_dir() == tmp_path
    monkeypatch.delenv("TFDS_DATA_DIR")
    assert data.default_data_dir().name == "tensorflow_datasets"
