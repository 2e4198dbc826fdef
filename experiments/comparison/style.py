"""How the pictures look: readable without colour."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from experiments.comparison.run_record import RunRecord


@dataclasses.dataclass(frozen=True)
class Style:
    """How a precision looks: its colours differ in lightness too, and nothing hangs on them."""

    color: str
    line: Any
    marker: str
    hatch: str


STYLES = {
    "float32": Style("#222222", "solid", "o", ""),
    "bfloat16": Style("#d98c00", (0, (5, 2)), "s", "///"),
    "float16": Style("#0072b2", (0, (6, 2, 1, 2)), "^", "..."),
}


def precisions_of(runs: Sequence[RunRecord]) -> list[str]:
    """Returns the precisions that runs have, in the order in which they are shown.

    Args:
        runs: the runs.
    """
    return [precision for precision in STYLES if any(run.precision == precision for run in runs)]


def add_legend(axes: Axes) -> None:
    """Adds a legend, or says that there is nothing to see.

    Args:
        axes: where to.
    """
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(fontsize="small", handlelength=3.5)
    else:
        write_text(axes, "nothing measured yet")


def write_text(axes: Axes, text: str) -> None:
    """Writes in the middle of a panel that has nothing else.

    Args:
        axes: where to.
        text: what to write.
    """
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
