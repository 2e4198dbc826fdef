"""Panels of bars: a quantity in each precision."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from experiments.comparison.run_record import RunRecord
from experiments.comparison.statistics import Quantity, complete_runs, summarize
from experiments.comparison.style import STYLES, precisions_of, write_text


def draw_bars(
    axes: Axes, runs: Sequence[RunRecord], quantities: Sequence[Quantity], label: str
) -> None:
    """Draws the mean of complete runs as bars from zero, with the range and each run's value.

    Args:
        axes: where to draw.
        runs: the runs; those that are not complete do not count.
        quantities: one bar for each, in every precision; the second and later ones are paler.
        label: of the vertical axis, with the unit.
    """
    precisions = [p for p in precisions_of(runs) if complete_runs(runs, p)]
    width = 0.8 / len(quantities)
    top = 0.0
    for column, precision in enumerate(precisions):
        style = STYLES[precision]
        for index, quantity in enumerate(quantities):
            values = [quantity.of(run) for run in complete_runs(runs, precision)]
            summary = summarize(values)
            if summary is None:
                continue
            x = column + (index - (len(quantities) - 1) / 2) * width
            axes.bar(
                x,
                summary.mean,
                width * 0.9,
                facecolor="white" if index else (style.color, 0.35),
                edgecolor=style.color,
                hatch=style.hatch,
                linewidth=1.2,
            )
            if summary.count > 1:
                axes.vlines(x, summary.low, summary.high, color="black", linewidth=2, zorder=3)
            known = [value for value in values if value is not None]
            axes.plot([x] * len(known), known, "_", color="black", markersize=10, zorder=4)
            axes.annotate(
                f"{summary.mean:,.{0 if summary.mean >= 100 else 1}f}",
                (x, summary.high),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                fontsize="small",
            )
            top = max(top, summary.high)
    axes.set_xticks(range(len(precisions)), precisions)
    axes.set_xlim(-0.6, len(precisions) - 0.4)
    axes.set_ylim(0, top * 1.15 or 1)
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.grid(visible=False, axis="x")
    if not precisions:
        write_text(axes, "no complete run yet")
