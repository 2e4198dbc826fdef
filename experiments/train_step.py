"""The training and evaluation steps: one function for float16, bfloat16 and float32.

What differs between the precisions is the policy and the loss-scale rule, not the step.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mpopt
from experiments.augment import Augmentation, augment, normalise

TrainStep = Any  # a jitted function, see make_train_step
EvalStep = Any  # a jitted function, see make_eval_step


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
    """

    step: jax.Array
    params: Any
    batch_stats: Any
    opt_state: Any
    loss_sum: jax.Array
    applied_steps: jax.Array


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
    return TrainState(
        step=jnp.array(0, jnp.int32),
        params=policy.cast_to_param(params_f32),
        batch_stats=batch_stats,
        opt_state=tx.init(params_f32),
        loss_sum=jnp.array(0, jnp.float32),
        applied_steps=jnp.array(0, jnp.int32),
    )


def start_epoch(state: TrainState) -> TrainState:
    """Clears the sums of the last epoch.

    Args:
        state: the state after an epoch.

    Returns:
        The state to begin the next with.
    """
    return state._replace(loss_sum=jnp.array(0, jnp.float32), applied_steps=jnp.array(0, jnp.int32))


def make_train_step(
    graphdef: nnx.GraphDef[Any],
    tx: optax.GradientTransformationExtraArgs,
    policy: mpopt.Policy,
    augmentation: Augmentation,
) -> TrainStep:
    """Makes the jitted training step.

    Args:
        graphdef: the model.
        tx: the optimizer, made with `mpopt.mixed_precision`.
        policy: dtypes of params, activations and outputs.
        augmentation: what happens to the images.

    Returns:
        `train_step(state, key, images, labels, indices) -> state`. `state` is donated. `images`
        (uint8) and `labels` are the whole training split; `indices` says which examples make the
        batch. `key` is the run's random key; each step derives its own from it.
    """

    @partial(jax.jit, donate_argnums=0)
    def train_step(
        state: TrainState, key: jax.Array, images: jax.Array, labels: jax.Array, indices: jax.Array
    ) -> TrainState:
        batch = augment(jax.random.fold_in(key, state.step), images[indices], augmentation)
        inputs = policy.cast_to_compute(normalise(batch, augmentation))
        targets = labels[indices]

        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            # Copied, as the statistics come from outside this trace and the model updates them.
            model = nnx.merge(graphdef, params, state.batch_stats, copy=True)
            logits = policy.cast_to_output(model(inputs, train=True))
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            return mpopt.scale_loss(losses.mean(), state.opt_state), nnx.state(model, nnx.BatchStat)

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        applied = mpopt.grads_finite(opt_state)
        return TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            # An overflowing batch leaves statistics that are NaN for ever.
            batch_stats=mpopt.where_applied(opt_state, batch_stats, state.batch_stats),
            opt_state=opt_state,
            loss_sum=state.loss_sum + jnp.where(applied, loss, 0),
            applied_steps=state.applied_steps + applied,
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
