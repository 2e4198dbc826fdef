"""Finding sets that TFDS has prepared, and what is said of those that do not serve."""

import json

import image_sets
import pytest

from experiments.errors import UserError
from experiments.inputs.datasets.prepared import find_set, list_sets


def test_photos_are_described_and_measured_on_the_labelled_split(photos_dir):
    prepared = find_set("photos", photos_dir)
    assert prepared.name == "photos/1.0.0"
    assert (prepared.num_train, prepared.num_test, prepared.num_classes) == (43, 11, 7)
    assert prepared.image_shape == (None, None, 3)
    # The labels of the test split are -1, as imagenet2012's.
    assert prepared.test_split == "validation"


def test_the_test_split_is_preferred_where_it_has_labels(data_dir):
    prepared = find_set("digits", data_dir)
    assert (prepared.test_split, prepared.num_test, prepared.channels) == ("test", 360, 1)


def test_newest_version_is_taken_unless_one_is_named(tmp_path):
    folder = image_sets.prepare(image_sets.GreyPhotos, tmp_path)
    for version in ("9.0.0", "10.0.0", "11.0.0.incompleteABC"):
        copy = folder.with_name(version)
        copy.mkdir()
        for file in folder.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
    assert find_set("grey_photos", tmp_path).folder.name == "10.0.0"
    assert find_set("grey_photos:9.0.0", tmp_path).folder.name == "9.0.0"
    with pytest.raises(UserError, match="grey_photos:2.0.0 is not prepared"):
        find_set("grey_photos:2.0.0", tmp_path)


def test_a_configuration_is_named_or_asked_for(tmp_path):
    image_sets.prepare(image_sets.Sized, tmp_path, config="small")
    assert find_set("sized/small", tmp_path).name == "sized/small/2.0.0"
    with pytest.raises(UserError, match="needs a configuration: one of sized/small"):
        find_set("sized", tmp_path)


def test_set_that_is_not_prepared_says_what_is_and_how_to_prepare(photos_dir):
    with pytest.raises(UserError) as caught:
        find_set("svhn_cropped", photos_dir)
    message = str(caught.value)
    assert "Prepared there: grey_photos, photos." in message
    assert f"tfds build svhn_cropped --data_dir {photos_dir} --file_format array_record" in message
    assert list_sets(photos_dir / "absent") == []


@pytest.mark.parametrize(
    ("builder_class", "expected"),
    [
        (image_sets.NoLabels, r"label \(Scalar\)"),
        (image_sets.NoImages, r"photo \(Image\)"),
        (image_sets.NoTest, "it has train"),
        (image_sets.Deep, "dtype uint16"),
    ],
)
def test_set_that_is_not_for_image_classification_is_refused(tmp_path, builder_class, expected):
    folder = image_sets.prepare(builder_class, tmp_path)
    with pytest.raises(UserError, match=expected) as caught:
        find_set(builder_class.name, tmp_path)
    assert str(folder) in str(caught.value)
    assert "--dataset" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (json.dumps({"fileFormat": "tfrecord"}), "tfds convert_format"),
        (json.dumps({}), "in tfrecord format"),
        ("{", "is damaged"),
        (None, "is damaged"),
    ],
)
def test_other_formats_and_damage_are_named(tmp_path, content, expected):
    folder = tmp_path / "mnist" / "3.0.1"
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "dataset_info.json").write_text(content)
    with pytest.raises(UserError, match=expected) as caught:
        find_set("mnist", tmp_path)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["../photos", "", "/etc", "a b", "photos:new"])
def test_what_is_no_name_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="is not the name of a TFDS set"):
        find_set(name, tmp_path)
