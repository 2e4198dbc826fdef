"""Steps as the host sees them: fetched with the metrics, many at a time, and turned to events."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import optax

import mpopt
from experiments.train_state import LOG_STEPS, TrainState

MAX_LEAVES = 20
"""How many leaves a skip's event names."""


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step.

    Attributes:
        step: from 1.
        loss: the mean loss of its batch.
        loss_scale: the scale that it was made with.
        next_loss_scale: the scale after it.
        applied: False where it was skipped.
        leaves: key paths of the non-finite gradients, where it was skipped.
    """

    step: int
    loss: float
    loss_scale: float
    next_loss_scale: float
    applied: bool
    leaves: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Progress:
    """What one look at the device gives.

    Attributes:
        step: steps taken.
        loss_scale: the scale in force.
        consecutive_skips: skipped steps in a row, up to now.
        total_skips: skipped steps since the start.
        records: the steps since the last look, oldest first.
    """

    step: int
    loss_scale: float
    consecutive_skips: int
    total_skips: int
    records: tuple[StepRecord, ...]


class StepReader:
    """Reads the log in a state.

    Args:
        state: the first state: its step is where reading starts.
    """

    def __init__(self, state: TrainState) -> None:
        """Looks up the names of the leaves, in the order in which the optimizer sees them."""
        flags = optax.tree.get(state.opt_state, "nonfinite_leaves")
        everything = optax.tree.set(state.opt_state, nonfinite_leaves=np.ones(flags.shape, bool))
        self._names = mpopt.nonfinite_params(everything, state.params)
        self._read_to = int(state.step)

    def read(self, state: TrainState) -> Progress:
        """Fetches what happened since the last call, in one transfer.

        Args:
            state: a state at most `LOG_STEPS` steps later.

        Returns:
            The steps, and the metrics after them.

        Raises:
            ValueError: where the log has lost steps.
        """
        step, log, metrics = jax.device_get((state.step, state.log, mpopt.metrics(state.opt_state)))
        if int(step) - self._read_to > LOG_STEPS:
            raise ValueError(f"read is due every {LOG_STEPS} steps, it came after more.")
        records = []
        for number in range(self._read_to + 1, int(step) + 1):
            loss, scale, next_scale, applied, flags = (
                rows[(number - 1) % LOG_STEPS] for rows in log
            )
            leaves = () if applied else tuple(np.array(self._names)[flags].tolist())
            records.append(
                StepRecord(
                    number, float(loss), float(scale), float(next_scale), bool(applied), leaves
                )
            )
        self._read_to = int(step)
        return Progress(
            int(step),
            float(metrics["loss_scale"]),
            int(metrics["consecutive_skips"]),
            int(metrics["total_skips"]),
            tuple(records),
        )


def events(records: Iterable[StepRecord]) -> Iterator[dict[str, Any]]:
    """Turns steps into the lines of events.jsonl: skips, and changes of the loss scale.

    Args:
        records: steps, in order.

    Yields:
        A JSON object for each event.
    """
    for record in records:
        if not record.applied:
            yield {
                "event": "skip",
                "step": record.step,
                "loss_scale": record.loss_scale,
                "loss": record.loss,
                "leaves": list(record.leaves[:MAX_LEAVES]),
                "num_leaves": len(record.leaves),
            }
        if record.next_loss_scale != record.loss_scale:
            yield {
                "event": "loss_scale",
                "step": record.step,
                "loss_scale": record.next_loss_scale,
            }
