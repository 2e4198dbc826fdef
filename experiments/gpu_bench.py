"""Checks and times training on a GPU: `python -m experiments.gpu_bench --out FILE.json`.

Needs jax, flax, optax and numpy, and no data: images are random numbers. Whatever fails is written
down and the rest goes on.
"""

import argparse
import dataclasses
import importlib.metadata
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks.contenders import NotMeasured
from experiments.benchmarks.device_checks import CHECKS, HALF_DTYPES
from experiments.benchmarks.gpu_plan import CIFAR, IMAGENET, Measurement, make_plan
from experiments.benchmarks.gpu_record import Record, format_table
from experiments.benchmarks.gpu_time import Timed, time_measurement

PROGRAM = "python -m experiments.gpu_bench"
FIRST_GUESS_SECONDS = 60.0
"""What a measurement of the large workload is expected to take, before one has been taken."""


def check_device(record: Record) -> bool:
    """Takes all checks.

    Args:
        record: gets the results.

    Returns:
        Whether all of them passed.
    """
    for name, check in CHECKS.items():
        for dtype in HALF_DTYPES:
            title = f"{name}, {jnp.dtype(dtype).name}"
            try:
                fault = check(dtype)
            except Exception as error:
                fault = _describe(error)
            record.content["checks"][title] = fault or "passed"
            record.write()
            print(f"{title}: {fault or 'passed'}", flush=True)
    return all(result == "passed" for result in record.content["checks"].values())


def take_measurements(
    record: Record,
    plan: Sequence[Measurement],
    budget_seconds: float,
    measure: Callable[[Measurement], Timed],
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Takes measurements until the time is up.

    Args:
        record: gets the results, and the names of those that did not fit.
        plan: what to measure.
        budget_seconds: one that would probably end later than this is left out.
        measure: takes one.
        clock: tells the seconds.
    """
    start = clock()
    # Compilation decides how long one takes, and differs most between the workloads.
    longest: dict[str, float] = {}
    for measurement in plan:
        workload = measurement.workload.name
        begun = clock()
        left = budget_seconds - (begun - start)
        if longest.get(workload, FIRST_GUESS_SECONDS) > left:
            record.content["dropped"].append(measurement.name)
            record.write()
            print(f"{measurement.name}: dropped, {max(left, 0):.0f} s are left", flush=True)
            continue
        try:
            result: dict[str, Any] = dataclasses.asdict(measure(measurement))
        except NotMeasured as error:
            result = {"not_measured": str(error)}
        except Exception as error:
            result = {"error": _describe(error)}
        took = clock() - begun
        if "milliseconds" in result:
            longest[workload] = max(longest.get(workload, 0.0), took)
        described = {key: value for key, value in result.items() if value is not None}
        record.content["measurements"][measurement.name] = described | {"took_seconds": took}
        record.write()
        print(_line(measurement.name, result), flush=True)


def _line(name: str, result: dict[str, Any]) -> str:
    if "milliseconds" not in result:
        return f"{name}: {result.get('error') or result.get('not_measured')}"
    return f"{name}: {result['milliseconds']:.2f} ms, {result['images_per_second']:,.0f} images/s"


def _describe(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300] if text else ''}"


def _parse(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Checks and times mixed-precision training on a GPU."
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--budget-seconds", type=float, default=450.0, help="default: 450")
    parser.add_argument(
        "--turn-seconds", type=float, default=0.5, help="of the five turns; default: 0.5"
    )
    parser.add_argument(
        "--only", default="", help="takes the measurements whose names contain this text"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models and images, to try the script on a CPU"
    )
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        args: the arguments; those of the process by default.

    Returns:
        The exit code: 0, or 1 where a check has failed or a measurement broke, 2 for wrong
        arguments.
    """
    options = _parse(args)
    start = time.perf_counter()
    workloads = [IMAGENET, CIFAR]
    if options.tiny:
        workloads = [
            dataclasses.replace(w, batch_size=2, image_size=8, width=2, stage_sizes=(1,))
            for w in workloads
        ]
    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        record = Record(
            options.out,
            {
                "device": device.device_kind,
                "platform": device.platform,
                "versions": {name: importlib.metadata.version(name) for name in packages},
                "arguments": {k: str(v) for k, v in vars(options).items()},
            },
        )
    except OSError as error:
        print(
            f"error: --out {options.out} cannot be written: {error.strerror or error}.",
            file=sys.stderr,
        )
        return 1
    print(f"{device.device_kind}, jax {jax.__version__}", flush=True)
    passed = check_device(record)
    plan = [m for m in make_plan(*workloads) if options.only in m.name]
    take_measurements(
        record,
        plan,
        options.budget_seconds - (time.perf_counter() - start),
        lambda measurement: time_measurement(measurement, options.turn_seconds),
    )
    record.content["seconds"] = time.perf_counter() - start
    record.write()
    print("\n" + format_table(record.content))
    broken = any("error" in result for result in record.content["measurements"].values())
    return 1 if broken or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
