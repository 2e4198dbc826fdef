"""Times one program on the device."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from experiments.benchmarks.contenders import CONTENDERS, Contender, NotMeasured
from experiments.benchmarks.gpu_plan import COMMAND_BUFFERS, TORCH, Measurement
from experiments.benchmarks.problem import SGD, resnet_problem
from experiments.benchmarks.timing import compile_step
from experiments.benchmarks.torch_step import make_torch_turn
from experiments.gpu.hlo import parse_module
from experiments.gpu.roofline import measure_costs
from experiments.gpu.targets import GPUS, Gpu

TURNS = 5


@dataclasses.dataclass
class Timed:
    """The figures of a program; None is what the device or the framework does not tell.

    Attributes:
        milliseconds: of a step, the median over the turns.
        turns: milliseconds of a step in each turn.
        images_per_second: likewise.
        compile_seconds: to trace, lower and compile.
        program_peak_bytes: memory of the program, as the compiler tells it.
        device_peak_bytes: the most that this process has ever had on the device.
        device_peak_rose: whether that is this program's; if not, an earlier one had more.
        bound_milliseconds: roofline bound of a step.
        bound_share: bound divided by the measured time.
        bound_note: why there is no bound.
    """

    milliseconds: float
    turns: list[float]
    images_per_second: float
    compile_seconds: float | None = None
    program_peak_bytes: int | None = None
    device_peak_bytes: int | None = None
    device_peak_rose: bool | None = None
    bound_milliseconds: float | None = None
    bound_share: float | None = None
    bound_note: str | None = None


def time_measurement(measurement: Measurement, turn_seconds: float) -> Timed:
    """Compiles a step and times it.

    Args:
        measurement: which.
        turn_seconds: how long one of the turns is to last.

    Returns:
        The figures.

    Raises:
        NotMeasured: where a framework is missing.
    """
    if measurement.contender == TORCH:
        return _time_torch(measurement, turn_seconds)
    workload = measurement.workload
    problem = resnet_problem(
        SGD,
        batch_size=workload.batch_size,
        image_size=workload.image_size,
        num_classes=workload.num_classes,
        width=workload.width,
        stage_sizes=workload.stage_sizes,
        stem=workload.stem,
        blocks=measurement.blocks,
    )
    contender = CONTENDERS[measurement.contender](problem)
    batch, state = problem.batch(contender.dtype), contender.init()
    # The scale's dtypes become those of later steps: a Python number is none.
    state = jax.tree.map(_strong, state)
    device_peak = _device_peak()
    precision = None if measurement.precision == "default" else measurement.precision
    with jax.default_matmul_precision(precision):
        compiled = compile_step(
            _program(contender, measurement.scan),
            state,
            batch,
            compiler_options=_compiler_options(measurement.command_buffers),
        )
    steps_a_call = measurement.scan or 1

    def call(steps: int) -> None:
        nonlocal state
        for _ in range(max(1, steps // steps_a_call)):
            state = compiled.executable(state, batch)
        jax.block_until_ready(state)

    result = _time(call, workload.batch_size, steps_a_call, turn_seconds)
    result.compile_seconds = compiled.trace.wall + compiled.compile.wall
    result.program_peak_bytes = getattr(
        compiled.executable.memory_analysis(), "peak_memory_in_bytes", None
    )
    result.device_peak_bytes = _device_peak()
    if result.device_peak_bytes is not None and device_peak is not None:
        result.device_peak_rose = result.device_peak_bytes > device_peak
    _add_bound(result, compiled.executable, steps_a_call)
    return result


def find_gpu(device_kind: str) -> Gpu | None:
    """Returns the facts of a GPU, where they are known.

    Args:
        device_kind: as JAX names it: `NVIDIA H200`.
    """
    words = device_kind.lower().replace("-", " ").split()
    return next((gpu for name, gpu in GPUS.items() if name in words), None)


def _compiler_options(command_buffers: str) -> dict[str, str] | None:
    if command_buffers == "default":
        return None
    if command_buffers == "on" and jax.__version_info__ < (0, 11):
        raise NotMeasured("XLA has no convolutions in command buffers before jax 0.11")
    return {"xla_gpu_enable_command_buffer": COMMAND_BUFFERS[command_buffers]}


def _program(contender: Contender, scan: int | None) -> Any:
    if scan is None:
        return contender.step

    def scanned(state: Any, batch: Any) -> Any:
        def body(state: Any, _: None) -> tuple[Any, None]:
            return contender.python_step(state, batch), None

        return lax.scan(body, state, length=scan)[0]

    return jax.jit(scanned, donate_argnums=0)


def _time_torch(measurement: Measurement, turn_seconds: float) -> Timed:
    workload = measurement.workload

    def make(steps: int) -> Callable[[], None]:
        return make_torch_turn(
            device="cuda",
            dtype="float16",
            batch_size=workload.batch_size,
            image_size=workload.image_size,
            num_classes=workload.num_classes,
            steps=steps,
            stage_sizes=workload.stage_sizes,
            width=workload.width,
        )

    turn = make(1)

    def call(steps: int) -> None:
        for _ in range(steps):
            turn()

    return _time(call, workload.batch_size, 1, turn_seconds)


def _time(call: Callable[[int], None], batch_size: int, unit: int, turn_seconds: float) -> Timed:
    """Times `call(steps)`, which takes a multiple of `unit` steps and waits for them."""
    for _ in range(2):  # the first is slower than the others
        call(unit)
    start = time.perf_counter()
    call(unit)
    calls = max(1, round(turn_seconds / max(time.perf_counter() - start, 1e-6)))
    steps = unit * min(calls, 1000)
    turns = []
    for _ in range(TURNS):
        start = time.perf_counter()
        call(steps)
        turns.append(1e3 * (time.perf_counter() - start) / steps)
    milliseconds = statistics.median(turns)
    return Timed(milliseconds, turns, batch_size / milliseconds * 1e3)


def _add_bound(result: Timed, executable: Any, steps: int) -> None:
    device = jax.devices()[0].device_kind
    gpu = find_gpu(device)
    if gpu is None:
        result.bound_note = f"no peak rates are known for {device}"
        return
    try:
        costs = measure_costs(parse_module(executable.as_text()), gpu)
    except Exception as error:  # a program that this reader does not know costs a figure, no more
        result.bound_note = f"the program could not be read: {error!r}"
        return
    result.bound_milliseconds = 1e3 * costs.bound_seconds / steps
    result.bound_share = result.bound_milliseconds / result.milliseconds


def _device_peak() -> int | None:
    stats = jax.devices()[0].memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None


def _strong(leaf: Any) -> jax.Array:
    array = jax.numpy.asarray(leaf)
    return jax.numpy.asarray(array, array.dtype)
