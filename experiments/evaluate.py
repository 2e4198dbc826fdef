"""Evaluation on a whole split: every example once, in batches of one shape."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.inputs.batches import TestBatch
from experiments.train_step import EvalStep, EvalTotals


def evaluate(
    eval_step: EvalStep,
    params: Any,
    batch_stats: Any,
    test_batches: Iterable[TestBatch],
) -> tuple[float, float]:
    """Measures a model on a whole split.

    Args:
        eval_step: from `train_step.make_eval_step`.
        params: what the model computes with.
        batch_stats: running statistics.
        test_batches: from `Batches.test_batches`.

    Returns:
        The mean loss and the accuracy, a share of 1.
    """
    totals = EvalTotals(jnp.array(0, jnp.float32), jnp.array(0, jnp.int32), jnp.array(0, jnp.int32))
    for batch in test_batches:
        totals = eval_step(totals, params, batch_stats, *batch)
    totals = jax.device_get(totals)
    num_examples = int(totals.num_examples)
    return float(totals.loss_sum) / num_examples, int(totals.num_correct) / num_examples
