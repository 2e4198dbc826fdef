"""Image sets in their real formats, small, and nothing that reaches out of the test."""

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    """A TFDS data directory that tests of one worker share."""
    return tmp_path_factory.mktemp("tensorflow_datasets")


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return header + array.tobytes()


@pytest.fixture
def fashion_mnist_files(tmp_path, monkeypatch):
    """Four small idx files as Debian's package lays them out; returns images and labels."""
    from experiments.datasets import fashion_mnist

    rng = np.random.default_rng(0)
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    arrays = {}
    for split, count in (("train", 12), ("test", 5)):
        images = rng.integers(0, 256, (count, 28, 28), np.uint8)
        labels = rng.integers(0, 10, count).astype(np.uint8)
        for name, array in zip(fashion_mnist.FILES[split], (images, labels), strict=True):
            (folder / name).write_bytes(gzip.compress(idx_bytes(array)))
        arrays[split] = images[..., None], labels
    monkeypatch.setattr(fashion_mnist, "DEBIAN_DIR", folder)
    return arrays


@pytest.fixture
def cifar10_archive(tmp_path, monkeypatch):
    """A small archive in CIFAR-10's binary format, where a user would put it.

    Returns the data directory, and images and labels of each split.
    """
    from tensorflow_datasets.core.download.checksums import UrlInfo

    from experiments.datasets import cifar10

    rng = np.random.default_rng(0)
    arrays = {"train": ([], []), "test": ([], [])}
    members = {"batches.meta.txt": "\n".join(f"class{i}" for i in range(10)).encode() + b"\n\n"}
    for name in [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]:
        images = rng.integers(0, 256, (4, 32, 32, 3), np.uint8)
        labels = rng.integers(0, 10, 4).astype(np.uint8)
        planes = images.transpose(0, 3, 1, 2).reshape(4, -1)
        members[name] = np.concatenate([labels[:, None], planes], axis=1).tobytes()
        split = arrays["test" if name.startswith("test") else "train"]
        split[0].append(images)
        split[1].append(labels)

    archive = tmp_path / "tfds" / "downloads" / "manual" / "cifar-10-binary.tar.gz"
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    content = archive.read_bytes()
    url_info = UrlInfo(
        size=len(content), checksum=hashlib.sha256(content).hexdigest(), filename=archive.name
    )
    monkeypatch.setattr(cifar10.Cifar10, "url_infos", {cifar10.URL: url_info})
    return tmp_path / "tfds", {
        split: (np.concatenate(images), np.concatenate(labels))
        for split, (images, labels) in arrays.items()
    }
