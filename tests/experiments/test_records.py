"""Reading examples by index, and what is said of those that cannot be read."""

import pickle

import image_sets
import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from experiments.errors import UserError
from experiments.inputs.framing import central_square
from experiments.inputs.records import Records


def test_examples_are_those_that_tfds_decodes(photos_dir):
    folder = photos_dir / "photos" / "1.0.0"
    images, labels = Records(str(folder), "train", 3, 16).read([5, 0, 5])
    source = tfds.builder_from_directory(folder).as_data_source(split="train")
    expected = [central_square(Image.fromarray(source[i]["image"]), 16) for i in (5, 0, 5)]
    np.testing.assert_array_equal(images, expected)
    np.testing.assert_array_equal(labels, [source[i]["label"] for i in (5, 0, 5)])
    assert (images.dtype, labels.dtype) == (np.uint8, np.int32)


def test_records_can_be_sent_to_another_process(photos_dir):
    records = Records(str(photos_dir / "photos" / "1.0.0"), "train", 3, 16)
    copy = pickle.loads(pickle.dumps(records))
    np.testing.assert_array_equal(copy.read([1])[0], records.read([1])[0])


class DamagedPhotos(image_sets.GreyPhotos, skip_registration=True):
    """One image of the training split is cut short."""

    def _generate_examples(self, split):
        for index, example in super()._generate_examples(split):
            if split == "train" and index == 17:
                example["image"].truncate(60)
            yield index, example


def find_damaged(records, count):
    """TFDS shuffles when it prepares."""
    for index in range(count):
        try:
            records.read([index])
        except UserError:
            return index
    raise AssertionError("no record is damaged")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    folder = image_sets.prepare(DamagedPhotos, tmp_path_factory.mktemp("damaged"))
    return Records(str(folder), "train", 1, 16)


def test_image_that_cannot_be_decoded_is_named(damaged):
    index = find_damaged(damaged, 43)
    with pytest.raises(UserError, match=f"Record {index} of train in {damaged.folder} cannot be"):
        damaged.read(range(43))


def test_record_without_a_label_is_named(photos_dir):
    records = Records(str(photos_dir / "photos" / "1.0.0"), "test", 3, 16)
    assert records.label(2) == -1
    with pytest.raises(UserError, match=r"Record 2 of test in .* has no label \(-1\)"):
        records.read([2, 3])


def test_record_that_is_not_there_is_named(photos_dir):
    records = Records(str(photos_dir / "photos" / "1.0.0"), "train", 3, 16)
    with pytest.raises(UserError, match="Record 43 of train"):
        records.read([1, 43])
