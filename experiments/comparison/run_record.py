"""What a run directory holds, read back: configuration, epochs, loss scale and skipped steps."""

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from experiments.config import Precision
from experiments.errors import UserError
from experiments.tracking.identity import differing_options
from experiments.tracking.journal import Journal
from experiments.tracking.run_dir import CONFIG_FILE, EVENTS_FILE, METRICS_FILE

OWN_OPTIONS = frozenset(
    {"precision", "seed", "out", "data_dir", "resume", "checkpoint_every", "keep"}
)
"""Options in which the runs of one comparison may differ."""


class ScalePoint(NamedTuple):
    """A loss scale and the step after which it is in force, or the skipped step it was used in."""

    step: int
    loss_scale: float


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """One run, complete or not.

    Attributes:
        path: its directory.
        config: all of config.json.
        metrics: the lines of metrics.jsonl.
        scales: the first loss scale and every change of it.
        skips: skipped steps, with the scale that each was made with.
        stop_reason: why it stopped before its end, as its events say; empty if they do not.
    """

    path: Path
    config: Mapping[str, Any]
    metrics: tuple[Mapping[str, Any], ...]
    scales: tuple[ScalePoint, ...]
    skips: tuple[ScalePoint, ...]
    stop_reason: str

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.path.name

    @property
    def precision(self) -> str:
        """Its dtype."""
        return self.config["precision"]

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.config["seed"]

    @property
    def epochs_done(self) -> int:
        """Epochs that have metrics."""
        return self.metrics[-1]["epoch"] if self.metrics else 0

    @property
    def is_complete(self) -> bool:
        """Whether all its epochs have metrics."""
        return self.epochs_done >= self.config["epochs"]

    @property
    def last_step(self) -> int:
        """The last step that anything is known of."""
        steps = [record["step"] for record in self.metrics[-1:]]
        return max([0, *steps, *(point.step for point in (*self.scales, *self.skips))])

    def last(self, name: str) -> float | None:
        """Returns a number of the last epoch, or None where it has none.

        Args:
            name: key of a line of metrics.jsonl.
        """
        return self.metrics[-1].get(name) if self.metrics else None

    def series(self, name: str) -> list[tuple[int, float]]:
        """Returns the epochs that have a number, and the number.

        Args:
            name: key of a line of metrics.jsonl.
        """
        return [
            (record["epoch"], record[name])
            for record in self.metrics
            if record.get(name) is not None
        ]

    @property
    def images_per_second(self) -> float | None:
        """The median over its epochs."""
        values = [value for _, value in self.series("images_per_second")]
        return statistics.median(values) if values else None

    @property
    def peak_memory_bytes(self) -> float | None:
        """The largest of its epochs."""
        return max((value for _, value in self.series("peak_memory_bytes")), default=None)


def read_run(path: Path) -> RunRecord | None:
    """Reads a run directory.

    Args:
        path: the directory; a process may be writing in it.

    Returns:
        The run, or None where there is none yet.

    Raises:
        UserError: names the file that cannot be read.
    """
    config_file = path / CONFIG_FILE
    try:
        config = json.loads(config_file.read_text())
        if config["precision"] not in get_args(Precision):
            raise ValueError(f"precision is {config['precision']}")
        if not all(isinstance(config[name], int) for name in ("seed", "epochs")):
            raise ValueError("seed and epochs are not whole numbers")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{config_file} cannot be read ({error!r}). Delete {path}, or choose another --out."
        ) from error
    events = Journal(path / EVENTS_FILE).read()
    stops = [event for event in events if event["event"] in ("stop", "resume")]
    return RunRecord(
        path=path,
        config=config,
        metrics=tuple(Journal(path / METRICS_FILE).read()),
        scales=_points(events, "loss_scale"),
        skips=_points(events, "skip"),
        stop_reason=stops[-1].get("reason", "") if stops else "",
    )


def check_same_settings(run: RunRecord, expected: Mapping[str, Any], where: str) -> None:
    """Refuses a run that cannot be compared with the others.

    Args:
        run: the run.
        expected: from `identity.config_values`, or another run's `config`.
        where: what `expected` belongs to, for the message.

    Raises:
        UserError: names the options that differ.
    """
    differing = differing_options(run.config, expected, OWN_OPTIONS)
    if differing:
        listed = "; ".join(
            f"{option} is {there} there and {here} {where}"
            for option, (there, here) in differing.items()
        )
        raise UserError(
            f"The run in {run.path} was made with other settings: {listed}. Ask for the same "
            "settings, or choose another --out."
        )


def _points(events: Iterable[Mapping[str, Any]], name: str) -> tuple[ScalePoint, ...]:
    return tuple(
        ScalePoint(event["step"], event["loss_scale"]) for event in events if event["event"] == name
    )
