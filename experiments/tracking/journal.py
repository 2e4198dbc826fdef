"""A file of JSON lines that survives a kill: whole lines only, each on disk when it is written."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.errors import UserError
from experiments.files import replacing


class Journal:
    """Records in the order of their steps, one JSON object a line.

    Args:
        path: the file; it need not exist.
        writes: False where another process writes it: then only reading does anything.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        """Takes the path; nothing is written."""
        self.path = path
        self._writes = writes

    def append(self, *records: Mapping[str, Any]) -> None:
        """Adds a line for each record, on disk when this returns.

        Args:
            *records: a number that is not finite becomes null, as JSON has none.

        Raises:
            UserError: where the file cannot be written.
        """
        if not records or not self._writes:
            return
        try:
            with self.path.open("a") as file:
                file.write("".join(_line(record) for record in records))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def read(self) -> list[dict[str, Any]]:
        """Returns the records; a last line that a kill cut short is left out.

        Raises:
            UserError: where the file cannot be read, or another line is no record.
        """
        try:
            lines = self.path.read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{self.path} cannot be read: {error}. Restore it, or move it away."
            ) from error
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                if number == len(lines):
                    break
                raise UserError(
                    f"Line {number} of {self.path} is not JSON ({error}). Mend or delete that line."
                ) from error
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise UserError(
                    f"Line {number} of {self.path} is no record with a step: {line.strip()[:80]}. "
                    "Mend or delete that line."
                )
            records.append(record)
        return records

    def rewrite(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Replaces the file by these records; a reader sees the old file or the new one.

        Args:
            records: all the records that there shall be.

        Raises:
            UserError: where the file cannot be written.
        """
        if self._writes:
            write_whole(self.path, "".join(_line(record) for record in records))

    def cut_after(self, step: int) -> None:
        """Removes the records of later steps: a run that goes on writes them again.

        Args:
            step: the last step that stays.

        Raises:
            UserError: where the file cannot be written.
        """
        self.rewrite(record for record in self.read() if record["step"] <= step)


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a reader sees all of it or the former one.

    Args:
        path: the file.
        text: its content.

    Raises:
        UserError: where it cannot be written.
    """
    try:
        with replacing(path, "w") as file:
            file.write(text)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path} cannot be written: {error.strerror or error}. Free some space or make it "
        "writable, and go on with --resume."
    )


def _line(record: Mapping[str, Any]) -> str:
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(values) + "\n"
