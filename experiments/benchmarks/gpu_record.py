"""The results on a GPU: a file that is whole at any moment, and the table for people."""

import json
import os
from pathlib import Path
from typing import Any


class Record:
    """The results so far, written to a file after each.

    Args:
        path: the file.
        content: what stands at its beginning.
    """

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        """Writes the beginning."""
        self._path = path
        self.content = content | {"checks": {}, "measurements": {}, "dropped": []}
        self.write()

    def write(self) -> None:
        """Replaces the file: it is whole at any moment."""
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(part, self._path)


def format_table(content: dict[str, Any]) -> str:
    """Writes the measurements as a table.

    Args:
        content: of the record.

    Returns:
        The table, in Markdown.
    """
    lines = [
        "| measurement | ms a step | images/s | of the bound | program's peak GB | compile s |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, result in content["measurements"].items():
        cells = [
            _number(result.get("milliseconds"), ".2f"),
            _number(result.get("images_per_second"), ",.0f"),
            _number(result.get("bound_share"), ".0%"),
            _number(result.get("program_peak_bytes"), ".2f", 1e-9),
            _number(result.get("compile_seconds"), ".0f"),
        ]
        failure = result.get("error") or result.get("not_measured")
        note = f" ({failure})".replace("|", "/") if failure else ""
        lines.append(f"| {name}{note} | " + " | ".join(cells) + " |")
    if content["dropped"]:
        lines += ["", "Dropped, as the time was up: " + "; ".join(content["dropped"]) + "."]
    return "\n".join(lines)


def _number(value: float | None, digits: str, factor: float = 1) -> str:
    return "–" if value is None else f"{value * factor:{digits}}"
