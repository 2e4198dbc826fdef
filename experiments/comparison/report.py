"""The report of a comparison: its content, and report.md and report.html made of it."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from experiments.comparison.document import (
    Block,
    Bullets,
    Code,
    Heading,
    Image,
    Paragraph,
    to_html,
    to_markdown,
)
from experiments.comparison.figures import draw_pictures
from experiments.comparison.plan import Outcome
from experiments.comparison.run_record import RunRecord
from experiments.comparison.statistics import BASELINE, PEAK_MEMORY, judge
from experiments.comparison.style import precisions_of
from experiments.comparison.tables import runs_table, summary_table
from experiments.comparison.wording import DEFINITION, cost_text, verdict_text
from experiments.config import TrainConfig
from experiments.tracking.journal import write_whole


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All that a report is made of.

    Attributes:
        command: the command line of the comparison; empty where it is not known.
        runs: the runs that there are, complete or not.
        missing: names of the runs that were asked for and are not there.
        outcomes: by the name of the run; those of some runs may not be known.
    """

    command: Sequence[str]
    runs: Sequence[RunRecord]
    missing: Sequence[str]
    outcomes: dict[str, Outcome]

    @property
    def title(self) -> str:
        """What is compared."""
        config = self.runs[0].config
        return f"{config.get('dataset') or config['preset']}: precisions compared"

    @property
    def memory_name(self) -> str:
        """What the peak memory is of."""
        kinds = {str(run.config.get("memory_kind")) for run in self.runs}
        return " or ".join(sorted(kinds))

    @property
    def machines(self) -> list[tuple[str, str]]:
        """Device and machine of the runs, each pair once; the machine is empty if unknown."""
        pairs = set()
        for run in self.runs:
            outcome = self.outcomes.get(run.name)
            pairs.add((str(run.config.get("device")), outcome.machine if outcome else ""))
        return sorted(pairs)


def write_report(comparison: Comparison, out: Path) -> None:
    """Writes report.md, report.html and the pictures.

    Args:
        comparison: with at least one run.
        out: where to.

    Raises:
        UserError: where they cannot be written.
    """
    images = draw_pictures(comparison.runs, out, comparison.memory_name)
    blocks = content(comparison, images)
    write_whole(out / "report.md", to_markdown(comparison.title, blocks))
    write_whole(out / "report.html", to_html(comparison.title, blocks, out))


def content(comparison: Comparison, images: Sequence[Image]) -> list[Block]:
    """Returns the report's blocks.

    Args:
        comparison: with at least one run.
        images: the pictures, the one that shows the most first.
    """
    return [
        *_words(comparison),
        *images[:1],
        Heading("Means and spreads"),
        summary_table(comparison.runs, comparison.memory_name),
        Heading("Pictures"),
        *images[1:],
        Heading("Runs"),
        runs_table(comparison.runs, comparison.memory_name),
        *_failures(comparison),
        *_circumstances(comparison),
    ]


def _words(comparison: Comparison) -> list[Block]:
    runs = comparison.runs
    others = [name for name in precisions_of(runs) if name != BASELINE]
    items = [verdict_text(judge(runs, name)) for name in others]
    costs = (cost_text(runs, name, comparison.memory_name) for name in others)
    items += [text for text in costs if text]
    unfinished = [run.name for run in runs if not run.is_complete] + list(comparison.missing)
    if unfinished:
        items.append(f"Not complete, and not counted: {', '.join(unfinished)}.")
    devices, machines = (set(names) for names in zip(*comparison.machines, strict=True))
    if len(devices) > 1 or len(machines - {""}) > 1:
        items.append(
            "Not all runs were made on the same machine: their speed, memory and times do not "
            "compare."
        )
    if not others:
        items.append(f"There is no run of a precision other than {BASELINE}.")
    return [Bullets(items), Paragraph(DEFINITION)]


def _failures(comparison: Comparison) -> list[Block]:
    blocks: list[Block] = []
    stop_reasons = {run.name: run.stop_reason for run in comparison.runs if not run.is_complete}
    names = [*stop_reasons, *comparison.missing]
    for name in names:
        outcome = comparison.outcomes.get(name)
        message = (outcome.message if outcome else "") or stop_reasons.get(name, "")
        if message:
            code = f", exit code {outcome.exit_code}" if outcome and outcome.exit_code else ""
            blocks += [Paragraph(f"{name} stopped{code}:"), Code(message)]
    return [Heading("Failed runs"), *blocks] if blocks else []


def _circumstances(comparison: Comparison) -> list[Block]:
    run = comparison.runs[0]
    config = run.config
    versions = {"Python": config.get("python"), **config.get("versions", {})}
    seeds = sorted({run.seed for run in comparison.runs})
    options = ", ".join(
        f"{field.name} {config[field.name]}"
        for field in dataclasses.fields(TrainConfig)
        if field.name in config
        and field.name not in ("out", "data_dir", "resume", "precision", "seed")
    )
    return [
        Heading("Circumstances"),
        Bullets(
            [
                *(
                    f"Hardware: device {device}; {machine or 'machine not recorded'}."
                    for device, machine in comparison.machines
                ),
                "Versions: " + ", ".join(f"{key} {value}" for key, value in versions.items()) + ".",
                f"Seeds: {', '.join(map(str, seeds))}.",
                f"Model: {config.get('num_params', 0):,} params; {config.get('num_train', 0):,} "
                f"training images, {config.get('steps_per_epoch', 0):,} steps an epoch.",
                f"Options: {options}.",
                f"{PEAK_MEMORY.name.split(',')[0].capitalize()} is that of the device where it "
                "tells, else the process's resident set, with Python, the compiler and the images "
                "in it. The memory of the step is XLA's analysis of the compiled step: arguments, "
                "results and temporaries.",
            ]
        ),
        *_commands(comparison),
    ]


def _commands(comparison: Comparison) -> list[Block]:
    trainings = [
        shlex.join(["python", "-m", "experiments.train", *outcome.args])
        for outcome in comparison.outcomes.values()
    ]
    commands = [shlex.join(comparison.command)] if comparison.command else []
    if not commands and not trainings:
        return []
    return [
        Paragraph("The command of this comparison, and those that it ran:"),
        Code("\n".join(commands + trainings)),
    ]
