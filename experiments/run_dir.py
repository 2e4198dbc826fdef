"""The directory of a run: its configuration and its metrics, safe from earlier runs."""

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from experiments.errors import UserError

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
RUN_FILES = (CONFIG_FILE, METRICS_FILE)


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """What is known after an epoch: one line of metrics.jsonl.

    Attributes:
        epoch: from 1.
        train_loss: mean loss of the steps that were applied.
        test_loss: mean loss over the whole test split.
        test_accuracy: share of 1 of the test split.
        images_per_second: training images a second, without evaluation and compilation.
        loss_scale: the scale of the next step.
        total_skips: skipped steps since the start.
        seconds: since the start of the run.
    """

    epoch: int
    train_loss: float
    test_loss: float
    test_accuracy: float
    images_per_second: float
    loss_scale: float
    total_skips: int
    seconds: float


class RunDir:
    """A directory that holds one run, and earlier ones in `earlier-1`, `earlier-2` and so on.

    Args:
        path: the directory, made where it is missing.

    Attributes:
        path: the directory.

    Raises:
        UserError: where it cannot be written, or holds files that are no run's.
    """

    def __init__(self, path: Path) -> None:
        """Makes or takes over the directory."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            names = {entry.name for entry in path.iterdir()}
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise UserError(
                f"--out {path} cannot be written: {error.strerror or error}. Choose a directory "
                "that can."
            ) from error
        if names and not any(name in RUN_FILES or name.startswith("earlier-") for name in names):
            raise UserError(
                f"--out {path} holds files that are not a run's. Choose another directory, or an "
                "empty one."
            )

    def start(self, config: Any, **facts: Any) -> Path | None:
        """Moves an earlier run aside, writes config.json and an empty metrics.jsonl.

        Args:
            config: the run's configuration, a dataclass.
            **facts: what else is known of the run, such as the number of params.

        Returns:
            Where the files of an earlier run went, or None where there was none.
        """
        moved_to = self._move_earlier_run()
        content = {
            **dataclasses.asdict(config),
            **facts,
            "python": platform.python_version(),
            "versions": {
                name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")
            },
        }
        self._write(self.path / CONFIG_FILE, json.dumps(content, indent=2, default=str) + "\n")
        self._write(self.path / METRICS_FILE, "")
        return moved_to

    def append_metrics(self, record: EpochRecord) -> None:
        """Adds a line to metrics.jsonl, on disk when this returns.

        Args:
            record: the epoch's. A number that is not finite becomes null, as JSON has none.
        """
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in dataclasses.asdict(record).items()
        }
        with (self.path / METRICS_FILE).open("a") as file:
            file.write(json.dumps(values) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _move_earlier_run(self) -> Path | None:
        metrics = self.path / METRICS_FILE
        if not metrics.exists() or metrics.stat().st_size == 0:
            return None  # It did not get through an epoch: nothing to keep.
        number = 1
        while (self.path / f"earlier-{number}").exists():
            number += 1
        target = self.path / f"earlier-{number}"
        target.mkdir()
        for file in (self.path / name for name in RUN_FILES):
            if file.exists():
                file.rename(target / file.name)
        return target

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Writes a file so that a reader sees all of it or none."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(path)
