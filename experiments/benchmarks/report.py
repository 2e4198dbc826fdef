"""What a benchmark writes: tables on the terminal, Markdown, JSON and a picture."""

import importlib.metadata
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.table
from rich.console import Console

from experiments.benchmarks.figure import draw_ratios
from experiments.benchmarks.rows import Row
from experiments.benchmarks.tables import CAPTIONS, RATIO, TITLES, make_notes, make_tables
from experiments.comparison.document import (
    Block,
    Bullets,
    Code,
    Heading,
    Image,
    Paragraph,
    to_markdown,
)
from experiments.comparison.machine import describe_machine
from experiments.errors import UserError

PACKAGES = ("jax", "jaxlib", "optax", "flax", "jmp", "numpy", "torch", "torchvision")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def print_tables(console: Console, rows: Sequence[Row]) -> None:
    """Prints the tables.

    Args:
        console: where to.
        rows: what was measured.
    """
    for section, tables in make_tables(rows):
        for content in tables:
            table = rich.table.Table(title=f"{TITLES[section]}: {content.caption}")
            for index, name in enumerate(content.header):
                table.add_column(name, justify="right" if index else "left")
            for cells in content.rows:
                table.add_row(*cells)
            console.print(table)
    for note in make_notes(rows):
        console.print(f"not measured: {note}")


def write_report(rows: Sequence[Row], out: Path, command: str, settings: dict[str, Any]) -> None:
    """Writes `benchmark.json`, `benchmark.md` and `ratios.png`.

    Args:
        rows: what was measured.
        out: the directory.
        command: the command line.
        settings: its options.

    Raises:
        UserError: where a file cannot be written.
    """
    machine, found = describe_machine(), versions()
    packages = ", ".join(f"{name} {version}" for name, version in found.items())
    blocks: list[Block] = [
        Paragraph(f"{machine}; {packages}."),
        Code(command),
        Paragraph(RATIO),
        Image("ratios.png", "Ratios to optax float32", "Shorter is faster."),
    ]
    for section, tables in make_tables(rows):
        blocks += [Heading(TITLES[section]), Paragraph(CAPTIONS[section]), *tables]
    if make_notes(rows):
        blocks += [Heading("Not measured"), Bullets(make_notes(rows))]
    content = {
        "command": command,
        "machine": machine,
        "versions": found,
        "settings": settings,
        "rows": [row.to_json() for row in rows],
    }
    draw_ratios(rows, out / "ratios.png")
    try:
        (out / "benchmark.json").write_text(json.dumps(content, indent=1) + "\n")
        (out / "benchmark.md").write_text(to_markdown("Benchmark", blocks))
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror or error}.") from error
