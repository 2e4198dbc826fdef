"""The training and evaluation steps: one function for float16, bfloat16 and float32.

What differs between the precisions is the policy and the loss-scale rule, not the step.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

import mpopt
from experiments.augment import Augmentation, augment, normalise
from experiments.losses import cross_entropy
from experiments.train_state import LOG_STEPS, StepLog, TrainState

TrainStep = Any  # a jitted function, see make_train_step
EvalStep = Any  # a jitted function, see make_eval_step
LossFn = Any  # see make_loss_fn


class EvalTotals(NamedTuple):
    """Sums over the examples evaluated so far.

    Attributes:
        loss_sum: float32 scalar.
        num_correct: int32 scalar.
        num_examples: int32 scalar.
    """

    loss_sum: jax.Array
    num_correct: jax.Array
    num_examples: jax.Array


def make_loss_fn(
    graphdef: nnx.GraphDef[Any], policy: mpopt.Policy, label_smoothing: float = 0.0
) -> LossFn:
    """Makes the loss of a batch, unscaled.

    Args:
        graphdef: the model.
        policy: dtypes of activations and outputs.
        label_smoothing: see `losses.cross_entropy`.

    Returns:
        `loss_fn(params, batch_stats, inputs, targets) -> (loss, batch_stats)`, with a float32
        loss and the statistics after this batch.
    """

    def loss_fn(
        params: Any, batch_stats: Any, inputs: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, Any]:
        # Copied, as the statistics come from outside this trace and the model updates them.
        model = nnx.merge(graphdef, params, batch_stats, copy=True)
        logits = policy.cast_to_output(model(inputs, train=True))
        losses = cross_entropy(logits, targets, label_smoothing)
        return losses.mean(), nnx.state(model, nnx.BatchStat)

    return loss_fn


def make_batch(
    key: jax.Array,
    step: jax.Array,
    images: jax.Array,
    labels: jax.Array,
    indices: jax.Array,
    policy: mpopt.Policy,
    augmentation: Augmentation,
) -> tuple[jax.Array, jax.Array]:
    """Gathers, augments and normalises the examples of a step.

    Args:
        key: the run's random key; the step derives its own from it.
        step: the number of steps before this one.
        images: uint8, those that `indices` index.
        labels: theirs.
        indices: which examples make the batch.
        policy: tells the dtype of the inputs.
        augmentation: what happens to the images.

    Returns:
        What the model gets, and the labels.
    """
    batch = augment(jax.random.fold_in(key, step), images[indices], augmentation)
    return policy.cast_to_compute(normalise(batch, augmentation)), labels[indices]


def row_major(grads: Any) -> Any:
    """Asks XLA for the gradients in the memory layout that params and optimizer state have.

    cuDNN writes the gradient of a convolution with the output channels first. Left alone XLA makes
    the whole update in that layout, and transposes each master, moment and param on the way in and
    out.

    Args:
        grads: gradients.

    Returns:
        The same values.
    """
    return jax.tree.map(
        lambda grad: with_layout_constraint(grad, Layout(tuple(range(grad.ndim)))), grads
    )


def make_train_step(
    graphdef: nnx.GraphDef[Any],
    tx: optax.GradientTransformationExtraArgs,
    policy: mpopt.Policy,
    augmentation: Augmentation,
    *,
    label_smoothing: float = 0.0,
    state_shardings: Any = None,
    batch_sharding: Any = None,
) -> TrainStep:
    """Makes the jitted training step.

    Args:
        graphdef: the model.
        tx: the optimizer, made with `mpopt.mixed_precision`.
        policy: dtypes of params, activations and outputs.
        augmentation: what happens to the images.
        label_smoothing: see `losses.cross_entropy`.
        state_shardings: where the new state lives, a tree of shardings; None for JAX's choice.
        batch_sharding: how the batch is split over devices; None where it is not. Means over the
            batch, those of the norm layers too, are over all of it either way.

    Returns:
        `train_step(state, key, images, labels, indices) -> state`. `state` is donated. `images`
        (uint8) and `labels` are the whole training split; `indices` says which examples make the
        batch. `key` is the run's random key; each step derives its own from it.
    """
    batch_loss = make_loss_fn(graphdef, policy, label_smoothing)

    options = {} if state_shardings is None else {"out_shardings": state_shardings}

    @partial(jax.jit, donate_argnums=0, **options)
    def train_step(
        state: TrainState, key: jax.Array, images: jax.Array, labels: jax.Array, indices: jax.Array
    ) -> TrainState:
        batch = make_batch(key, state.step, images, labels, indices, policy, augmentation)
        if batch_sharding is not None:
            batch = jax.lax.with_sharding_constraint(batch, batch_sharding)

        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            loss, batch_stats = batch_loss(params, state.batch_stats, *batch)
            return mpopt.scale_loss(loss, state.opt_state), batch_stats

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = tx.update(row_major(grads), state.opt_state, state.params)
        applied = mpopt.grads_finite(opt_state)
        row = StepLog(
            loss=loss,
            loss_scale=mpopt.loss_scale(state.opt_state),
            next_loss_scale=mpopt.loss_scale(opt_state),
            applied=applied,
            nonfinite_leaves=optax.tree.get(opt_state, "nonfinite_leaves"),
        )
        index = state.step % LOG_STEPS
        return TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            # An overflowing batch leaves statistics that are NaN for ever.
            batch_stats=mpopt.where_applied(opt_state, batch_stats, state.batch_stats),
            opt_state=opt_state,
            loss_sum=state.loss_sum + jnp.where(applied, loss, 0),
            applied_steps=state.applied_steps + applied,
            log=jax.tree.map(lambda rows, new: rows.at[index].set(new), state.log, row),
        )

    return train_step


def make_eval_step(
    graphdef: nnx.GraphDef[Any], policy: mpopt.Policy, augmentation: Augmentation
) -> EvalStep:
    """Makes the jitted evaluation step.

    Args:
        graphdef: the model.
        policy: dtypes of activations and outputs.
        augmentation: holds the statistics to normalise with; nothing is augmented.

    Returns:
        `eval_step(totals, params, batch_stats, images, labels, indices, is_example) -> totals`.
        `is_example` is False where `indices` only fills the batch.
    """

    @partial(jax.jit, donate_argnums=0)
    def eval_step(
        totals: EvalTotals,
        params: Any,
        batch_stats: Any,
        images: jax.Array,
        labels: jax.Array,
        indices: jax.Array,
        is_example: jax.Array,
    ) -> EvalTotals:
        model = nnx.merge(graphdef, params, batch_stats)
        inputs = policy.cast_to_compute(normalise(images[indices], augmentation))
        logits = policy.cast_to_output(model(inputs, train=False))
        targets = labels[indices]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        correct = jnp.argmax(logits, axis=-1) == targets
        return EvalTotals(
            loss_sum=totals.loss_sum + jnp.sum(losses, where=is_example),
            num_correct=totals.num_correct + jnp.sum(correct & is_example, dtype=jnp.int32),
            num_examples=totals.num_examples + jnp.sum(is_example, dtype=jnp.int32),
        )

    return eval_step
