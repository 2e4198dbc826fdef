"""Files that a reader sees whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: Path, mode: str) -> Iterator[IO[Any]]:
    """Writes a file beside another and puts it in its place when it is complete and on disk.

    Args:
        path: the file to replace, or to make.
        mode: `"w"` or `"wb"`.

    Yields:
        The file to write to.

    Raises:
        OSError: where it cannot be written; the former file is still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open(mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
