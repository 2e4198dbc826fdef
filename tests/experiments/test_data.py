"""From a prepared set to arrays and their statistics."""

import json

import numpy as np
import pytest

from experiments.errors import UserError
from experiments.inputs import data
from experiments.inputs.datasets.prepared import find_set
from experiments.inputs.records import Records


def load(name, data_dir, image_size, split="train", **options):
    prepared = find_set(name, data_dir)
    records = Records(str(prepared.folder), split, prepared.channels, image_size)
    return data.load_split(prepared, records, data_dir, **options)


def test_load_split_gives_the_whole_split_as_bytes(data_dir):
    train, test = load("digits", data_dir, 32), load("digits", data_dir, 32, "test")
    assert train.images.shape == (1437, 32, 32, 1)
    assert test.images.shape == (360, 32, 32, 1)
    assert train.images.dtype == np.uint8
    assert test.labels.dtype == np.int32


def test_images_of_all_sizes_become_squares(photos_dir):
    assert load("photos", photos_dir, 24).images.shape == (43, 24, 24, 3)
    assert load("grey_photos", photos_dir, 24, "validation").images.shape == (11, 24, 24, 1)


def test_second_load_reads_the_decoded_arrays(data_dir):
    first = load("digits", data_dir, 8)
    assert len(list((data_dir / "decoded").glob("digits-1.0.0-train-8-*.npy"))) == 2
    lines = []
    second = load("digits", data_dir, 8, report=lines.append)
    np.testing.assert_array_equal(first.images, second.images)
    np.testing.assert_array_equal(first.labels, second.labels)
    assert lines == []


def test_arrays_of_another_size_are_not_mistaken(data_dir):
    assert load("digits", data_dir, 8).images.shape[1:3] == (8, 8)
    assert load("digits", data_dir, 9).images.shape[1:3] == (9, 9)


def test_damaged_decoded_array_is_decoded_again(data_dir):
    first = load("digits", data_dir, 8, "test")
    path = next((data_dir / "decoded").glob("digits-*-test-8-*-images.npy"))
    path.write_bytes(path.read_bytes()[:50])
    np.testing.assert_array_equal(load("digits", data_dir, 8, "test").images, first.images)


def test_damaged_prepared_files_are_named(tmp_path):
    prepared = find_set("digits", tmp_path)
    path = next(prepared.folder.glob("*train.array_record*"))
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(UserError, match="cannot be read") as caught:
        load("digits", tmp_path, 8)
    assert str(prepared.folder) in str(caught.value)


def test_mean_and_std_are_those_of_each_channel():
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), np.uint8)
    mean, std = data.mean_and_std(images)
    np.testing.assert_allclose(mean, (images / 255).mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(std, (images / 255).std(axis=(0, 1, 2)), rtol=1e-12)


def test_images_of_one_colour_can_be_normalised():
    assert data.mean_and_std(np.full((2, 4, 4, 1), 51, np.uint8)) == ((0.2,), (1.0,))


def test_statistics_are_those_of_evenly_spaced_images():
    np.testing.assert_array_equal(data.statistics_indices(5), np.arange(5))
    indices = data.statistics_indices(100_000)
    assert len(indices) == len(set(indices)) == data.STATISTICS_EXAMPLES
    assert set(np.diff(indices)) <= {24, 25}
    assert indices[-1] < 100_000


def test_statistics_of_a_stream_are_those_of_the_arrays_and_are_kept(data_dir, monkeypatch):
    monkeypatch.setattr(data, "STATISTICS_EXAMPLES", 300)
    prepared = find_set("digits", data_dir)
    records = Records(str(prepared.folder), "train", 1, 7)
    lines = []
    first = data.read_statistics(prepared, records, data_dir, report=lines.append)
    images = load("digits", data_dir, 7).images
    assert first == data.mean_and_std(images[data.statistics_indices(1437)])
    assert data.read_statistics(prepared, records, data_dir, report=lines.append) == first
    assert len(lines) == 1
    path = next((data_dir / "decoded").glob("digits-1.0.0-train-7-*-statistics.json"))
    assert json.loads(path.read_text()) == [list(first.mean), list(first.std)]
    path.write_text("[1")
    assert data.read_statistics(prepared, records, data_dir) == first


def test_default_data_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    assert data.default_data_dir() == tmp_path
    monkeypatch.delenv("TFDS_DATA_DIR")
    assert data.default_data_dir().name == "tensorflow_datasets"
