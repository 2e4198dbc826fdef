"""The pictures of a comparison, as PNG files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments.comparison.bars import draw_bars
from experiments.comparison.curves import draw_epochs, show_second_half, use_log_axis
from experiments.comparison.document import Image
from experiments.comparison.run_record import RunRecord
from experiments.comparison.scale_panel import draw_loss_scale, scale_limits, scaled_runs
from experiments.comparison.statistics import COMPILE_TIME, PEAK_MEMORY, SPEED, STEP_MEMORY
from experiments.errors import UserError

DPI = 150
RC: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.3,
    "hatch.linewidth": 0.6,
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
ACCURACY_LABEL = "test accuracy (%)"
SPEED_LABEL = "training speed (images/s)"


def draw_pictures(runs: Sequence[RunRecord], out: Path, memory_name: str) -> list[Image]:
    """Draws all pictures of a comparison.

    Args:
        runs: the runs, complete or not.
        out: directory of the PNG files.
        memory_name: what kind of memory the peak is of.

    Returns:
        The pictures, the one that shows the most first.

    Raises:
        UserError: where they cannot be written.
    """
    spread = "Lines are means over seeds, bands reach from the lowest seed to the highest."
    with matplotlib.rc_context(RC):
        images = {
            Image(
                "overview.png",
                "Accuracy, loss scale, speed and memory",
                f"{spread} The loss scale is that of one seed. Bars are means over seeds.",
            ): _overview(runs, memory_name),
            Image(
                "accuracy.png",
                "Test accuracy by epoch",
                f"Accuracy on the test split after each epoch. {spread}",
            ): _accuracy(runs),
            Image(
                "loss.png",
                "Test loss and train loss by epoch",
                "Cross-entropy on the test split after each epoch, and its mean over the epoch's "
                f"training steps, on logarithmic axes. {spread}",
            ): _loss(runs),
            Image(
                "loss_scale.png",
                "Loss scale by step, and the steps that were skipped",
                "A cross is a step that was skipped because its gradients were not finite, at the "
                "scale that it was made with. Runs whose loss scale is 1 throughout are left out.",
            ): _loss_scale(runs),
            Image(
                "cost.png",
                "Speed, memory and compilation",
                "Bars are means over seeds, black lines reach from the lowest seed to the highest, "
                f"dashes are single runs. Peak memory is that of the {memory_name}.",
            ): _cost(runs, memory_name),
        }
        for image, figure in images.items():
            try:
                figure.savefig(out / image.file, dpi=DPI)
            except OSError as error:
                raise UserError(
                    f"{out / image.file} cannot be written: {error.strerror or error}. Free some "
                    "space or make it writable, and make the report with --report-only."
                ) from error
    return list(images)


def _overview(runs: Sequence[RunRecord], memory_name: str) -> Figure:
    figure = Figure(figsize=(12, 8.5), layout="constrained")
    (accuracy, scale), (speed, memory) = figure.subplots(2, 2)
    draw_epochs(accuracy, runs, "test_accuracy", ACCURACY_LABEL, 100)
    scaled = scaled_runs(runs)
    draw_loss_scale(scale, [run for run in scaled if run.seed == scaled[0].seed])
    draw_bars(speed, runs, [SPEED], SPEED_LABEL)
    draw_bars(memory, runs, [PEAK_MEMORY], f"peak memory, {memory_name} (MB)")
    for axes, title in (
        (accuracy, "test accuracy"),
        (scale, "loss scale"),
        (speed, "speed"),
        (memory, "memory"),
    ):
        axes.set_title(title)
    return figure


def _accuracy(runs: Sequence[RunRecord]) -> Figure:
    figure = Figure(figsize=(12, 5), layout="constrained")
    whole, second_half = figure.subplots(1, 2)
    for axes in (whole, second_half):
        draw_epochs(axes, runs, "test_accuracy", ACCURACY_LABEL, 100)
    whole.set_title("all epochs")
    second_half.set_title("second half, enlarged")
    show_second_half(second_half)
    return figure


def _loss(runs: Sequence[RunRecord]) -> Figure:
    figure = Figure(figsize=(12, 5), layout="constrained")
    test, train = figure.subplots(1, 2, sharey=True)
    for axes, metric, label in (
        (test, "test_loss", "test loss (nats)"),
        (train, "train_loss", "train loss (nats)"),
    ):
        draw_epochs(axes, runs, metric, label)
        use_log_axis(axes)
        axes.tick_params(labelleft=True)
    return figure


def _loss_scale(runs: Sequence[RunRecord]) -> Figure:
    shown = [[run] for run in scaled_runs(runs)] or [[]]
    figure = Figure(figsize=(10, 1 + 2.4 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, panel_runs in zip(panels, shown, strict=True):
        draw_loss_scale(axes, panel_runs)
        axes.label_outer()
    if panel_runs := scaled_runs(runs):
        panels[0].set_ylim(*scale_limits(panel_runs))
    return figure


def _cost(runs: Sequence[RunRecord], memory_name: str) -> Figure:
    figure = Figure(figsize=(13, 5), layout="constrained")
    speed, memory, compilation = figure.subplots(1, 3, width_ratios=(1, 1.5, 1))
    draw_bars(speed, runs, [SPEED], SPEED_LABEL)
    draw_bars(memory, runs, [PEAK_MEMORY, STEP_MEMORY], "memory (MB)")
    draw_bars(compilation, runs, [COMPILE_TIME], "compilation (s)")
    speed.set_title("speed")
    memory.set_title(f"filled: peak, {memory_name}; white: one step, by XLA", fontsize="medium")
    compilation.set_title("compilation")
    return figure
