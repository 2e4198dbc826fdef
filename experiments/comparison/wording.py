"""What a comparison says in words."""

from collections.abc import Sequence

from experiments.comparison.run_record import RunRecord
from experiments.comparison.statistics import (
    BASELINE,
    PEAK_MEMORY,
    SPEED,
    Summary,
    Verdict,
    complete_runs,
    summarize,
)

DEFINITION = (
    f"A precision is within {BASELINE}'s spread where its mean test accuracy after the last epoch, "
    f"over its complete runs, is not below the lowest and not above the highest of {BASELINE}'s "
    "complete runs. Above counts as not worse, below as worse. This is no statistical test: with "
    "few seeds the spread is itself uncertain."
)


def verdict_text(verdict: Verdict) -> str:
    """Says how a precision stands to the baseline.

    Args:
        verdict: from `statistics.judge`.

    Returns:
        One or two sentences.
    """
    name, own, baseline = verdict.precision, verdict.own, verdict.baseline
    if own is None:
        return f"{name}: no complete run, so nothing can be said."
    accuracy = f"{'mean ' if own.count > 1 else ''}test accuracy {own.mean:.2f} % ({seeds(own)})"
    if baseline is None:
        return f"{name}: {accuracy}; {BASELINE} has no complete run to compare with."
    difference = own.mean - baseline.mean
    if verdict.standing == "unknown":
        return (
            f"{name}: {accuracy} against {baseline.mean:.2f} % of {BASELINE} ({seeds(baseline)}), "
            f"a difference of {difference:+.2f} points. With a single {BASELINE} run no spread is "
            "known, so this does not tell whether they differ."
        )
    judgement = {
        "within": f"is within {BASELINE}'s spread",
        "above": f"is above {BASELINE}'s spread, so not worse",
        "below": f"is below {BASELINE}'s spread, so worse",
    }[verdict.standing]
    return (
        f"{name} {judgement}: {accuracy}, {BASELINE}'s {seeds(baseline)} reach "
        f"from {baseline.low:.2f} to {baseline.high:.2f} % with mean {baseline.mean:.2f} %; the "
        f"means differ by {difference:+.2f} points."
    )


def cost_text(runs: Sequence[RunRecord], precision: str, memory_name: str) -> str | None:
    """Says how fast a precision is and how much memory it takes, against the baseline.

    Args:
        runs: all runs; those that are not complete do not count.
        precision: the dtype.
        memory_name: what kind of memory the peak is of.

    Returns:
        A sentence, or None where there is nothing to compare.
    """
    parts = []
    for quantity, what, unit in (
        (SPEED, "training speed", "images/s"),
        (PEAK_MEMORY, f"peak {memory_name}{' memory' if memory_name == 'device' else ''}", "MB"),
    ):
        own = summarize(map(quantity.of, complete_runs(runs, precision)))
        baseline = summarize(map(quantity.of, complete_runs(runs, BASELINE)))
        if own is not None and baseline is not None and baseline.mean > 0:
            parts.append(
                f"{own.mean / baseline.mean:.2f} times its {what} "
                f"({own.mean:,.0f} against {baseline.mean:,.0f} {unit})"
            )
    return f"{precision} against {BASELINE}: {', '.join(parts)}." if parts else None


def seeds(summary: Summary) -> str:
    """Returns the number of runs, in words.

    Args:
        summary: of those runs.
    """
    return "1 seed" if summary.count == 1 else f"{summary.count} seeds"
