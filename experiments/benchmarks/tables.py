"""The tables of a benchmark: one for each kind of measurement."""

from collections.abc import Callable, Sequence

from experiments.benchmarks.rows import Row, Section
from experiments.comparison.document import Table

NOTHING = "–"
Column = tuple[str, Callable[[Row], float | int | None], str]

_STEP: Sequence[Column] = (
    ("ms a step", lambda row: _times(1e3, row.median_seconds), ",.2f"),
    ("ratio", lambda row: row.ratio, ".2f"),
    ("CPU ratio", lambda row: row.cpu_ratio, ".2f"),
    ("B/param at rest", lambda row: row.rest_bytes, ".2f"),
    ("B/param temporary", lambda row: row.temp_bytes, ".2f"),
    ("trace, s", lambda row: row.trace_seconds, ".2f"),
    ("compile, s", lambda row: row.compile_seconds, ".2f"),
    ("both, CPU s", lambda row: row.compile_cpu_seconds, ".2f"),
    ("traces", lambda row: row.traces, "d"),
)
_COMPILE: Sequence[Column] = (
    ("both, s", lambda row: row.median_seconds, ".2f"),
    ("ratio", lambda row: row.ratio, ".2f"),
    ("CPU ratio", lambda row: row.cpu_ratio, ".2f"),
    ("trace, s", lambda row: row.trace_seconds, ".2f"),
    ("compile, s", lambda row: row.compile_seconds, ".2f"),
)
_DISPATCH: Sequence[Column] = (
    ("host µs a step", lambda row: _times(1e6, row.median_seconds), ",.1f"),
    ("ratio", lambda row: row.ratio, ".2f"),
    ("arrays in and out", lambda row: row.leaves, "d"),
    ("µs an array", lambda row: _per_leaf(row), ".2f"),
)
_COLUMNS: dict[Section, Sequence[Column]] = {
    "update": _STEP,
    "step": _STEP,
    "compile": _COMPILE,
    "dispatch": _DISPATCH,
}
TITLES: dict[Section, str] = {
    "update": "The update alone",
    "step": "The whole train step",
    "compile": "Compilation of an update, SGD with momentum",
    "dispatch": "Host time of a step with a tiny model",
}
CAPTIONS: dict[Section, str] = {
    "update": "Gradients are given, and of the dtype that a model would give.",
    "step": "Forward and backward pass, update, skip and batch statistics.",
    "compile": "Leaves of 16 by 16. A ratio that stays the same from few to many leaves, and "
    "seconds that grow as they do, mean that compilation is linear in the number of leaves.",
    "dispatch": "Until the call returns, without waiting for the result; a CPU computes so small "
    "an update within the call. An empty program takes and gives the same arrays and computes "
    "nothing: the call's own cost, which grows with the arrays.",
}
RATIO = (
    "Contenders take turns in one process. Times are medians over the turns; a ratio is the median "
    "over the turns of the time divided by that of optax float32 in the same turn. The CPU ratio "
    "is that of the time of all threads of the process, which other processes disturb less."
)


def make_tables(rows: Sequence[Row]) -> list[tuple[Section, list[Table]]]:
    """Arranges rows.

    Args:
        rows: of any sections and cases.

    Returns:
        The sections in order, with a table for each case.
    """
    result = []
    for section, columns in _COLUMNS.items():
        cases = dict.fromkeys(row.case for row in rows if row.section == section)
        tables = [
            Table(
                case,
                ["", *(name for name, _, _ in columns)],
                [_cells(row, columns) for row in _rows_of(rows, section, case)],
            )
            for case in cases
        ]
        if tables:
            result.append((section, tables))
    return result


def make_notes(rows: Sequence[Row]) -> list[str]:
    """Says what was not measured, and why.

    Args:
        rows: of any sections and cases.

    Returns:
        A line for each reason.
    """
    notes = {f"{row.contender}: {row.note}." for row in rows if row.note}
    return sorted(notes)


def _rows_of(rows: Sequence[Row], section: Section, case: str) -> list[Row]:
    return [row for row in rows if (row.section, row.case) == (section, case)]


def _cells(row: Row, columns: Sequence[Column]) -> list[str]:
    values = [of(row) for _, of, _ in columns]
    return [
        row.contender,
        *(
            NOTHING if value is None else f"{value:{digits}}"
            for value, (_, _, digits) in zip(values, columns, strict=True)
        ),
    ]


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _per_leaf(row: Row) -> float | None:
    return _times(1e6 / row.leaves, row.median_seconds) if row.leaves else None
