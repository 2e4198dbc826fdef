"""What a run says while it goes: a progress bar on a terminal, plain lines elsewhere."""

import math
from types import TracebackType
from typing import Self

import rich.console
from rich import progress

from experiments.tracking.run_dir import EpochRecord


def format_scale(loss_scale: float) -> str:
    """Writes a loss scale: `32768`, or `6.1e-05` below one.

    Args:
        loss_scale: the scale.

    Returns:
        Its digits, all of them where it is a whole number.
    """
    return str(int(loss_scale)) if loss_scale == int(loss_scale) else f"{loss_scale:.2g}"


def format_epoch(record: EpochRecord, epochs: int) -> str:
    """Writes the line that follows an epoch.

    Args:
        record: the epoch's.
        epochs: how many there are in all.

    Returns:
        The line.
    """
    speed = record.images_per_second
    return (
        f"epoch {record.epoch}/{epochs}  loss {record.train_loss:.4f}  "
        f"test loss {record.test_loss:.4f}  accuracy {100 * record.test_accuracy:.1f}%  "
        f"loss scale {format_scale(record.loss_scale)}  skipped {record.total_skips}"
        + ("" if math.isnan(speed) else f"  {speed:.0f} images/s")
    )


class Reporter:
    """Prints lines, and on a terminal a bar for the epoch under way.

    Use it as a context manager, so that the bar is gone before anything else is printed.

    Args:
        epochs: how many epochs there are.
        console: where to print; standard output by default.
        is_quiet: whether nothing is printed.
    """

    def __init__(
        self, epochs: int, console: rich.console.Console | None = None, *, is_quiet: bool = False
    ) -> None:
        """Prepares the bar; entering the context shows it."""
        self.epochs = epochs
        self._console = console or rich.console.Console(
            highlight=False, soft_wrap=True, quiet=is_quiet
        )
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[detail]}"),
            progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=is_quiet or not self._console.is_terminal,
        )
        self._task: progress.TaskID | None = None

    def __enter__(self) -> Self:
        """Shows the bar."""
        self._bar.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Takes the bar away."""
        self._bar.stop()

    def line(self, text: str) -> None:
        """Prints a line.

        Args:
            text: the line, printed as it is.
        """
        self._console.print(text, markup=False)

    def start_epoch(self, epoch: int, num_steps: int) -> None:
        """Starts a bar.

        Args:
            epoch: from 1.
            num_steps: how many steps it has.
        """
        self._task = self._bar.add_task(f"epoch {epoch}/{self.epochs}", total=num_steps, detail="")

    def steps_done(self, num_done: int, loss_scale: float, total_skips: int) -> None:
        """Moves the bar.

        Args:
            num_done: steps of this epoch that are done.
            loss_scale: the scale in force.
            total_skips: skipped steps since the start.
        """
        if self._task is not None:
            detail = f"loss scale {format_scale(loss_scale)}  skipped {total_skips}"
            self._bar.update(self._task, completed=num_done, detail=detail)

    def end_epoch(self, record: EpochRecord) -> None:
        """Takes the bar away and prints the epoch's line.

        Args:
            record: the epoch's.
        """
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        self.line(format_epoch(record, self.epochs))
