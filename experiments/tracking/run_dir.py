"""The directory of a run: configuration, metrics, events and checkpoints, safe from other runs."""

import dataclasses
import fcntl
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import IO, Any

from experiments.config import TrainConfig
from experiments.errors import UserError
from experiments.tracking.identity import config_values
from experiments.tracking.journal import Journal, write_whole

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
LOCK_FILE = ".lock"
RUN_FILES = (CONFIG_FILE, METRICS_FILE, EVENTS_FILE, CHECKPOINTS, TENSORBOARD, "damaged")


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """What is known after an epoch: one line of metrics.jsonl.

    Attributes:
        epoch: from 1.
        step: steps taken.
        train_loss: mean loss of the steps that were applied.
        test_loss: mean loss over the whole test split.
        test_accuracy: share of 1 of the test split.
        images_per_second: training images a second, without evaluation and compilation; NaN
            where a resumed run had nothing of the epoch left to train.
        loss_scale: the scale of the next step.
        total_skips: skipped steps since the start.
        seconds: run so far, without the time between a stop and its resumption.
        peak_memory_bytes: of the device, or else of the process.
    """

    epoch: int
    step: int
    train_loss: float
    test_loss: float
    test_accuracy: float
    images_per_second: float
    loss_scale: float
    total_skips: int
    seconds: float
    peak_memory_bytes: int


class RunDir:
    """A directory that holds one run, and earlier ones in `earlier-1`, `earlier-2` and so on.

    Args:
        path: the directory, made where it is missing.
        writes: whether this process writes: of several that share the directory, one does.

    Attributes:
        path: the directory.
        writes: whether this process writes.
        metrics: the journal of epochs.
        events: the journal of what happened between.
        checkpoints: directory of the checkpoints.

    Raises:
        UserError: where it cannot be written, is in use, or holds files that are no run's.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        """Makes or takes over the directory."""
        self.path = path
        self.writes = writes
        self.metrics = Journal(path / METRICS_FILE, writes=writes)
        self.events = Journal(path / EVENTS_FILE, writes=writes)
        self.checkpoints = path / CHECKPOINTS
        self.tensorboard = path / TENSORBOARD
        self._lock: IO[str] | None = None
        if writes:
            self._take_over()

    def _take_over(self) -> None:
        path = self.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            names = {entry.name for entry in path.iterdir()}
            # Released by the system when the process ends, however it ends.
            self._lock = (path / LOCK_FILE).open("w")
        except OSError as error:
            raise UserError(
                f"--out {path} cannot be written: {error.strerror or error}. Choose a directory "
                "that can."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise UserError(
                f"--out {path} is in use by another process. Wait for it, or choose another "
                "directory."
            ) from error
        known = (*RUN_FILES, LOCK_FILE)
        if names and not any(name in known or name.startswith("earlier-") for name in names):
            self._lock.close()
            (path / LOCK_FILE).unlink(missing_ok=True)
            raise UserError(
                f"--out {path} holds files that are not a run's. Choose another directory, or an "
                "empty one."
            )

    def close(self) -> None:
        """Lets other processes use the directory."""
        if self._lock is not None:
            self._lock.close()

    def saved_config(self) -> dict[str, Any] | None:
        """Returns what config.json holds, or None where there is none.

        Raises:
            UserError: where it cannot be read.
        """
        path = self.path / CONFIG_FILE
        try:
            config = json.loads(path.read_text())
            if not isinstance(config, dict):
                raise ValueError("it is no JSON object")
            return config
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read ({error}). Start anew without --resume: the run is moved "
                "aside, not deleted."
            ) from error

    def is_complete(self, epochs: int) -> bool:
        """Returns whether the run has all its epochs and the checkpoint of the last.

        Args:
            epochs: how many it should have.
        """
        records = self.metrics.read()
        if not records or records[-1]["epoch"] < epochs:
            return False
        return (self.checkpoints / str(records[-1]["step"])).is_dir()

    def start(self) -> Path | None:
        """Moves an earlier run aside and begins empty journals.

        Returns:
            Where the files of an earlier run went, or None where there was nothing to keep.
        """
        if not self.writes:
            return None
        moved_to = self._move_earlier_run()
        self.metrics.rewrite(())
        self.events.rewrite(())
        return moved_to

    def write_config(self, config: TrainConfig, **facts: Any) -> None:
        """Writes config.json.

        Args:
            config: the run's configuration.
            **facts: what else is known of the run, such as the number of params.

        Raises:
            UserError: where it cannot be written.
        """
        if not self.writes:
            return
        content = {
            **config_values(config),
            **facts,
            "python": platform.python_version(),
            "versions": {
                name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")
            },
        }
        write_whole(self.path / CONFIG_FILE, json.dumps(content, indent=2) + "\n")

    def _move_earlier_run(self) -> Path | None:
        has_metrics = bool(self.metrics.read())
        has_checkpoints = self.checkpoints.is_dir() and any(
            entry.name.isdigit() for entry in self.checkpoints.iterdir()
        )
        if not has_metrics and not has_checkpoints:
            return None  # It did not get so far as to leave anything.
        number = 1
        while (self.path / f"earlier-{number}").exists():
            number += 1
        target = self.path / f"earlier-{number}"
        target.mkdir()
        for file in (self.path / name for name in RUN_FILES):
            if file.exists():
                file.rename(target / file.name)
        return target
