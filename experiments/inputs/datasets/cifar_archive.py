"""The archives of CIFAR-10 and CIFAR-100: gzipped tar files of fixed-size records."""

import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.errors import UserError

IMAGE_BYTES = 3 * 32 * 32
"""A record is one or two label bytes, then 32×32 red, green and blue bytes."""


def read_members(archive: Path, names: Sequence[str], url: str) -> list[bytes]:
    """Reads files of the archive's only folder.

    Args:
        archive: a gzipped tar file.
        names: names within the folder.
        url: where the archive comes from, for the message.

    Returns:
        Their contents, in the order of `names`.

    Raises:
        UserError: where the archive is damaged or lacks one.
    """
    contents = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                file = tar.extractfile(member)
                if file is not None and Path(member.name).name in names:
                    contents[Path(member.name).name] = file.read()
        return [contents[name] for name in names]
    except (OSError, EOFError, tarfile.TarError, KeyError) as error:
        raise UserError(
            f"{archive} is not a complete archive ({error}). Download {url} again."
        ) from error


def split_records(content: bytes, num_labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts the content of a file into images and labels.

    Args:
        content: records, one after the other.
        num_labels: label bytes of each record.

    Returns:
        Images, uint8, `[examples, 32, 32, 3]`, and labels, uint8, `[examples, num_labels]`.
    """
    records = np.frombuffer(content, np.uint8).reshape(-1, num_labels + IMAGE_BYTES)
    planes = records[:, num_labels:].reshape(-1, 3, 32, 32)
    return planes.transpose(0, 2, 3, 1), records[:, :num_labels]
