"""Compiles for a GPU that is not there: `python -m experiments.gpu.compiler REQUEST RESULT`."""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from experiments.cli import parse_config
from experiments.errors import UserError
from experiments.gpu.hlo import parse_module
from experiments.gpu.messages import CompiledProgram, Request, StepReport
from experiments.gpu.programs import Program, make_programs
from experiments.gpu.roofline import measure_costs
from experiments.gpu.targets import GPUS, Gpu, target_config


def compile_programs(request: Request) -> StepReport:
    """Compiles in this process, which needs `JAX_PLATFORMS=cpu` where there is no GPU.

    Args:
        request: what to compile.

    Returns:
        The figures.

    Raises:
        UsageError: where the request is wrong.
    """
    config = parse_config(request.train_args, prog="python -m experiments.gpu_program ... --")
    programs = make_programs(config, request.model, request.num_classes)
    gpu = GPUS[request.gpu]
    return StepReport(
        precision=config.precision,
        step=compile_for(gpu, programs.step),
        update=compile_for(gpu, programs.update) if request.with_update else None,
        model_name=config.model_name,
        model=request.model or config.blocks,
        batch_size=config.batch_size,
        image_size=config.image_size,
        num_params=programs.num_params,
        num_leaves=programs.num_leaves,
        jax_version=jax.__version__,
        default_precision=jax.config.jax_default_matmul_precision,
    )


def compile_for(gpu: Gpu, program: Program) -> CompiledProgram:
    """Compiles a program and reads it.

    Nothing runs, so that XLA measures no algorithms: the choice between some kernels may differ
    on a GPU; dtypes, bytes and memory hold.

    Args:
        gpu: for which.
        program: the program.

    Returns:
        Its figures.
    """
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(gpu), topology="1x1x1"
    )
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        program.arguments,
    )
    start = time.perf_counter()
    compiled = program.function.lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return CompiledProgram(
        costs=measure_costs(parse_module(compiled.as_text()), gpu),
        compile_seconds=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=_peak_bytes(memory),
    )


def _peak_bytes(memory: Any) -> int:
    """Returns XLA's peak; before it told one, the sum of what is live at some time."""
    return getattr(memory, "peak_memory_in_bytes", 0) or (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def main(args: Sequence[str]) -> int:
    """Runs the process.

    Args:
        args: the file with the request, and the one for the result.

    Returns:
        The exit code: 0, or that of the error.
    """
    request_file, result_file = map(Path, args)
    try:
        report = compile_programs(Request(**json.loads(request_file.read_text())))
    except UserError as error:
        print(f"error: {error}")
        return error.exit_code
    result_file.write_text(json.dumps(dataclasses.asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
