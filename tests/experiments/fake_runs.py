"""Run directories as a training leaves them, without a training."""

import dataclasses
import json
import math
import random

from experiments.presets import PRESETS
from experiments.tracking.identity import config_values
from experiments.tracking.journal import Journal

STEPS_PER_EPOCH = 22
FACTS = {
    "num_params": 1_490_000,
    "device": "cpu",
    "compile_seconds": 30.5,
    "steps_per_epoch": STEPS_PER_EPOCH,
    "num_train": 1437,
    "memory_kind": "resident set",
    "step_memory_bytes": 290_000_000,
    "python": "3.11.4",
    "versions": {"jax": "0.10.2", "flax": "0.12.8", "optax": "0.2.6"},
}


def write_run(
    path,
    precision="float32",
    seed=0,
    *,
    done=None,
    accuracies=None,
    metrics=None,
    events=None,
    facts=None,
    **options,
):
    """Writes a run.

    `done` epochs have metrics, all by default; `accuracies` are those of the epochs from the first,
    else made up; `metrics` and `facts` replace entries; `events` replaces all events.
    """
    path.mkdir(parents=True)
    config = dataclasses.replace(
        PRESETS["digits"], precision=precision, seed=seed, out=path, resume=True, **options
    )
    facts = {**FACTS, **(facts or {})}
    content = {**config_values(config), **facts}
    (path / "config.json").write_text(json.dumps(content))
    done = config.epochs if done is None else done
    rng = random.Random(f"{precision} {seed}")
    speed = {"float32": 190.0, "bfloat16": 150.0, "float16": 160.0}[precision]
    memory = {"float32": 1.2e9, "bfloat16": 1.45e9, "float16": 1.5e9}[precision]
    made = list(loss_scale_events(config, done)) if events is None else events
    for epoch in range(1, done + 1):
        loss = 2.3 * math.exp(-epoch / 4) + 0.02
        step = epoch * STEPS_PER_EPOCH
        if accuracies is None:
            accuracy = 0.97 - 0.87 * math.exp(-epoch / 3) + rng.uniform(-0.02, 0.02)
        else:
            accuracy = accuracies[epoch - 1]
        record = {
            "epoch": epoch,
            "step": step,
            "train_loss": loss * rng.uniform(0.8, 1.2),
            "test_loss": (loss + 0.08) * rng.uniform(0.8, 1.2),
            "test_accuracy": accuracy,
            "images_per_second": speed * rng.uniform(0.97, 1.03),
            "loss_scale": 1.0,
            "total_skips": sum(e["event"] == "skip" and e["step"] <= step for e in made),
            "seconds": 35.0 + 8 * epoch,
            "peak_memory_bytes": int(memory * rng.uniform(0.99, 1.01)),
            **(metrics or {}),
        }
        Journal(path / "metrics.jsonl").append(record)
    Journal(path / "events.jsonl").append(*made)
    return path


def loss_scale_events(config, done):
    """What a dynamic loss scale does: skips down from its start, growth, a skip now and then."""
    scale = config.initial_loss_scale if config.precision == "float16" else 1.0
    yield {"event": "loss_scale", "step": 0, "loss_scale": scale}
    if config.precision != "float16":
        return
    rng = random.Random(config.seed)
    ceiling, finite = 2.0**17, 0
    for step in range(1, done * STEPS_PER_EPOCH + 1):
        if scale > ceiling * rng.choice((1, 1, 2)):
            leaves = ["head/kernel", "head/bias"]
            event = {"event": "skip", "step": step, "loss_scale": scale, "loss": 2.0}
            yield {**event, "leaves": leaves, "num_leaves": 2}
            scale, finite = scale / 2, 0
        else:
            finite += 1
            if finite < config.growth_interval:
                continue
            scale, finite = scale * 2, 0
        yield {"event": "loss_scale", "step": step, "loss_scale": scale}


def write_comparison(out, seeds=3, precisions=("float32", "bfloat16", "float16"), **options):
    """Writes the complete runs of a comparison."""
    for precision in precisions:
        for seed in range(seeds):
            write_run(out / "runs" / f"{precision}-seed{seed}", precision, seed, **options)
    return out
