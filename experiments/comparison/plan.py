"""Which runs a comparison consists of, and what became of them: comparison.json."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from experiments.cli import parse_config
from experiments.config import Precision, TrainConfig
from experiments.errors import UsageError, UserError
from experiments.tracking.journal import write_whole

PLAN_FILE = "comparison.json"
RUNS = "runs"


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One training to do.

    Attributes:
        config: what it runs.
        args: the arguments of `python -m experiments.train`.
    """

    config: TrainConfig
    args: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Its run directory."""
        return self.config.run_dir

    @property
    def title(self) -> str:
        """Its precision and seed, in words."""
        return f"{self.config.precision}, seed {self.config.seed}"


def plan_runs(
    preset: str,
    precisions: Sequence[Precision],
    num_seeds: int,
    out: Path,
    train_args: Sequence[str],
) -> list[PlannedRun]:
    """Lists the runs, all precisions of a seed before the next seed.

    So a drift of the machine, or an early end, meets all precisions alike.

    Args:
        preset: name of the preset.
        precisions: dtypes.
        num_seeds: runs of each precision; their seeds are 0, 1, 2 and so on.
        out: directory of the comparison.
        train_args: further options of each training.

    Returns:
        The runs.

    Raises:
        SystemExit: with code 2 where a training's argument is wrong.
        UsageError: where a value is out of range, or an option is not the user's to set.
    """
    runs = []
    for seed in range(num_seeds):
        for precision in precisions:
            path = out / RUNS / f"{precision}-seed{seed}"
            args = (preset, "--precision", precision, "--seed", str(seed))
            args = (*args, "--out", str(path), "--resume", *train_args)
            config = parse_config(args, prog="python -m experiments.train")
            given = (config.preset, config.precision, config.seed, config.out, config.resume)
            if given != (preset, precision, seed, path, True):
                raise UsageError(
                    f"The options after -- ({' '.join(train_args)}) change the preset, "
                    "--precision, --seed, --out or --resume, which the comparison sets itself. "
                    "Leave those out."
                )
            runs.append(PlannedRun(config, args))
    return runs


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the process of a run ended.

    Attributes:
        args: the arguments of `python -m experiments.train`.
        machine: what it ran on.
        exit_code: of the process; None while it runs, or where the comparison was killed.
        message: the last that it said on standard error, where it failed.
    """

    args: tuple[str, ...]
    machine: str
    exit_code: int | None = None
    message: str = ""


class Outcomes:
    """The outcomes of all runs by their name, kept in comparison.json.

    Args:
        out: directory of the comparison.

    Attributes:
        command: the command line that last trained; saved with the next outcome.

    Raises:
        UserError: where the file cannot be read.
    """

    def __init__(self, out: Path) -> None:
        """Reads what is there."""
        self._path = out / PLAN_FILE
        self._by_name: dict[str, Outcome] = {}
        self.command: tuple[str, ...] = ()
        try:
            content = json.loads(self._path.read_text())
            self.command = tuple(content["command"])
            for name, values in content["runs"].items():
                self._by_name[name] = Outcome(**{**values, "args": tuple(values["args"])})
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{self._path} cannot be read ({error!r}). Delete it: only the commands and the "
                "messages of earlier runs are lost."
            ) from error

    def known(self) -> dict[str, Outcome]:
        """Returns the outcomes by the name of the run."""
        return dict(self._by_name)

    def set(self, name: str, outcome: Outcome) -> None:
        """Adds or replaces an outcome, on disk when this returns.

        Args:
            name: of the run.
            outcome: its new outcome.

        Raises:
            UserError: where the file cannot be written.
        """
        self._by_name[name] = outcome
        content = {
            "command": self.command,
            "runs": {key: vars(value) for key, value in self._by_name.items()},
        }
        write_whole(self._path, json.dumps(content, indent=2) + "\n")
