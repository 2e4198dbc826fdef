"""What the compiler's process is asked for, and what it answers, as JSON."""

import dataclasses
from typing import Any

from experiments.gpu.roofline import Costs
from experiments.gpu.targets import GpuName


@dataclasses.dataclass
class Request:
    """What to compile.

    Attributes:
        gpu: the GPU.
        train_args: arguments of `experiments.train`, the preset and the precision among them.
        model: see `programs.make_programs`.
        num_classes: likewise.
        with_update: whether to compile the optimizer's update alone too.
    """

    gpu: GpuName
    train_args: list[str]
    model: str | None = None
    num_classes: int | None = None
    with_update: bool = True


@dataclasses.dataclass
class CompiledProgram:
    """A compiled program.

    Attributes:
        costs: read from its text.
        compile_seconds: wall time.
        argument_bytes: of its arguments.
        temporary_bytes: of what it allocates while it runs.
        peak_bytes: the most that is live at a time, arguments and results included. XLA keeps
            the temporaries in one piece, which may have gaps: it allocates a few percent more.
    """

    costs: Costs
    compile_seconds: float
    argument_bytes: int
    temporary_bytes: int
    peak_bytes: int

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "CompiledProgram":
        """Reads what `dataclasses.asdict` gave."""
        return cls(**{**values, "costs": Costs.from_json(values["costs"])})


@dataclasses.dataclass
class StepReport:
    """The step of a run and its update alone.

    Attributes:
        precision: of the run.
        step: the train step.
        update: the optimizer's part of it, compiled alone; None where it was not asked for.
        model_name: e.g. ResNet-50.
        model: as it was asked for, e.g. plain.
        batch_size: images a step.
        image_size: their height and width.
        num_params: number of params.
        num_leaves: number of arrays that they are in.
        jax_version: with which it was compiled.
        default_precision: JAX's `default_matmul_precision`; None where it has not been set.
    """

    precision: str
    step: CompiledProgram
    update: CompiledProgram | None
    model_name: str
    model: str
    batch_size: int
    image_size: int
    num_params: int
    num_leaves: int
    jax_version: str
    default_precision: str | None = None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "StepReport":
        """Reads what `dataclasses.asdict` gave."""
        programs = {
            name: CompiledProgram.from_json(values[name])
            for name in ("step", "update")
            if values[name] is not None
        }
        return cls(**{**values, **programs})
