"""Stops a training that no longer makes steps, with what is known about the cause."""

import mpopt
from experiments.config import TrainConfig
from experiments.errors import UserError
from experiments.train_step import TrainState

MAX_NONFINITE_STEPS = 5
"""Steps in a row without a finite gradient that a run with a fixed loss scale may have."""


def check_progress(state: TrainState, config: TrainConfig) -> None:
    """Raises where too many steps in a row were skipped.

    In float16 skipped steps are ordinary: the scale backs off until gradients are finite. It is
    when they go on that something is wrong. In the other precisions the loss scale does not move,
    so that a few of them already mean that the params are beyond recovery.

    Args:
        state: the state after a step; reading it waits for the device.
        config: the run.

    Raises:
        UserError: names the step, the scale, the count and the params with non-finite gradients.
    """
    limit = config.max_consecutive_skips
    if config.precision == "float16":
        advice = "Lower --learning-rate, add --warmup-epochs, or try --precision bfloat16."
    else:
        limit = min(limit, MAX_NONFINITE_STEPS)
        advice = "The loss is not finite. Lower --learning-rate or add --warmup-epochs."
    try:
        mpopt.raise_if_stalled(state.opt_state, state.params, limit)
    except FloatingPointError as error:
        raise UserError(
            f"Training stopped at step {int(state.step)}: {error}.\n{advice}"
        ) from error
