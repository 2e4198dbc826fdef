"""The picture of a benchmark: ratios to the reference, one panel for each case."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.benchmarks.contenders import REFERENCE
from experiments.benchmarks.rows import Row, Section
from experiments.benchmarks.tables import TITLES
from experiments.comparison.figures import DPI, RC
from experiments.comparison.style import STYLES
from experiments.errors import UserError

PANELS_A_ROW = 3


def draw_ratios(rows: Sequence[Row], path: Path) -> None:
    """Draws the ratios as bars.

    Args:
        rows: those that were not measured are left out.
        path: the PNG file.

    Raises:
        UserError: where it cannot be written.
    """
    measured = [row for row in rows if row.ratio is not None]
    cases: list[tuple[Section, str]] = list({(r.section, r.case): None for r in measured})
    height = math.ceil(len(cases) / PANELS_A_ROW)
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(15, 0.6 + 2.8 * max(height, 1)), layout="constrained")
        for index, (section, case) in enumerate(cases, start=1):
            axes = figure.add_subplot(height, PANELS_A_ROW, index)
            title = "\n".join(textwrap.fill(text, 34) for text in (TITLES[section], case))
            axes.set_title(title, fontsize="medium", loc="left")
            _draw(axes, [row for row in measured if (row.section, row.case) == (section, case)])
        figure.suptitle(f"time as a multiple of {REFERENCE}'s; shorter is faster")
        try:
            figure.savefig(path, dpi=DPI)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error


def _draw(axes: Axes, rows: Sequence[Row]) -> None:
    measured = [(row.contender, row.ratio) for row in rows if row.ratio is not None]
    for position, (contender, ratio) in enumerate(measured):
        precision = next((name for name in ("bfloat16", "float16") if name in contender), "float32")
        style = STYLES[precision]
        axes.barh(
            position,
            ratio,
            0.7,
            facecolor=(style.color, 0.35),
            edgecolor=style.color,
            hatch=style.hatch,
            linewidth=1.2,
        )
        axes.annotate(
            f"{ratio:.2f}",
            (ratio, position),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(measured)), [name for name, _ in measured])
    axes.set_xlim(0, 1.2 * max((ratio for _, ratio in measured), default=1))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
