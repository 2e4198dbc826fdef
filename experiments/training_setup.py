"""What a run works with: model, optimizer, compiled steps, and the state to begin with."""

import dataclasses
import time
from functools import partial
from typing import Any

import jax

from experiments.config import TrainConfig
from experiments.inputs.batches import Batches
from experiments.optimizer import make_optimizer, make_policy
from experiments.parallel.placement import Placement
from experiments.reporting import Reporter
from experiments.resnet import init_resnet
from experiments.tracking.memory import memory_kind, step_memory_bytes
from experiments.train_state import TrainState, init_train_state
from experiments.train_step import make_batch, make_eval_step, make_loss_fn, make_train_step


@dataclasses.dataclass
class Setup:
    """All that a training loop needs.

    Attributes:
        train_step: compiled, `train_step(state, step_key, images, labels, indices) -> state`.
        eval_step: jitted, from `evaluate.make_eval_step`.
        loss_fn: from `train_step.make_loss_fn`.
        make_batch: `make_batch(step_key, step, images, labels, indices)`: inputs and targets of
            the step after `step` steps.
        step_key: the run's random key, which each step derives its own from.
        facts: what config.json holds beside the configuration.
    """

    train_step: Any
    eval_step: Any
    loss_fn: Any
    make_batch: Any
    step_key: jax.Array
    facts: dict[str, Any]
    _state: TrainState

    def take_state(self) -> TrainState:
        """Returns the state before the first step. Only once: the first step takes its buffers."""
        state = self._state
        del self._state
        return state


def set_up(
    config: TrainConfig, batches: Batches, reporter: Reporter, placement: Placement
) -> Setup:
    """Makes the model and the optimizer and compiles the step.

    Args:
        config: the run.
        batches: the image set.
        placement: where the state lives.
        reporter: where to say how it goes.

    Returns:
        What the loop needs.
    """
    # Model, optimizer and state, each made by one compiled program: many small ones take longer.
    policy = make_policy(config)
    tx = make_optimizer(config, batches.steps_per_epoch)
    device = jax.devices()[0].device_kind
    devices = device if placement.num_devices == 1 else f"{placement.num_devices} x {device}"
    reporter.line(f"{config.model_name} of width {config.width}, {config.precision}, on {devices}")
    compile_start = time.perf_counter()
    # The rbg generator compiles in a third of threefry's time.
    init_key, step_key = jax.random.split(jax.random.key(config.seed, impl="rbg"))
    graphdef, params_f32, batch_stats = init_resnet(
        init_key,
        num_classes=batches.num_classes,
        in_channels=batches.image_shape[-1],
        width=config.width,
        stage_sizes=config.stage_sizes,
        stem=config.stem,
        blocks=config.blocks,
        dtype=policy.compute_dtype,
    )
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params_f32))
    params_f32, batch_stats = placement.everywhere((params_f32, batch_stats))
    init = partial(init_train_state, tx=tx, policy=policy)
    shardings = placement.state_shardings(jax.eval_shape(init, params_f32, batch_stats))
    options = {} if shardings is None else {"out_shardings": shardings}
    state = jax.jit(init, **options)(params_f32, batch_stats)
    del params_f32, batch_stats
    step_key = placement.everywhere(step_key)

    # The step is compiled ahead of its first call, so that no epoch's time contains it.
    augmentation = batches.augmentation
    train_step = make_train_step(
        graphdef,
        tx,
        policy,
        augmentation,
        label_smoothing=config.label_smoothing,
        state_shardings=shardings,
        batch_sharding=placement.batch_sharding,
    )
    train_step = train_step.lower(state, step_key, *batches.train_spec).compile()
    compile_seconds = time.perf_counter() - compile_start
    reporter.line(
        f"{num_params:,} params, {batches.steps_per_epoch} steps of {config.batch_size} images an "
        f"epoch, compiled in {compile_seconds:.0f} s"
    )
    return Setup(
        train_step=train_step,
        eval_step=make_eval_step(graphdef, policy, augmentation),
        loss_fn=make_loss_fn(graphdef, policy, config.label_smoothing),
        make_batch=partial(make_batch, policy=policy, augmentation=augmentation),
        step_key=step_key,
        facts={
            "num_params": num_params,
            "num_train": batches.num_train,
            "steps_per_epoch": batches.steps_per_epoch,
            "device": device,
            "num_devices": placement.num_devices,
            "compile_seconds": compile_seconds,
            "memory_kind": memory_kind(),
            "step_memory_bytes": step_memory_bytes(train_step),
        },
        _state=state,
    )
