"""Trains in several precisions and seeds and compares: `python -m experiments.compare --help`."""

import dataclasses
import fcntl
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from experiments.comparison.machine import describe_machine
from experiments.comparison.plan import RUNS, Outcome, Outcomes, PlannedRun, plan_runs
from experiments.comparison.processes import TrainingProcesses
from experiments.comparison.run_record import RunRecord, check_same_settings, read_run
from experiments.config import Precision, Preset
from experiments.errors import UsageError, UserError
from experiments.tracking.identity import config_values
from experiments.tracking.run_dir import LOCK_FILE

PROGRAM = "python -m experiments.compare"
TRAIN_COMMAND = (sys.executable, "-m", "experiments.train")


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """Trains in several precisions, each run in a process of its own, and writes a report.

    Options after `--` go to every training: `python -m experiments.compare digits -- --epochs 2`.
    Runs that are complete are not repeated, and one that was stopped goes on. The report covers
    all runs in --out.

    Raises:
        UsageError: where a value is out of range.
    """

    preset: Annotated[Preset, tyro.conf.Positional] = "digits"
    """The set-up that every run starts from."""
    seeds: int = 3
    """Runs of each precision, with the seeds 0, 1, 2 and so on."""
    precisions: tuple[Precision, ...] = ("float32", "bfloat16", "float16")
    """Dtypes to train in, in this order; float32 is what the others are judged by."""
    out: Annotated[
        Path | None,
        tyro.conf.arg(metavar="PATH", help_behavior_hint="(default: runs/compare-PRESET)"),
    ] = None
    """Directory of the runs, the report and the pictures."""
    report_only: bool = False
    """Trains nothing and reports on the runs that are there."""

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.seeds < 1:
            raise UsageError(f"--seeds must be at least 1, got {self.seeds}.")
        if not self.precisions or len(set(self.precisions)) < len(self.precisions):
            raise UsageError(
                "--precisions must be one or more dtypes, each of them once, got "
                f"{' '.join(self.precisions) or 'none'}."
            )

    @property
    def directory(self) -> Path:
        """Where the comparison writes."""
        return self.out or Path("runs") / f"compare-{self.preset}"


def compare(
    config: CompareConfig,
    train_args: Sequence[str],
    command: Sequence[str],
    processes: TrainingProcesses,
) -> int:
    """Runs what is still to do and writes the report.

    Args:
        config: what to compare.
        train_args: options of every training.
        command: the command line, for the report.
        processes: runs the trainings.

    Returns:
        The exit code: 0, or 1 where a run has failed.

    Raises:
        UserError: where runs do not compare, or the directory is not usable.
        Interrupted: where the process was asked to stop.
    """
    out = config.directory
    planned: list[PlannedRun] = []
    if not config.report_only:
        planned = plan_runs(config.preset, config.precisions, config.seeds, out, train_args)
    elif train_args:
        raise UsageError("--report-only trains nothing: leave out the options after --.")
    with _locked(out):
        outcomes = Outcomes(out)
        read_runs(out, expected=config_values(planned[0].config) if planned else None)
        if planned:
            outcomes.command = tuple(command)
        failed = _train(planned, outcomes, processes)
        _report(out, outcomes, planned)
    if failed:
        print(
            f"error: {len(failed)} of {len(planned)} runs failed: {', '.join(failed)}.",
            file=sys.stderr,
        )
    return 1 if failed else 0


def read_runs(out: Path, expected: Mapping[str, Any] | None = None) -> list[RunRecord]:
    """Reads all runs of a comparison.

    Args:
        out: its directory.
        expected: settings that they must have; those of the first run by default.

    Returns:
        The runs, by precision in the order of the report and by seed.

    Raises:
        UserError: where a file cannot be read, or a run has other settings.
    """
    order: list[str] = list(CompareConfig.precisions)
    paths = filter(Path.is_dir, (out / RUNS).glob("*"))
    runs = [run for run in map(read_run, paths) if run is not None]
    runs.sort(key=lambda run: (order.index(run.precision), run.seed))
    where = "here" if expected is not None else f"in {runs[0].path}" if runs else ""
    for run in runs:
        check_same_settings(run, runs[0].config if expected is None else expected, where)
    return runs


def _train(
    planned: Sequence[PlannedRun], outcomes: Outcomes, processes: TrainingProcesses
) -> list[str]:
    """Returns the names of the runs that failed."""
    failed = []
    machine = describe_machine()
    for number, run in enumerate(planned, start=1):
        title = f"[{number}/{len(planned)}] {run.title}"
        processes.wait_until_free(run.path)
        record = read_run(run.path)
        if record is not None and record.is_complete:
            print(f"{title}: complete, in {run.path}", flush=True)
            continue
        print(title, flush=True)
        outcome = Outcome(run.args, machine)
        outcomes.set(run.path.name, outcome)
        exit_code, message = processes.run([*TRAIN_COMMAND, *run.args])
        outcome = dataclasses.replace(outcome, exit_code=exit_code, message=message)
        outcomes.set(run.path.name, outcome)
        if exit_code != 0:
            failed.append(run.path.name)
    return failed


def _report(out: Path, outcomes: Outcomes, planned: Sequence[PlannedRun]) -> None:
    runs, known = read_runs(out), outcomes.known()
    names = dict.fromkeys([*(run.path.name for run in planned), *known])
    missing = [name for name in names if name not in {run.name for run in runs}]
    if not runs:
        said = [f"{name}: {known[name].message}" for name in missing if name in known]
        raise UserError("\n".join([f"There is no run in {out / RUNS} to report on.", *said]))
    # Imported here, as it takes seconds and needs matplotlib, which training does without.
    from experiments.comparison.report import Comparison, write_report

    write_report(Comparison(outcomes.command, runs, missing, known), out)
    print(f"report in {out / 'report.md'} and {out / 'report.html'}")


def _locked(out: Path) -> Any:
    """Takes the directory for this process; released when the file is closed."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / LOCK_FILE).open("w")
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be written: {error.strerror or error}. Choose a directory that "
            "can."
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise UserError(
            f"--out {out} is in use by another comparison. Wait for it, or choose another "
            "directory."
        ) from error
    return lock


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        args: the arguments; those of the process by default.

    Returns:
        The exit code: 0, or 1 where a run has failed, 2 for wrong arguments, 130 after SIGINT and
        143 after SIGTERM.
    """
    args = list(sys.argv[1:] if args is None else args)
    split = args.index("--") if "--" in args else len(args)
    own_args, train_args = args[:split], args[split + 1 :]
    try:
        config = tyro.cli(CompareConfig, args=own_args, prog=PROGRAM)
        with TrainingProcesses() as processes:
            return compare(config, train_args, [*shlex.split(PROGRAM), *args], processes)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
