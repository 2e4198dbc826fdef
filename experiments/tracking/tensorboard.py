"""TensorBoard event files, so that `tensorboard --logdir runs` shows every run."""

import math
import time
from collections.abc import Iterable
from pathlib import Path

from tensorboardX import RecordWriter
from tensorboardX.proto import event_pb2, summary_pb2

from experiments.errors import UserError
from experiments.steps import StepRecord
from experiments.tracking.run_dir import EpochRecord

FILE_VERSION = "brain.Event:2"

EPOCH_TAGS = {
    "train/epoch_loss": "train_loss",
    "test/loss": "test_loss",
    "test/accuracy": "test_accuracy",
    "speed/images_per_second": "images_per_second",
    "memory/peak_bytes": "peak_memory_bytes",
    "loss_scale/total_skips": "total_skips",
}
"""TensorBoard's name of each number of an epoch."""


class TensorBoardWriter:
    """Writes one event file.

    Every process of a run writes a file of its own. A file begins with the step from which it
    replaces what earlier files hold, so that a resumed run shows no point twice.

    Args:
        path: directory of the run's event files, made where it is missing.
        purge_step: the first step that is replaced; None for a run that starts.
        writes: False where another process writes the file: then nothing happens.

    Raises:
        UserError: where the directory cannot be written.
    """

    def __init__(self, path: Path, *, purge_step: int | None = None, writes: bool = True) -> None:
        """Opens a file that sorts after those of earlier processes."""
        self._scale: tuple[int, float] | None = None
        self._path = path
        self._writer: RecordWriter | None = None
        if not writes:
            return
        try:
            path.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads files in the order of their names.
            name = f"events.out.tfevents.{time.time():017.6f}"
            self._writer = RecordWriter(str(path / name))
        except OSError as error:
            raise self._cannot_write(error) from error
        self._write(event_pb2.Event(file_version=FILE_VERSION))  # pyright: ignore
        if purge_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # pyright: ignore
            self._write(event_pb2.Event(step=purge_step, session_log=start))  # pyright: ignore

    def epoch(self, record: EpochRecord) -> None:
        """Adds an epoch's numbers at its last step.

        Args:
            record: the epoch's; numbers that are not finite are left out.
        """
        for tag, name in EPOCH_TAGS.items():
            self._scalar(tag, record.step, getattr(record, name))

    def steps(self, records: Iterable[StepRecord]) -> None:
        """Adds the loss or the skip of each step, and the changes of the loss scale.

        Args:
            records: steps, in order.
        """
        for record in records:
            if record.applied:
                self.loss(record.step, record.loss)
            else:
                self.skip(record.step)
            if record.next_loss_scale != record.loss_scale:
                self.loss_scale(record.step, record.next_loss_scale)

    def loss(self, step: int, value: float) -> None:
        """Adds the loss of a step.

        Args:
            step: from 1.
            value: the loss; left out where it is not finite.
        """
        self._scalar("train/loss", step, value)

    def loss_scale(self, step: int, value: float) -> None:
        """Adds a change of the loss scale.

        Args:
            step: the step after which the scale is in force.
            value: the scale.
        """
        # TensorBoard joins points by straight lines: one more before a change makes it a step.
        if self._scale is not None and self._scale[0] < step - 1:
            self._scalar("loss_scale/scale", step - 1, self._scale[1])
        self._scalar("loss_scale/scale", step, value)
        self._scale = step, value

    def skip(self, step: int) -> None:
        """Marks a skipped step.

        Args:
            step: from 1.
        """
        self._scalar("loss_scale/skipped_step", step, 1.0)

    def flush(self) -> None:
        """Returns when all that was added is on disk.

        Raises:
            UserError: where it cannot be written.
        """
        if self._writer is None:
            return
        try:
            self._writer.flush()
        except OSError as error:
            raise self._cannot_write(error) from error

    def close(self) -> None:
        """Flushes and closes the file.

        Raises:
            UserError: where it cannot be written.
        """
        self.flush()
        if self._writer is not None:
            self._writer.close()

    def _scalar(self, tag: str, step: int, value: float) -> None:
        if not math.isfinite(value):
            return
        point = summary_pb2.Summary.Value(tag=tag, simple_value=value)  # pyright: ignore
        summary = summary_pb2.Summary(value=[point])  # pyright: ignore
        self._write(event_pb2.Event(step=step, summary=summary))  # pyright: ignore

    def _write(self, event: event_pb2.Event) -> None:  # pyright: ignore
        if self._writer is None:
            return
        event.wall_time = time.time()
        try:
            self._writer.write(event.SerializeToString())
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> UserError:
        return UserError(
            f"{self._path} cannot be written: {error.strerror or error}. Free some space or make "
            "it writable, and go on with --resume."
        )
