"""What makes a precision: the policy, the loss-scale rule and the optimizer inside them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import mpopt
from experiments.config import MAX_LOSS_SCALE, MIN_LOSS_SCALE, TrainConfig
from experiments.resnet import NORM_PARAMS

LAST_STEP = 2**31 - 1
"""Where optax's counter of steps, an int32, stays."""


def make_policy(config: TrainConfig) -> mpopt.Policy:
    """Returns the dtypes of a run: everything in the precision asked for, but the norm layers.

    Args:
        config: the run.

    Returns:
        The policy.
    """
    return mpopt.Policy(param_dtype=jnp.dtype(config.precision), keep_float32=NORM_PARAMS)


def make_loss_scale(config: TrainConfig) -> mpopt.LossScale:
    """Returns the loss-scale rule of a run.

    Only float16 has a range so narrow that gradients underflow. The others keep the guard, which
    skips a step whose gradients are not finite.

    Args:
        config: the run.

    Returns:
        The rule.
    """
    if config.precision == "float16":
        return mpopt.dynamic_loss_scale(
            initial=config.initial_loss_scale,
            growth_interval=config.growth_interval,
            min_scale=MIN_LOSS_SCALE,
            max_scale=MAX_LOSS_SCALE,
        )
    return mpopt.static_loss_scale(1.0)


def make_schedule(config: TrainConfig, steps_per_epoch: int) -> optax.Schedule:
    """Returns the learning rate as a function of the applied steps.

    Args:
        config: the run.
        steps_per_epoch: steps in an epoch.

    Returns:
        The schedule.
    """
    warmup_steps = min(round(config.warmup_epochs * steps_per_epoch), LAST_STEP)
    # A run shorter than its warm-up only warms up.
    decay_steps = max(config.epochs * steps_per_epoch - warmup_steps, 1)
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(config.learning_rate, decay_steps)
    elif config.schedule == "step":
        boundaries = [epoch * steps_per_epoch - warmup_steps for epoch in config.step_epochs]
        after = optax.piecewise_constant_schedule(
            config.learning_rate,
            {boundary: 0.1 for boundary in boundaries if boundary <= LAST_STEP},
        )
    else:
        after = optax.constant_schedule(config.learning_rate)
    warmup = optax.linear_schedule(0.0, config.learning_rate, max(warmup_steps, 1))
    return optax.join_schedules([warmup, after], [warmup_steps]) if warmup_steps else after


def make_optimizer(
    config: TrainConfig, steps_per_epoch: int
) -> optax.GradientTransformationExtraArgs:
    """Returns SGD with momentum in mixed precision.

    Args:
        config: the run.
        steps_per_epoch: steps in an epoch, for the schedule.

    Returns:
        The optimizer. Everything that looks at gradients or params is inside `mixed_precision`,
        where both are float32.
    """
    sgd = optax.sgd(
        make_schedule(config, steps_per_epoch), momentum=config.momentum, nesterov=config.nesterov
    )
    if config.weight_decay:
        sgd = optax.chain(optax.add_decayed_weights(config.weight_decay, mask=_is_kernel), sgd)
    return mpopt.mixed_precision(
        sgd, policy=make_policy(config), loss_scale=make_loss_scale(config)
    )


def _is_kernel(params: Any) -> Any:
    """Marks convolution and dense kernels: biases and norm layers have one axis."""
    return jax.tree.map(lambda p: p.ndim > 1, params)
