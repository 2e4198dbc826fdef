"""What is measured of a contender."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, Literal

from experiments.benchmarks.timing import median_ratio

Section = Literal["update", "step", "compile", "dispatch"]


@dataclasses.dataclass
class Row:
    """One contender in one case; None is what was not measured.

    Attributes:
        section: what kind of measurement.
        case: what was trained.
        contender: by what.
        note: why nothing was measured.
        seconds: of a step, or of a compilation; one for each turn.
        cpu_seconds: likewise, of all threads of the process together.
        ratio: of `seconds` to the reference's, the median over the turns.
        cpu_ratio: likewise.
        rest_bytes: of params and optimizer state between steps, a param.
        temp_bytes: that XLA allocates during a step, a param.
        leaves: arrays that go in and out of a step.
        trace_seconds: to trace and lower the step.
        compile_seconds: of XLA.
        compile_cpu_seconds: to trace, lower and compile, all threads together.
        traces: in the first five steps.
    """

    section: Section
    case: str
    contender: str
    note: str | None = None
    seconds: list[float] | None = None
    cpu_seconds: list[float] | None = None
    ratio: float | None = None
    cpu_ratio: float | None = None
    rest_bytes: float | None = None
    temp_bytes: float | None = None
    leaves: int | None = None
    trace_seconds: float | None = None
    compile_seconds: float | None = None
    compile_cpu_seconds: float | None = None
    traces: int | None = None

    @property
    def median_seconds(self) -> float | None:
        """The median over the turns."""
        return statistics.median(self.seconds) if self.seconds else None

    def to_json(self) -> dict[str, Any]:
        """Returns all values that were measured."""
        values = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        return values | ({"median_seconds": self.median_seconds} if self.seconds else {})


def add_ratios(rows: Sequence[Row], reference: str) -> None:
    """Compares each row with the reference's of the same case.

    Args:
        rows: of any cases; they are changed.
        reference: the contender that the others are compared with.
    """
    references = {(row.section, row.case): row for row in rows if row.contender == reference}
    for row in rows:
        other = references.get((row.section, row.case))
        if other is None:
            continue
        if row.seconds and other.seconds:
            row.ratio = median_ratio(row.seconds, other.seconds)
        if row.cpu_seconds and other.cpu_seconds and min(other.cpu_seconds) > 0:
            row.cpu_ratio = median_ratio(row.cpu_seconds, other.cpu_seconds)
