"""Mean and spread over seeds, and what may be said of a precision because of them."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from experiments.comparison.run_record import RunRecord

BASELINE = "float32"
"""The precision that the others are judged by."""

Standing = Literal["within", "above", "below", "unknown"]


@dataclasses.dataclass(frozen=True)
class Summary:
    """A quantity over the runs of one precision.

    Attributes:
        count: the number of runs.
        mean: the mean.
        sd: the sample standard deviation, with `count - 1`; None for a single run.
        low: the smallest value.
        high: the largest value.
    """

    count: int
    mean: float
    sd: float | None
    low: float
    high: float


def summarize(values: Iterable[float | None]) -> Summary | None:
    """Summarizes a quantity.

    Args:
        values: one for each run; None where a run has none.

    Returns:
        The summary, or None where no run has a value.
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Summary(
        count=len(known),
        mean=statistics.mean(known),  # Exact, so that equal values have that mean.
        sd=statistics.stdev(known) if len(known) > 1 else None,
        low=min(known),
        high=max(known),
    )


@dataclasses.dataclass(frozen=True)
class Quantity:
    """Something that every run has a number of.

    Attributes:
        name: what it is, with its unit.
        of: takes it from a run, in that unit.
        digits: decimal places in which it is written.
    """

    name: str
    of: Callable[[RunRecord], float | None]
    digits: int


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


TEST_ACCURACY = Quantity("test accuracy, %", lambda run: _times(100, run.last("test_accuracy")), 2)
TEST_LOSS = Quantity("test loss, nats", lambda run: run.last("test_loss"), 4)
TRAIN_LOSS = Quantity("train loss, nats", lambda run: run.last("train_loss"), 4)
SPEED = Quantity("training speed, images/s", lambda run: run.images_per_second, 1)
PEAK_MEMORY = Quantity("peak memory, MB", lambda run: _times(1e-6, run.peak_memory_bytes), 1)
STEP_MEMORY = Quantity(
    "memory of the step (XLA), MB",
    lambda run: _times(1e-6, run.config.get("step_memory_bytes")),
    1,
)
COMPILE_TIME = Quantity("compilation, s", lambda run: run.config.get("compile_seconds"), 1)
RUN_TIME = Quantity("whole run, s", lambda run: run.last("seconds"), 1)
SKIPS = Quantity("skipped steps", lambda run: run.last("total_skips"), 1)

QUANTITIES = (
    *(TEST_ACCURACY, TEST_LOSS, TRAIN_LOSS, SPEED, PEAK_MEMORY, STEP_MEMORY),
    *(COMPILE_TIME, RUN_TIME, SKIPS),
)


def complete_runs(runs: Iterable[RunRecord], precision: str) -> list[RunRecord]:
    """Returns the runs of a precision that have all their epochs.

    Args:
        runs: any runs.
        precision: the dtype.
    """
    return [run for run in runs if run.precision == precision and run.is_complete]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How the test accuracy of a precision stands to the spread of the baseline.

    Attributes:
        precision: the dtype.
        standing: `within` where the mean is between the smallest and the largest value of the
            baseline's runs, both included; `above` or `below` where it is outside; `unknown`
            where the baseline has fewer than two complete runs, or the precision none.
        own: its runs' accuracy in percent, or None.
        baseline: the baseline's, or None.
    """

    precision: str
    standing: Standing
    own: Summary | None
    baseline: Summary | None


def judge(runs: Sequence[RunRecord], precision: str) -> Verdict:
    """Compares a precision with the baseline.

    Args:
        runs: all runs; those that are not complete do not count.
        precision: the dtype.

    Returns:
        The verdict.
    """
    own = summarize(map(TEST_ACCURACY.of, complete_runs(runs, precision)))
    baseline = summarize(map(TEST_ACCURACY.of, complete_runs(runs, BASELINE)))
    standing: Standing = "unknown"
    if own is not None and baseline is not None and baseline.count > 1:
        if own.mean > baseline.high:
            standing = "above"
        elif own.mean < baseline.low:
            standing = "below"
        else:
            standing = "within"
    return Verdict(precision, standing, own, baseline)
