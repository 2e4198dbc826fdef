"""TFDS builders, offline: what they prepare, and what they say when they cannot."""

import dataclasses
import json
import time

import numpy as np
import pytest
import tensorflow_datasets as tfds

from experiments.errors import UserError
from experiments.inputs import datasets
from experiments.inputs.datasets import cifar10, cifar100, fashion_mnist, preparation
from experiments.inputs.datasets.cifar_archive import read_members
from experiments.inputs.datasets.preparation import PROBE_SECONDS
from experiments.inputs.datasets.prepared import find_set


def read_all(builder, split):
    source = builder.as_data_source(split=split)
    examples = [source[index] for index in range(len(source))]
    return np.stack([e["image"] for e in examples]), np.array([e["label"] for e in examples])


def assert_same_examples(actual, expected):
    """TFDS shuffles when it prepares: the examples must be the same as a set."""
    keys = [
        sorted((image.tobytes(), int(label)) for image, label in zip(*arrays, strict=True))
        for arrays in (actual, expected)
    ]
    assert keys[0] == keys[1]


def test_digits_splits_by_writer_and_keeps_every_pixel(data_dir):
    from sklearn.datasets import load_digits

    digits = load_digits()
    builder = datasets.prepare(datasets.source("digits"), data_dir)
    for split, rows in (("train", slice(0, 1437)), ("test", slice(1437, 1797))):
        pixels = np.rint(digits["images"][rows] * 255 / 16).astype(np.uint8)[..., None]
        assert_same_examples(read_all(builder, split), (pixels, digits["target"][rows]))


def test_prepared_set_is_array_record_and_not_prepared_twice(data_dir):
    lines = []
    datasets.prepare(datasets.source("digits"), data_dir)
    info = json.loads((data_dir / "digits" / "1.0.0" / "dataset_info.json").read_text())
    assert info["fileFormat"] == "array_record"
    datasets.prepare(datasets.source("digits"), data_dir, report=lines.append)
    assert lines == []


def test_fashion_mnist_reads_debian_files(tmp_path, fashion_mnist_files):
    builder = datasets.prepare(fashion_mnist.FASHION_MNIST, tmp_path / "tfds")
    for split, expected in fashion_mnist_files.items():
        assert_same_examples(read_all(builder, split), expected)
    stock = tfds.data_source("fashion_mnist", split="test", data_dir=tmp_path / "tfds")
    assert len(stock) == 5


def test_damaged_idx_file_is_named(tmp_path, fashion_mnist_files):
    path = fashion_mnist.DEBIAN_DIR / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=str(path)):
        datasets.prepare(fashion_mnist.FASHION_MNIST, tmp_path / "tfds")


def test_cifar10_archive_is_read_pixel_exact_by_stock_tfds(cifar10_archive):
    data_dir, arrays = cifar10_archive
    builder = datasets.prepare(cifar10.CIFAR10, data_dir)
    assert builder.info.features["label"].names == [f"class{i}" for i in range(10)]
    for split, expected in arrays.items():
        assert_same_examples(read_all(builder, split), expected)
        stock = tfds.data_source("cifar10", split=split, data_dir=data_dir)
        images = np.stack([stock[i]["image"] for i in range(len(stock))])
        labels = np.array([stock[i]["label"] for i in range(len(stock))])
        assert_same_examples((images, labels), expected)


def test_cifar100_archive_is_read_with_fine_and_coarse_labels(cifar100_archive):
    data_dir, arrays = cifar100_archive
    builder = datasets.prepare(cifar100.CIFAR100, data_dir)
    assert builder.info.features["label"].names == [f"fine{i}" for i in range(100)]
    assert builder.info.features["coarse_label"].names == [f"coarse{i}" for i in range(20)]
    for split, (images, fine, coarse) in arrays.items():
        assert_same_examples(read_all(builder, split), (images, fine))
        stock = tfds.data_source("cifar100", split=split, data_dir=data_dir)
        examples = [stock[i] for i in range(len(stock))]
        actual = np.stack([e["image"] for e in examples]), [e["coarse_label"] for e in examples]
        assert_same_examples(actual, (images, coarse))


