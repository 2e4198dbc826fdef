"""A few steps on made-up images, wherever the arrays live: in this process, or in one of several.

As a command, `python parallel_case.py HOST:PORT NUM_PROCESSES PROCESS_ID OUT`, it writes what the
process saw to OUT.
"""

import dataclasses
import pickle
import sys
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpopt
from experiments.augment import Augmentation
from experiments.config import TrainConfig
from experiments.evaluate import evaluate
from experiments.inputs.order import padded_batches
from experiments.parallel.collect import on_host
from experiments.parallel.meeting import joined
from experiments.parallel.mesh import make_placement
from experiments.resnet import NORM_PARAMS, init_resnet
from experiments.train_state import init_train_state
from experiments.train_step import make_eval_step, make_train_step

BATCH = 16
BAD_STEP, BAD_POSITION = 3, 15
"""In this step the example at this position, which the last device has, is infinite."""
STEPS = 6
NUM_TEST = 37
WIDTH = 64  # one kernel is large enough to be split over devices
AUGMENTATION = Augmentation(mean=(0.5,), std=(0.25,), crop_padding=1, flip=True)
CONFIG = TrainConfig(batch_size=BATCH, data_parallel=True, precision="float16")


@dataclasses.dataclass
class Seen:
    """What a run of the case gives, the same in every process but for `part`."""

    loss: list[float]
    loss_scale: list[float]
    applied: list[bool]
    metrics: dict[str, float]
    params: list[np.ndarray]
    masters: list[np.ndarray]
    batch_stats: list[np.ndarray]
    crc32: int
    evaluation: tuple[float, float]
    split_bytes: list[tuple[int, int]]
    part: tuple[int, int]


def examples(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, 8, 8, 1)).astype(np.float32)
    return images, rng.integers(0, 4, count).astype(np.int32)


def make_state(placement, precision) -> tuple[Any, ...]:
    policy = mpopt.Policy(jnp.dtype(precision), keep_float32=NORM_PARAMS)
    rule = mpopt.dynamic_loss_scale(2.0**8, growth_interval=2)
    loss_scale = rule if precision == "float16" else mpopt.static_loss_scale(1.0)
    tx = mpopt.mixed_precision(optax.sgd(0.01, momentum=0.9), policy=policy, loss_scale=loss_scale)
    graphdef, params_f32, batch_stats = init_resnet(
        jax.random.key(0, impl="rbg"),
        num_classes=4,
        in_channels=1,
        width=WIDTH,
        stage_sizes=(1,),
        dtype=policy.compute_dtype,
    )
    model = placement.everywhere((params_f32, batch_stats))
    init = partial(init_train_state, tx=tx, policy=policy)
    shardings = placement.state_shardings(jax.eval_shape(init, *model))
    options = {} if shardings is None else {"out_shardings": shardings}
    return jax.jit(init, **options)(*model), graphdef, tx, policy, shardings


def run(placement, precision="float16") -> Seen:
    state, graphdef, tx, policy, shardings = make_state(placement, precision)
    train_step = make_train_step(
        graphdef,
        tx,
        policy,
        AUGMENTATION,
        state_shardings=shardings,
        batch_sharding=placement.batch_sharding,
    )
    key = placement.everywhere(jax.random.key(1, impl="rbg"))
    part = placement.own_part(BATCH)
    indices = placement.everywhere(np.arange(BATCH, dtype=np.int32))
    for step in range(1, STEPS + 1):
        images, labels = examples(step, BATCH)
        if step == BAD_STEP:
            images[BAD_POSITION] = np.inf
        batch = placement.join_parts((images[part], labels[part]), BATCH)
        state = train_step(state, key, *batch, indices)

    test_set = placement.everywhere(examples(0, NUM_TEST))
    split = placement.split
    test_batches = (
        (*test_set, split(indices), split(mask)) for indices, mask in padded_batches(NUM_TEST, 8)
    )
    eval_step = make_eval_step(graphdef, policy, AUGMENTATION)
    evaluation = evaluate(eval_step, state.params, state.batch_stats, test_batches)
    masters = jax.tree.map(on_host, mpopt.master_params(state.opt_state, state.params))
    params, masters, batch_stats, log = jax.device_get(
        (state.params, masters, state.batch_stats, state.log)
    )
    leaves = jax.tree.leaves((params, batch_stats))
    return Seen(
        loss=log.loss[:STEPS].tolist(),
        loss_scale=[*log.loss_scale[:STEPS].tolist(), float(mpopt.loss_scale(state.opt_state))],
        applied=log.applied[:STEPS].tolist(),
        metrics={name: float(x) for name, x in mpopt.metrics(state.opt_state).items()},
        params=jax.tree.leaves(params),
        masters=jax.tree.leaves(masters),
        batch_stats=jax.tree.leaves(batch_stats),
        crc32=zlib.crc32(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)),
        evaluation=evaluation,
        split_bytes=[
            (leaf.addressable_shards[0].data.nbytes, leaf.nbytes)
            for leaf in jax.tree.leaves(state.opt_state)
            if not leaf.is_fully_replicated
        ],
        part=(part.start, part.stop),
    )


if __name__ == "__main__":
    address, count, index, out = sys.argv[1:]
    config = dataclasses.replace(
        CONFIG,
        shard_optimizer=True,
        coordinator=address,
        num_processes=int(count),
        process_id=int(index),
    )
    with joined(config) as group:
        seen = run(make_placement(config, group))
    Path(out).write_bytes(pickle.dumps(dataclasses.asdict(seen)))
