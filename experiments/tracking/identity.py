"""Whether two configurations are one run: what a run that goes on may change, and what not."""

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from experiments.config import TrainConfig, option_name
from experiments.errors import UserError

FREE_OPTIONS = frozenset(
    {
        *("out", "data_dir", "resume", "checkpoint_every", "keep", "max_consecutive_skips"),
        *("epochs", "input", "loader_workers", "blocks"),
        *("data_parallel", "shard_optimizer", "coordinator", "num_processes", "process_id"),
    }
)
"""Options that change nothing of what a step computes, or its rounding alone: they may differ when
a run is resumed."""


def config_values(config: TrainConfig) -> dict[str, Any]:
    """Returns a configuration as JSON has it.

    Args:
        config: the configuration.
    """
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def differing_options(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], free: Collection[str]
) -> dict[str, tuple[Any, Any]]:
    """Compares two configurations.

    Args:
        saved: from :func:`config_values`, with or without further entries. An option that it
            lacks, as it is younger than the run, has its default.
        wanted: likewise.
        free: names of fields that may differ.

    Returns:
        Both values, by the option's name, where they differ.
    """
    defaults = config_values(TrainConfig())
    saved, wanted = {**defaults, **saved}, {**defaults, **wanted}
    return {
        option_name(name): (saved[name], wanted[name])
        for name in defaults
        if name not in free and saved[name] != wanted[name]
    }


def check_same_run(saved: Mapping[str, Any], config: TrainConfig, where: str) -> None:
    """Compares the configuration of a run with the one it shall go on with.

    Args:
        saved: from :func:`config_values`, with or without further entries.
        config: the new one.
        where: what `saved` belongs to, for the message.

    Raises:
        UserError: names the options that differ.
    """
    differing = differing_options(saved, config_values(config), FREE_OPTIONS)
    # A longer run is the same so far, unless the number of epochs shapes the learning rate.
    if config.schedule != "constant" and saved.get("epochs") != config.epochs:
        differing[option_name("epochs")] = (saved.get("epochs"), config.epochs)
    if differing:
        listed = "; ".join(
            f"{option} was {former}, is {now}" for option, (former, now) in differing.items()
        )
        raise UserError(
            f"--resume: {where} was made with other options: {listed}. Use the same ones, or "
            "another --out."
        )
