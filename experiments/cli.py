"""The command line: a preset, then options that change single values of it."""

from collections.abc import Sequence

import tyro

from experiments.config import TrainConfig
from experiments.presets import PRESETS


def parse_config(args: Sequence[str], prog: str) -> TrainConfig:
    """Reads the arguments.

    Args:
        args: the arguments, without the name of the program.
        prog: the name of the program, for the help.

    Returns:
        The preset's configuration with the options given.

    Raises:
        SystemExit: with code 0 after `--help`, 2 where an argument is wrong.
        UsageError: where a value is out of range.
    """
    # The preset decides the defaults of the options, so it is read first, wherever it stands.
    without_help = [arg for arg in args if arg not in ("-h", "--help")]
    preset = PRESETS[tyro.cli(TrainConfig, args=without_help, prog=prog).preset]
    return tyro.cli(type(preset), args=args, default=preset, prog=prog)
