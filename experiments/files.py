"""Files that a reader sees whole or not at all."""

import contextlib
import fcntl
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


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Lets the processes of this machine, or of a shared file system, enter one after another.

    Args:
        folder: what they share, made where it is missing. Where it cannot be written there is
            nothing to wait for.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / ".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
