"""Stops a training that no longer makes steps, with what is known about the cause."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import mpopt
from experiments.config import MIN_LOSS_SCALE, TrainConfig
from experiments.diagnosis import Overflow, backward_order, find_overflow, order_names
from experiments.errors import UserError
from experiments.steps import Progress
from experiments.train_state import TrainState

MAX_NONFINITE_STEPS = 5
"""Steps in a row without a finite gradient at a loss scale that cannot fall any further."""

Batch = Sequence[Any]
Diagnose = Callable[[], tuple[list[str], Overflow | None]]


class StalledError(UserError):
    """A training that makes no steps any more."""


def check_progress(progress: Progress, config: TrainConfig, diagnose: Diagnose) -> None:
    """Raises where a training is stuck.

    In float16 skipped steps are ordinary: the scale backs off until gradients are finite. Three
    things are not: too many in a row; more than a few at the scale's floor; and an applied step
    whose loss is not finite. In the other precisions the loss scale does not move, so that a few
    skipped steps already mean that the params are beyond recovery.

    Args:
        progress: what the last look at the device gave.
        config: the run.
        diagnose: called where the training is stuck; from :func:`diagnose_step`.

    Raises:
        StalledError: says the step, the scale, the skips, the leaves with non-finite gradients and
            where the forward pass overflows.
    """
    reason = _reason(progress, config)
    if reason is None:
        return
    leaves, overflow = diagnose()
    lines = [
        f"Training stopped at step {progress.step}: {reason}; loss scale {progress.loss_scale:g}, "
        f"{progress.total_skips} skipped steps in all."
    ]
    if leaves:
        listed = ", ".join(leaves[:5]) + (f" and {len(leaves) - 5} more" if leaves[5:] else "")
        lines.append(f"Non-finite gradients, in the order of the backward pass: {listed}.")
    if overflow is not None:
        lines.append(f"The forward pass of that step overflows {overflow}.")
    lines.append(_advice(config, is_forward=overflow is not None))
    raise StalledError("\n".join(lines))


def diagnose_step(
    loss_fn: Callable[..., Any],
    state: TrainState,
    make_batch: Callable[[], Batch],
    on_one_device: Callable[[Any], Any] = lambda tree: tree,
) -> tuple[list[str], Overflow | None]:
    """Looks for the cause of a skipped step by taking it again, operation by operation.

    A skipped step leaves params and statistics as they were, so the repetition is exact.

    Args:
        loss_fn: from `train_step.make_loss_fn`.
        state: the state after the step.
        make_batch: returns inputs and targets of the step.
        on_one_device: collects arrays that are spread over devices.

    Returns:
        The leaves with non-finite gradients, in the order of the backward pass, and the first
        overflow of the forward pass, or None where it has none.
    """
    names = []
    if not mpopt.grads_finite(state.opt_state):
        names = mpopt.nonfinite_params(state.opt_state, state.params)
    args = on_one_device((state.params, state.batch_stats, *make_batch()))
    return order_names(names, backward_order(loss_fn, *args)), find_overflow(loss_fn, *args)


def _reason(progress: Progress, config: TrainConfig) -> str | None:
    is_float16 = config.precision == "float16"
    limit = config.max_consecutive_skips
    if not is_float16:
        limit = min(limit, MAX_NONFINITE_STEPS)
    for record in progress.records:
        if record.applied and not math.isfinite(record.loss):
            return f"the loss of step {record.step} is {record.loss}"
    if progress.consecutive_skips > limit:
        return f"{progress.consecutive_skips} steps in a row were skipped"
    if is_float16:
        at_floor = 0
        for record in reversed(progress.records):
            if record.applied or record.loss_scale > MIN_LOSS_SCALE:
                break
            at_floor += 1
        if at_floor > MAX_NONFINITE_STEPS:
            return f"{at_floor} steps in a row were skipped at the smallest loss scale"
    return None


def _advice(config: TrainConfig, *, is_forward: bool) -> str:
    if config.precision == "float16" and is_forward:
        return (
            "No loss scale can mend that. Keep that layer in float32, lower --learning-rate, or "
            "try --precision bfloat16."
        )
    if config.precision == "float16":
        return "Lower --learning-rate, add --warmup-epochs, or try --precision bfloat16."
    return "The loss is not finite. Lower --learning-rate or add --warmup-epochs."
