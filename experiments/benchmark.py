"""Measures training on the CPU, side by side: `python -m experiments.benchmark --help`."""

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from experiments.benchmarks.rows import Row, Section
from experiments.errors import UsageError, UserError

PROGRAM = "python -m experiments.benchmark"


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """Compares mpopt with optax in float32, Flax's DynamicScale, jmp and PyTorch.

    All contenders are compiled first and then take turns in one process. Needs 16 GB of memory at
    the default sizes.

    Raises:
        UsageError: where a value is out of range.
    """

    sections: tuple[Section, ...] = ("update", "step", "compile", "dispatch")
    """update: the optimizer alone; step: the whole train step; compile: seconds by number of
    leaves; dispatch: host time of a tiny step."""
    repeats: int = 7
    """Turns of each contender; the median counts."""
    out: Path = Path("runs/benchmark")
    """Directory of the tables, the figures as JSON and the picture."""
    slow: bool = False
    """Measures jmp also where it compiles for minutes."""
    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    """Blocks in each stage of the ResNet whose update is measured; 3 4 6 3 is ResNet-50."""
    resnet_width: int = 64
    """Width of the ResNet whose update is measured; 64 is the standard ResNet-50."""
    transformer_width: int = 768
    """Width of the transformer whose update is measured; 768 is GPT-2 small."""
    transformer_layers: int = 12
    """Its layers; 12 is GPT-2 small."""
    step_stage_sizes: tuple[int, ...] = (1, 1, 1, 1)
    """Blocks in each stage of the ResNet whose whole step is measured; those of ResNet-50 take
    minutes to compile."""
    step_width: int = 16
    """Width of the ResNet whose whole step is measured."""
    step_batch: int = 32
    """Images a step."""
    step_image_size: int = 32
    """Height and width of the images."""
    compile_leaves: tuple[int, ...] = (40, 161, 640)
    """Numbers of leaves that compilation is measured with."""
    compile_repeats: int = 2
    """Compilations of each."""
    dispatch_leaves: tuple[int, ...] = (6, 161)
    """Numbers of params of the tiny models."""
    dispatch_steps: int = 200
    """Steps in a turn of the tiny models."""

    def __post_init__(self) -> None:
        """Checks the values."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            numbers = value if isinstance(value, tuple) else (value,)
            is_valid = all(n >= 1 for n in numbers if isinstance(n, int) and n is not False)
            if not is_valid or not numbers:
                option = "--" + field.name.replace("_", "-")
                raise UsageError(f"{option} must be at least 1, got {value}.")


def measure(config: BenchmarkConfig, console: Console) -> list[Row]:
    """Takes the measurements.

    Args:
        config: what to measure.
        console: where to say what is under way.

    Returns:
        A row for each contender in each case.
    """
    from experiments.benchmarks import leaf_shapes
    from experiments.benchmarks.compilation import measure_compilation
    from experiments.benchmarks.contenders import REFERENCE, choose
    from experiments.benchmarks.dispatch import measure_dispatch
    from experiments.benchmarks.problem import ADAMW, SGD, linear_problem, resnet_problem
    from experiments.benchmarks.steps import measure_steps
    from experiments.benchmarks.torch_step import TORCH, make_torch_turn

    contenders = choose(slow=config.slow)
    ours = choose((REFERENCE, "mpopt float16", "mpopt float16, float32 params"))
    rows: list[Row] = []
    if "dispatch" in config.sections:
        console.print("host time of a tiny step")
        rows += measure_dispatch(
            config.dispatch_leaves,
            choose((*ours, "Flax DynamicScale float16")),
            turns=config.repeats,
            steps=config.dispatch_steps,
        )
    if "compile" in config.sections:
        console.print("compilation by number of leaves")
        rows += measure_compilation(config.compile_leaves, ours, config.compile_repeats)
    if "step" in config.sections:
        size: dict[str, Any] = dict(
            batch_size=config.step_batch, image_size=config.step_image_size, width=config.step_width
        )
        case = (
            f"{_model_name(config.step_stage_sizes)}, width {config.step_width}, "
            f"batch {config.step_batch}, {config.step_image_size}×{config.step_image_size}, "
            "SGD with momentum"
        )
        console.print(f"train step: {case}")

        def torch_turn() -> Any:
            return make_torch_turn(
                device="cpu",
                dtype="bfloat16",
                num_classes=10,
                stage_sizes=config.step_stage_sizes,
                steps=3,
                **size,
            )

        rows += measure_steps(
            "step",
            case,
            resnet_problem(SGD, stage_sizes=config.step_stage_sizes, **size),
            contenders,
            turns=config.repeats,
            steps=3,
            others={f"{TORCH} bfloat16": torch_turn},
        )
    if "update" in config.sections:
        models = {
            _model_name(config.stage_sizes): leaf_shapes.resnet_shapes(
                config.resnet_width, config.stage_sizes
            ),
            "GPT-2": leaf_shapes.gpt2_shapes(config.transformer_width, config.transformer_layers),
        }
        for model, shapes in models.items():
            for optimizer, tx in {"SGD with momentum": SGD, "AdamW": ADAMW}.items():
                count = leaf_shapes.num_params(shapes)
                case = f"{model}, {count / 1e6:.1f}M params in {len(shapes)} leaves, {optimizer}"
                console.print(f"update: {case}")
                problem = linear_problem(shapes, tx)
                rows += measure_steps(
                    "update", case, problem, contenders, turns=config.repeats, steps=2
                )
    return rows


def _model_name(stage_sizes: Sequence[int]) -> str:
    return f"ResNet-{3 * sum(stage_sizes) + 2}"


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        args: the arguments; those of the process by default.

    Returns:
        The exit code: 0, or 1 where a file cannot be written, 2 for wrong arguments.
    """
    args = list(sys.argv[1:] if args is None else args)
    try:
        config = tyro.cli(BenchmarkConfig, args=args, prog=PROGRAM)
        try:
            config.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {config.out} cannot be made: {error.strerror}.") from error
        width = None if sys.stdout.isatty() else 130
        console = Console(highlight=False, markup=False, width=width)
        rows = measure(config, console)
        # Imported here, as it takes seconds and needs matplotlib.
        from experiments.benchmarks.report import print_tables, write_report

        print_tables(console, rows)
        settings = {**dataclasses.asdict(config), "out": str(config.out)}
        write_report(rows, config.out, shlex.join([*shlex.split(PROGRAM), *args]), settings)
        console.print(f"tables in {config.out / 'benchmark.md'}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
