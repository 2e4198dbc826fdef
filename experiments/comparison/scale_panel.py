"""The panel of the loss scale by step."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from experiments.comparison.run_record import RunRecord
from experiments.comparison.style import STYLES, add_legend, write_text


def scaled_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Returns the runs whose loss scale is not 1 throughout, or that skipped steps.

    Args:
        runs: the runs.
    """
    return [run for run in runs if run.skips or any(point.loss_scale != 1 for point in run.scales)]


def scale_limits(runs: Sequence[RunRecord]) -> tuple[float, float]:
    """Returns an octave below the smallest loss scale of runs, and one above the largest.

    Args:
        runs: at least one.
    """
    scales = [point.loss_scale for run in runs for point in (*run.scales, *run.skips)]
    return min(scales) / 2, max(scales) * 2


def draw_loss_scale(axes: Axes, runs: Sequence[RunRecord]) -> None:
    """Draws the loss scale by step, with a cross for every skipped step.

    Args:
        axes: where to draw.
        runs: few of them, as lines cover one another; from :func:`scaled_runs`.
    """
    if not runs:
        axes.set_xticks([])
        axes.set_yticks([])
        write_text(axes, "the loss scale is 1 in all runs")
        return
    for run in runs:
        style = STYLES[run.precision]
        points = list(run.scales)
        axes.step(
            [*(point.step for point in points), run.last_step],
            [point.loss_scale for point in (*points, *points[-1:])],
            where="post",
            color=style.color,
            linestyle="solid" if len(runs) == 1 else style.line,
            label=f"{run.precision}, seed {run.seed}",
        )
        if run.skips:
            axes.plot(
                [point.step for point in run.skips],
                [point.loss_scale for point in run.skips],
                linestyle="none",
                marker="x",
                markersize=7,
                markeredgewidth=1.3,
                color="#222222",
                label=f"its {len(run.skips)} skipped step{'s' if len(run.skips) > 1 else ''}",
                zorder=3,
            )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("step")
    axes.set_ylabel("loss scale (log2 axis)")
    axes.set_ylim(*scale_limits(runs))
    add_legend(axes)
