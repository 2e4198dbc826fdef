"""Image sets in their real formats, small, and nothing that reaches out of the test."""

import gzip
import hashlib
import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def environment(tmp_path_factory) -> dict[str, str]:
    """For commands in processes of their own, which share compiled programs across workers."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "COLUMNS": "100",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    """A TFDS data directory that tests of one worker share."""
    return tmp_path_factory.mktemp("tensorflow_datasets")


@pytest.fixture(scope="session")
def photos_dir(tmp_path_factory) -> Path:
    """A TFDS data directory with photos of all sizes, in colour and in grey."""
    import image_sets

    folder = tmp_path_factory.mktemp("photos")
    image_sets.prepare(image_sets.Photos, folder)
    image_sets.prepare(image_sets.GreyPhotos, folder)
    return folder


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return header + array.tobytes()


@pytest.fixture
def fashion_mnist_files(tmp_path, monkeypatch):
    """Four small idx files as Debian's package lays them out; returns images and labels."""
    from experiments.inputs.datasets import fashion_mnist

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
    from experiments.inputs.datasets import cifar10

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
    url_info = write_archive(archive, "cifar-10-batches-bin", members)
    monkeypatch.setattr(cifar10.Cifar10, "url_infos", {cifar10.URL: url_info})
    return tmp_path / "tfds", {
        split: (np.concatenate(images), np.concatenate(labels))
        for split, (images, labels) in arrays.items()
    }


@pytest.fixture
def cifar100_archive(tmp_path, monkeypatch):
    """A small archive in CIFAR-100's binary format, where a user would put it.

    Returns the data directory, and images, fine labels and coarse labels of each split.
    """
    from experiments.inputs.datasets import cifar100

    rng = np.random.default_rng(0)
    members = {
        "coarse_label_names.txt": "\n".join(f"coarse{i}" for i in range(20)).encode() + b"\n",
        "fine_label_names.txt": "\n".join(f"fine{i}" for i in range(100)).encode() + b"\n",
    }
    arrays = {}
    for split, count in (("train", 10), ("test", 4)):
        images = rng.integers(0, 256, (count, 32, 32, 3), np.uint8)
        fine, coarse = (rng.integers(0, size, count).astype(np.uint8) for size in (100, 20))
        planes = images.transpose(0, 3, 1, 2).reshape(count, -1)
        records = np.concatenate([coarse[:, None], fine[:, None], planes], axis=1)
        members[f"{split}.bin"] = records.tobytes()
        arrays[split] = images, fine, coarse
    archive = tmp_path / "tfds" / "downloads" / "manual" / "cifar-100-binary.tar.gz"
    url_info = write_archive(archive, "cifar-100-binary", members)
    monkeypatch.setattr(cifar100.Cifar100, "url_infos", {cifar100.URL: url_info})
    return tmp_path / "tfds", arrays


def write_archive(archive, folder, members):
    """Writes a gzipped tar file with one folder, and returns what TFDS knows of it."""
    from tensorflow_datasets.core.download.checksums import UrlInfo

    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    content = archive.read_bytes()
    checksum = hashlib.sha256(content).hexdigest()
    return UrlInfo(size=len(content), checksum=checksum, filename=archive.name)
