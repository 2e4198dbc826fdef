"""Panels of a metric by epoch."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullLocator

from experiments.comparison.run_record import RunRecord
from experiments.comparison.statistics import complete_runs, summarize
from experiments.comparison.style import STYLES, add_legend, precisions_of

MAX_MARKERS = 12


def draw_epochs(
    axes: Axes, runs: Sequence[RunRecord], metric: str, label: str, factor: float = 1.0
) -> None:
    """Draws a metric by epoch: the mean of complete runs and the band from lowest to highest.

    Runs that are not complete are thin lines that end with a cross.

    Args:
        axes: where to draw.
        runs: the runs.
        metric: key of a line of metrics.jsonl.
        label: of the vertical axis, with the unit.
        factor: what the metric is multiplied by.
    """
    precisions = precisions_of(runs)
    num_epochs = max((run.config["epochs"] for run in runs), default=1)
    spacing = -(-num_epochs // MAX_MARKERS)
    for number, precision in enumerate(precisions):
        style = STYLES[precision]
        complete = complete_runs(runs, precision)
        by_epoch: dict[int, list[float]] = {}
        for run in complete:
            for epoch, value in run.series(metric):
                by_epoch.setdefault(epoch, []).append(factor * value)
        epochs = sorted(by_epoch)
        summaries = [summary for epoch in epochs if (summary := summarize(by_epoch[epoch]))]
        if epochs:
            count = "1 seed" if len(complete) == 1 else f"mean of {len(complete)} seeds"
            axes.plot(
                epochs,
                [summary.mean for summary in summaries],
                color=style.color,
                linestyle=style.line,
                marker=style.marker,
                markersize=5,
                markevery=(number * spacing // len(precisions), spacing),
                label=f"{precision}, {count}; at the end {summaries[-1].mean:.4g}",
                zorder=3,
            )
        if len(complete) > 1:
            low, high = [[getattr(s, name) for s in summaries] for name in ("low", "high")]
            axes.fill_between(epochs, low, high, color=style.color, alpha=0.13, linewidth=0)
            for edge in (low, high):
                axes.plot(epochs, edge, color=style.color, linestyle=style.line, linewidth=0.6)
            if len(epochs) == 1:
                axes.vlines(epochs, low, high, color=style.color, linewidth=1)
        for run in runs:
            points = run.series(metric)
            if run.precision == precision and not run.is_complete and points:
                axes.plot(
                    [epoch for epoch, _ in points],
                    [factor * value for _, value in points],
                    color=style.color,
                    linestyle=style.line,
                    linewidth=0.8,
                    marker="x",
                    markersize=8,
                    markevery=[-1],
                    label=f"{precision}, seed {run.seed}, not complete",
                )
    axes.set_xlabel("epoch")
    axes.set_ylabel(label)
    axes.set_xlim(0.5, num_epochs + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    add_legend(axes)


def use_log_axis(axes: Axes) -> None:
    """Makes the vertical axis logarithmic, with plain numbers.

    Args:
        axes: where to.
    """
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(NullLocator())


def show_second_half(axes: Axes) -> None:
    """Limits a panel to the second half of the epochs and what it has there, without a legend.

    Args:
        axes: drawn by :func:`draw_epochs`, beside a panel of all epochs that has the legend.
    """
    first, last = axes.get_xlim()
    middle = math.floor((first + last) / 2)
    values = [
        float(value)
        for line in axes.get_lines()
        for epoch, value in np.asarray(line.get_xydata())
        if epoch >= middle
    ]
    if values:
        margin = 0.05 * (max(values) - min(values)) or 0.5
        axes.set_xlim(middle - 0.2, last)
        axes.set_ylim(min(values) - margin, max(values) + margin)
    if legend := axes.get_legend():
        legend.remove()
