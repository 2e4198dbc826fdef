"""Evaluation on a whole split: every example once, in batches of one shape."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.train_step import EvalStep, EvalTotals


def padded_batches(num_examples: int, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cuts a split into batches of one size, so that one compiled program serves all.

    Args:
        num_examples: examples in the split.
        batch_size: size of every batch.

    Yields:
        The indices of a batch, and a mask that is False where an index only fills the last one.
    """
    for start in range(0, num_examples, batch_size):
        indices = np.arange(start, start + batch_size, dtype=np.int32)
        is_example = indices < num_examples
        yield np.where(is_example, indices, 0).astype(np.int32), is_example


def evaluate(
    eval_step: EvalStep,
    params: Any,
    batch_stats: Any,
    images: jax.Array,
    labels: jax.Array,
    batch_size: int,
) -> tuple[float, float]:
    """Measures a model on a whole split.

    Args:
        eval_step: from `train_step.make_eval_step`.
        params: what the model computes with.
        batch_stats: running statistics.
        images: all images of the split, on the device.
        labels: their labels.
        batch_size: how many to evaluate at a time.

    Returns:
        The mean loss and the accuracy, a share of 1.
    """
    totals = EvalTotals(jnp.array(0, jnp.float32), jnp.array(0, jnp.int32), jnp.array(0, jnp.int32))
    for indices, is_example in padded_batches(len(labels), batch_size):
        totals = eval_step(totals, params, batch_stats, images, labels, indices, is_example)
    totals = jax.device_get(totals)
    num_examples = int(totals.num_examples)
    return float(totals.loss_sum) / num_examples, int(totals.num_correct) / num_examples
