"""Measures what a stream delivers against a set on the device.

Command: python -m experiments.benchmark_input --dataset fashion_mnist
"""

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import tyro

from experiments.config import TrainConfig
from experiments.errors import UserError


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Images a second of a set on the device, and of streams with several numbers of processes.

    Each one gathers, augments and normalises batches on the device, with no model. They take turns,
    so that whatever else the machine does meets them all alike.
    """

    dataset: str = "fashion_mnist"
    """Image set, as of experiments.train."""
    data_dir: Path | None = None
    """TFDS data directory."""
    image_size: int = 28
    """Height and width that images are resized to."""
    batch_size: int = 128
    """Examples a step."""
    crop_padding: int = 2
    """Pixels of padding before a random crop."""
    workers: tuple[int, ...] = (0, 1, 2)
    """Numbers of loader processes to try; 0 is threads of this process."""
    steps: int = 100
    """Batches in a turn."""
    lead_in: int = 20
    """Batches before each turn that do not count: streams have made some in the meantime."""
    turns: int = 7
    """Turns of each; the median counts."""


def measure(benchmark: Benchmark) -> dict[str, list[float]]:
    """Takes turns.

    Args:
        benchmark: what to measure.

    Returns:
        Images a second of each turn, by the name of the path.

    Raises:
        UserError: where the data are not usable.
    """
    import contextlib
    from functools import partial

    import jax
    import jax.numpy as jnp

    from experiments.augment import augment, normalise
    from experiments.inputs.batches import open_batches

    config = TrainConfig(
        dataset=benchmark.dataset,
        data_dir=benchmark.data_dir,
        image_size=benchmark.image_size,
        batch_size=benchmark.batch_size,
        crop_padding=benchmark.crop_padding,
        flip=True,
        input="resident",
    )
    configs = {"resident": config}
    for workers in benchmark.workers:
        name = f"streamed, {workers} worker" + "s" * (workers != 1)
        configs[name] = dataclasses.replace(config, input="streamed", loader_workers=workers)

    with contextlib.ExitStack() as stack:
        paths = {
            name: stack.enter_context(open_batches(path, report=print))
            for name, path in configs.items()
        }
        augmentation = paths["resident"].augmentation

        @partial(jax.jit, donate_argnums=0)
        def step(total, key, images, labels, indices):
            batch = normalise(augment(key, images[indices], augmentation), augmentation)
            return total + jnp.mean(batch) + jnp.sum(labels[indices])

        key = jax.random.key(0, impl="rbg")

        def endless(batches):
            epoch = 0
            while True:
                epoch += 1
                yield from batches.train_batches(epoch)

        def run(total, stream, steps):
            for _ in range(steps):
                total = step(total, key, *next(stream))
            return total.block_until_ready()

        streams = {name: endless(batches) for name, batches in paths.items()}
        rates = {name: [] for name in paths}
        for turn in range(-1, benchmark.turns):  # turn -1 compiles and starts the processes
            for name, stream in streams.items():
                total = run(jnp.float32(0), stream, benchmark.lead_in)
                start = time.perf_counter()
                run(total, stream, benchmark.steps)
                seconds = time.perf_counter() - start
                if turn >= 0:
                    rates[name].append(benchmark.steps * benchmark.batch_size / seconds)
        return rates


def format_table(rates: dict[str, list[float]]) -> str:
    """Writes medians and ratios as a table.

    Args:
        rates: images a second of each turn, by name; the first one is what others are compared
            with.

    Returns:
        A table in Markdown.
    """
    medians = {name: statistics.median(values) for name, values in rates.items()}
    first = next(iter(medians.values()))
    lines = ["| input | images/s, median | lowest to highest | ratio |", "|---|---|---|---|"]
    for name, values in rates.items():
        spread = f"{min(values):,.0f} to {max(values):,.0f}"
        lines.append(f"| {name} | {medians[name]:,.0f} | {spread} | {medians[name] / first:.3f} |")
    return "\n".join(lines)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        args: the arguments; those of the process by default.

    Returns:
        The exit code.
    """
    benchmark = tyro.cli(Benchmark, args=args, prog="python -m experiments.benchmark_input")
    try:
        rates = measure(benchmark)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    import jax

    print(format_table(rates))
    print(
        f"{benchmark.dataset} at {benchmark.image_size}x{benchmark.image_size}, batch "
        f"{benchmark.batch_size}, {benchmark.turns} turns of {benchmark.steps} batches; "
        f"{jax.devices()[0].device_kind}, {os.cpu_count()} CPU cores, jax {jax.__version__}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
