"""The state of a training: all that changes from step to step, and all that a checkpoint holds."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import mpopt

LOG_STEPS = 20
"""Steps that the log in the state holds: at most so many pass between two looks at it."""


class StepLog(NamedTuple):
    """What happened in the last `LOG_STEPS` steps, kept on the device until it is fetched.

    Row `(step - 1) % LOG_STEPS` is that of step `step`, counted from 1.

    Attributes:
        loss: float32, `[LOG_STEPS]`.
        loss_scale: the scale that the step was made with, float32, `[LOG_STEPS]`.
        next_loss_scale: the scale after it, float32, `[LOG_STEPS]`.
        applied: whether the step was applied, bool, `[LOG_STEPS]`.
        nonfinite_leaves: which gradients were non-finite, if it was not, bool,
            `[LOG_STEPS, leaves]`.
    """

    loss: jax.Array  # shape=(LOG_STEPS,), dtype=float32
    loss_scale: jax.Array  # shape=(LOG_STEPS,), dtype=float32
    next_loss_scale: jax.Array  # shape=(LOG_STEPS,), dtype=float32
    applied: jax.Array  # shape=(LOG_STEPS,), dtype=bool
    nonfinite_leaves: jax.Array  # shape=(LOG_STEPS, leaves), dtype=bool


class TrainState(NamedTuple):
    """All that changes from step to step.

    Attributes:
        step: steps taken, applied or skipped, int32 scalar.
        params: what the model computes with.
        batch_stats: running statistics of the norm layers, float32.
        opt_state: optimizer state with masters and loss scale.
        loss_sum: sum of the losses of this epoch's applied steps, float32 scalar. The loss of a
            step that overflows may be infinite.
        applied_steps: number of those steps, int32 scalar.
        log: the last steps one by one.
    """

    step: jax.Array
    params: Any
    batch_stats: Any
    opt_state: Any
    loss_sum: jax.Array
    applied_steps: jax.Array
    log: StepLog


def init_train_state(
    params_f32: Any,
    batch_stats: Any,
    tx: optax.GradientTransformationExtraArgs,
    policy: mpopt.Policy,
) -> TrainState:
    """Makes the state before the first step.

    Args:
        params_f32: initial params in float32; the masters are exact copies.
        batch_stats: initial running statistics.
        tx: the optimizer.
        policy: tells what each param is cast to.

    Returns:
        The state.
    """
    opt_state = tx.init(params_f32)
    num_leaves = optax.tree.get(opt_state, "nonfinite_leaves").size
    return TrainState(
        step=jnp.array(0, jnp.int32),
        params=policy.cast_to_param(params_f32),
        batch_stats=batch_stats,
        opt_state=opt_state,
        loss_sum=jnp.array(0, jnp.float32),
        applied_steps=jnp.array(0, jnp.int32),
        log=StepLog(
            loss=jnp.zeros(LOG_STEPS, jnp.float32),
            loss_scale=jnp.zeros(LOG_STEPS, jnp.float32),
            next_loss_scale=jnp.zeros(LOG_STEPS, jnp.float32),
            applied=jnp.zeros(LOG_STEPS, bool),
            nonfinite_leaves=jnp.zeros((LOG_STEPS, num_leaves), bool),
        ),
    )


def start_epoch(state: TrainState) -> TrainState:
    """Clears the sums of the last epoch.

    Args:
        state: the state after an epoch.

    Returns:
        The state to begin the next with.
    """
    # Zeros like the former sums are where those are.
    return state._replace(
        loss_sum=jnp.zeros_like(state.loss_sum), applied_steps=jnp.zeros_like(state.applied_steps)
    )