def test_cifar100_knows_the_checksum_of_the_real_archive():
    (url_info,) = cifar100.Cifar100.url_infos.values()
    assert url_info.filename == "cifar-100-binary.tar.gz"
    assert url_info.size == 168_513_733


def test_damaged_archive_is_named(cifar100_archive):
    archive = cifar100_archive[0] / "downloads" / "manual" / "cifar-100-binary.tar.gz"
    with pytest.raises(UserError, match=f"{archive} is not a complete archive"):
        read_members(archive, ["absent.bin"], cifar100.URL)


def test_small_archive_is_not_mistaken_for_the_set(cifar10_archive):
    with pytest.raises(UserError, match="20 examples where 50000 are expected"):
        find_set("cifar10", cifar10_archive[0])


def test_wrong_archive_is_refused(cifar10_archive):
    data_dir, _ = cifar10_archive
    archive = data_dir / "downloads" / "manual" / "cifar-10-binary.tar.gz"
    archive.write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(UserError, match="not the expected archive"):
        datasets.prepare(cifar10.CIFAR10, data_dir)


def test_unreachable_host_says_what_to_download_and_where_to_put_it(tmp_path, monkeypatch):
    url = "https://host.invalid/cifar-10-binary.tar.gz"
    url_info = next(iter(cifar10.Cifar10.url_infos.values()))
    monkeypatch.setattr(cifar10.Cifar10, "url_infos", {url: url_info})
    start = time.perf_counter()
    with pytest.raises(UserError) as caught:
        datasets.prepare(cifar10.CIFAR10, tmp_path)
    assert time.perf_counter() - start < 10
    message = str(caught.value)
    assert url in message
    assert str(tmp_path / "downloads" / "manual" / "cifar-10-binary.tar.gz") in message


def test_host_that_does_not_answer_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "PROBE_SECONDS", 0.2)

    def never(url, **options):
        time.sleep(1)
        raise preparation.requests.ConnectTimeout

    monkeypatch.setattr(preparation.requests, "get", never)
    with pytest.raises(UserError, match="did not answer within 0.2 s"):
        datasets.prepare(cifar10.CIFAR10, tmp_path)
    assert PROBE_SECONDS < 10


def test_unreachable_fashion_mnist_names_the_debian_package(tmp_path, monkeypatch):
    monkeypatch.setattr(fashion_mnist, "DEBIAN_DIR", tmp_path / "absent")
    urls = {
        f"https://host.invalid/{name}": dataclasses.replace(url_info)
        for (name, url_info) in zip(
            "abcd", fashion_mnist.FashionMNIST.url_infos.values(), strict=True
        )
    }
    monkeypatch.setattr(fashion_mnist.FashionMNIST, "url_infos", urls)
    with pytest.raises(UserError, match="apt-get install dataset-fashion-mnist"):
        datasets.prepare(fashion_mnist.FASHION_MNIST, tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"name": "digits", "fileFormat": "tfrecord"}', "is in tfrecord format"),
        ('{"name": "digits"}', "is in tfrecord format"),
        ("{", "is damaged"),
        (None, "is damaged"),
    ],
)
def test_unusable_prepared_set_is_refused(tmp_path, content, expected):
    prepared = tmp_path / "digits" / "1.0.0"
    prepared.mkdir(parents=True)
    if content is not None:
        (prepared / "dataset_info.json").write_text(content)
    with pytest.raises(UserError, match=expected) as caught:
        datasets.prepare(datasets.source("digits"), tmp_path)
    assert str(prepared) in str(caught.value)


def test_data_dir_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--data-dir"):
        datasets.prepare(datasets.source("digits"), tmp_path / "file" / "tfds")


def test_unknown_set():
    with pytest.raises(ValueError, match="got 'mnist'"):
        datasets.source("mnist")
