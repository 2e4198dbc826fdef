"""What XLA makes of a step for a GPU, without one: `python -m experiments.gpu_program --help`.

Command: python -m experiments.gpu_program imagenet --gpu h200
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from experiments.cli import parse_config
from experiments.config import Precision, Preset
from experiments.errors import UsageError, UserError
from experiments.gpu.child import check_plugin, compile_in_child
from experiments.gpu.messages import Request, StepReport
from experiments.gpu.table import notes, print_reports, warnings
from experiments.gpu.targets import GPUS, GpuName

PROGRAM = "python -m experiments.gpu_program"


@dataclasses.dataclass(frozen=True)
class GpuProgramConfig:
    """Compiles a train step for a GPU, on a machine without one, and says what the GPU will do.

    Reads dtypes, kernels, bytes and memory from the compiled program, and gives a lower bound of
    the time from the GPU's bandwidth and peak (roofline). Nothing runs, no data set is read. Takes
    one to two minutes a precision. Other options of the training go after `--`:
    `python -m experiments.gpu_program cifar10 -- --width 32`. XLA_FLAGS hold.

    Raises:
        UsageError: where a value is out of range.
    """

    preset: Annotated[Preset, tyro.conf.Positional] = "imagenet"
    """The set-up of the training."""
    precision: tuple[Precision, ...] = ("float16", "bfloat16", "float32")
    """Dtypes to compile the step in; float32 is what the others are compared with."""
    gpu: GpuName = "h200"
    """The GPU: H200 SXM, H100 SXM or A100 SXM 80 GB."""
    batch_size: int | None = None
    """Images a step; the preset's by default."""
    image_size: int | None = None
    """Their height and width; the preset's by default."""
    num_classes: int | None = None
    """Size of the model's output; the image set's by default."""
    model: Annotated[str | None, tyro.conf.arg(metavar="plain|low_traffic|MODULE:CLASS")] = None
    """The ResNet's blocks, the training's by default; or any class that takes the arguments of
    experiments.resnet.ResNet."""
    update: bool = True
    """Whether to compile the optimizer's update alone too."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """File to write all figures to."""

    def __post_init__(self) -> None:
        """Checks the values."""
        if not self.precision or len(set(self.precision)) < len(self.precision):
            raise UsageError(
                "--precision must be one or more dtypes, each of them once, got "
                f"{' '.join(self.precision) or 'none'}."
            )
        for name in ("batch_size", "image_size", "num_classes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = "--" + name.replace("_", "-")
                raise UsageError(f"{option} must be at least 1, got {value}.")

    def request(self, precision: Precision, train_args: Sequence[str]) -> Request:
        """Returns what the compiler's process is asked for.

        Args:
            precision: one of those asked for.
            train_args: options of the training.
        """
        args = [self.preset, *train_args, "--precision", precision]
        for name in ("batch_size", "image_size"):
            if getattr(self, name) is not None:
                args += ["--" + name.replace("_", "-"), str(getattr(self, name))]
        return Request(self.gpu, args, self.model, self.num_classes, self.update)


def gpu_program(
    config: GpuProgramConfig, train_args: Sequence[str], console: Console
) -> list[StepReport]:
    """Compiles in each precision and prints what came out.

    Args:
        config: what to compile.
        train_args: options of the training.
        console: where to print.

    Returns:
        The figures.

    Raises:
        UserError: where the plugin is missing, a value is wrong, or the compiler fails.
    """
    check_plugin()
    requests = [config.request(precision, train_args) for precision in config.precision]
    for request in requests:  # wrong options show before minutes of compiling
        parse_config(request.train_args, prog=f"{PROGRAM} {config.preset} --")
    reports = []
    for precision, request in zip(config.precision, requests, strict=True):
        console.print(f"compiling the {precision} step for {GPUS[config.gpu].name}")
        reports.append(compile_in_child(request))
    first = reports[0]
    console.print(
        f"\n{first.model_name} ({first.model}), {first.num_params:,} params, batch "
        f"{first.batch_size}, {first.image_size}x{first.image_size}; compiled for "
        f"{GPUS[config.gpu].name} by jax {first.jax_version}; nothing was run\n",
        soft_wrap=True,
    )
    print_reports(console, reports)
    for report in reports:
        for line in warnings(report):
            console.print(f"WARNING: {line}", style="bold red", soft_wrap=True)
        for line in notes(report):
            console.print(f"note: {line}", soft_wrap=True)
    if config.json is not None:
        _write_json(config.json, config, train_args, reports)
        console.print(f"figures in {config.json}", soft_wrap=True)
    return reports


def _write_json(
    path: Path, config: GpuProgramConfig, train_args: Sequence[str], reports: Sequence[StepReport]
) -> None:
    content = {
        "gpu": {"name": config.gpu, **dataclasses.asdict(GPUS[config.gpu])},
        "preset": config.preset,
        "model": reports[0].model,
        "train_args": list(train_args),
        "steps": {report.precision: dataclasses.asdict(report) for report in reports},
        "warnings": [line for report in reports for line in warnings(report)],
    }
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--json {path} cannot be written: {error.strerror or error}.") from error


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        args: the arguments; those of the process by default.

    Returns:
        The exit code: 0, or 1 where the compiler failed, 2 for wrong arguments.
    """
    args = list(sys.argv[1:] if args is None else args)
    split = args.index("--") if "--" in args else len(args)
    own_args, train_args = args[:split], args[split + 1 :]
    try:
        config = tyro.cli(GpuProgramConfig, args=own_args, prog=PROGRAM)
        # Wide enough for the table where there is no terminal to measure.
        width = None if sys.stdout.isatty() else 120
        gpu_program(config, train_args, Console(highlight=False, markup=False, width=width))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
