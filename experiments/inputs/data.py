"""An image set in memory: decoded once to uint8, and its statistics."""

import concurrent.futures
import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.files import replacing
from experiments.inputs.datasets.prepared import PreparedSet
from experiments.inputs.records import Records

STATISTICS_EXAMPLES = 4096
"""At most so many training images, evenly spaced, make the mean and standard deviation."""

_CHUNK = 256  # examples that a thread decodes at a time


class Split(NamedTuple):
    """Images and labels of one split, on the host or on the device.

    Attributes:
        images: uint8, `[examples, height, width, channels]`.
        labels: int32, `[examples]`.
    """

    images: Any  # shape=(examples, height, width, channels), dtype=uint8
    labels: Any  # shape=(examples,), dtype=int32


class Statistics(NamedTuple):
    """What images are normalised with.

    Attributes:
        mean: mean of each channel, of pixels in 0 to 1.
        std: standard deviation of each channel, likewise.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]


def default_data_dir() -> Path:
    """Returns `$TFDS_DATA_DIR`, or TFDS's own default."""
    return Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def load_split(
    prepared: PreparedSet,
    records: Records,
    data_dir: Path,
    *,
    report: Callable[[str], None] = lambda message: None,
) -> Split:
    """Decodes a split, or reads what an earlier run decoded.

    Args:
        prepared: the set.
        records: the split.
        data_dir: where the decoded arrays are kept, under `decoded`.
        report: called with a line on what is being done, when it takes time.

    Returns:
        The whole split, images as squares.

    Raises:
        UserError: where a record cannot be read.
    """
    is_test = records.split != "train"
    num_examples = prepared.num_test if is_test else prepared.num_train
    stem = _cache_path(prepared, records, data_dir)
    paths = [stem.with_name(f"{stem.name}-{kind}.npy") for kind in ("images", "labels")]
    try:
        split = Split(*(np.load(path) for path in paths))
        if len(split.images) == len(split.labels) == num_examples:
            return split
    except (OSError, ValueError, EOFError):
        pass  # Not decoded yet, or damaged.
    report(f"decoding {num_examples} images of {prepared.name} {records.split}")
    shape = (num_examples, records.image_size, records.image_size, records.channels)
    split = Split(np.empty(shape, np.uint8), np.empty(num_examples, np.int32))

    def decode(start: int) -> None:
        chunk = slice(start, min(start + _CHUNK, num_examples))
        split.images[chunk], split.labels[chunk] = records.read(range(chunk.start, chunk.stop))

    # Pillow decodes without the interpreter lock.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        tasks = [pool.submit(decode, start) for start in range(0, num_examples, _CHUNK)]
        try:
            for task in tasks:
                task.result()
        finally:
            pool.shutdown(cancel_futures=True)
    for path, array in zip(paths, split, strict=True):
        _save(path, lambda file, array=array: np.save(file, array))
    return split


def statistics_indices(num_examples: int) -> np.ndarray:
    """Returns which training examples make the statistics: evenly spaced, or all of a small set.

    Args:
        num_examples: examples in the training split.

    Returns:
        Indices, at most `STATISTICS_EXAMPLES`.
    """
    count = min(num_examples, STATISTICS_EXAMPLES)
    return np.arange(count) * num_examples // count


def read_statistics(
    prepared: PreparedSet,
    records: Records,
    data_dir: Path,
    *,
    report: Callable[[str], None] = lambda message: None,
) -> Statistics:
    """Computes the statistics of a set that is not in memory, or reads an earlier run's.

    Args:
        prepared: the set.
        records: its training split.
        data_dir: where the statistics are kept, under `decoded`.
        report: called with a line on what is being done, when it takes time.

    Returns:
        The same as :func:`mean_and_std` of the images of :func:`statistics_indices`.

    Raises:
        UserError: where a record cannot be read.
    """
    stem = _cache_path(prepared, records, data_dir)
    path = stem.with_name(f"{stem.name}-statistics.json")
    try:
        mean, std = json.loads(path.read_text())
        return Statistics(tuple(map(float, mean)), tuple(map(float, std)))
    except (OSError, ValueError, TypeError):
        pass  # Not computed yet, or damaged.
    indices = statistics_indices(prepared.num_train)
    report(f"measuring mean and standard deviation of {len(indices)} images of {prepared.name}")
    chunks = [indices[i : i + _CHUNK] for i in range(0, len(indices), _CHUNK)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        images = np.concatenate(list(pool.map(lambda chunk: records.read(chunk)[0], chunks)))
    statistics = mean_and_std(images)
    _save(path, lambda file: file.write(json.dumps(statistics).encode()))
    return statistics


def mean_and_std(images: np.ndarray) -> Statistics:
    """Returns the mean and standard deviation of each channel, of pixels in 0 to 1.

    Args:
        images: uint8, `[examples, height, width, channels]`.

    Returns:
        A number for each channel; a standard deviation of 0 becomes 1.
    """
    channels = images.shape[-1]
    counts = [np.bincount(images[..., c].ravel(), minlength=256) for c in range(channels)]
    values = np.arange(256) / 255
    means = [float(np.average(values, weights=count)) for count in counts]
    variances = [
        float(np.average((values - mean) ** 2, weights=count))
        for mean, count in zip(means, counts, strict=True)
    ]
    return Statistics(tuple(means), tuple(float(np.sqrt(v)) or 1.0 for v in variances))


def _cache_path(prepared: PreparedSet, records: Records, data_dir: Path) -> Path:
    # The digest tells this preparation from any other of the same name and version.
    info = (prepared.folder / "dataset_info.json").read_bytes()
    digest = hashlib.sha256(info).hexdigest()[:12]
    name = prepared.name.replace("/", "-")
    frame = f"{records.image_size}" + (
        f"of{records.central_share:.4g}" if records.central_share != 1 else ""
    )
    return data_dir / "decoded" / f"{name}-{records.split}-{frame}-{digest}"


def _save(path: Path, write: Callable[[Any], Any]) -> None:
    """Keeps what was computed, where the directory can be written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, "wb") as file:
            write(file)
