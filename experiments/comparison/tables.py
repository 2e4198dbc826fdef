"""The tables of a comparison: means and spreads, and the single runs."""

from collections.abc import Sequence

from experiments.comparison.document import Table
from experiments.comparison.run_record import RunRecord
from experiments.comparison.statistics import (
    PEAK_MEMORY,
    QUANTITIES,
    Quantity,
    complete_runs,
    summarize,
)
from experiments.comparison.style import precisions_of

NOTHING = "–"


def summary_table(runs: Sequence[RunRecord], memory_name: str) -> Table:
    """Returns the table of every quantity in every precision.

    Args:
        runs: the runs.
        memory_name: what kind of memory the peak is of.
    """
    precisions = precisions_of(runs)
    complete = {name: complete_runs(runs, name) for name in precisions}
    header = [f"{name}, {len(complete[name])} complete" for name in precisions]
    rows = [
        [_named(quantity, memory_name), *(_cell(quantity, complete[name]) for name in precisions)]
        for quantity in QUANTITIES
    ]
    caption = (
        "Mean ± sample standard deviation (lowest to highest) over the complete runs. Accuracy and "
        "losses are those after the last epoch, speed is the median over a run's epochs, without "
        "evaluation and compilation, memory is the most that a run has used."
    )
    return Table(caption, ["quantity", *header], rows)


def runs_table(runs: Sequence[RunRecord], memory_name: str) -> Table:
    """Returns the table of the single runs.

    Args:
        runs: the runs.
        memory_name: what kind of memory the peak is of.
    """
    rows = [
        [
            f"{run.precision}, seed {run.seed}",
            f"{run.epochs_done} of {run.config['epochs']}",
            *(_number(quantity.of(run), quantity.digits) for quantity in QUANTITIES),
        ]
        for run in runs
    ]
    header = ["run", "epochs", *(_named(quantity, memory_name) for quantity in QUANTITIES)]
    return Table("Each run after the last epoch that it has done.", header, rows)


def _named(quantity: Quantity, memory_name: str) -> str:
    if quantity is PEAK_MEMORY:
        return quantity.name.replace(",", f" ({memory_name}),")
    return quantity.name


def _cell(quantity: Quantity, runs: Sequence[RunRecord]) -> str:
    summary = summarize(map(quantity.of, runs))
    if summary is None:
        return NOTHING
    mean = _number(float(summary.mean), quantity.digits)
    if summary.sd is None:
        return mean
    sd, low, high = (
        _number(value, quantity.digits) for value in (summary.sd, summary.low, summary.high)
    )
    return f"{mean} ± {sd} ({low} to {high})"


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return NOTHING
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"
