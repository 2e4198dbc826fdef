"""Loss scaling: unscale the gradients, skip the steps that overflow, adjust the scale."""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from mpopt import _tree
from mpopt._loss_scale import LossScale, LossScaleState, cast_loss_scale_state
from mpopt._masters import as_transformation
from mpopt._unscaling import divide, finite_leaves

PyTree = Any


class WithLossScaleState(NamedTuple):
    """State of :func:`with_loss_scale`.

    Attributes:
        loss_scale_state: state of the rule; its scale is that of the next step.
        grads_finite: whether the last update was applied, bool scalar.
        consecutive_skips: skipped steps in a row up to now, int32 scalar.
        total_skips: skipped steps since `init`, int32 scalar.
        nonfinite_leaves: for each trained leaf, whether its gradient was non-finite in the last
            skipped step, bool vector.
        leaf_digests: a digest of each trained leaf's key path, uint32 vector. Under
            `optax.masked` or `optax.partition` the transformation sees some of the leaves only;
            the digests tell which.
        inner_state: state of the inner optimizer.
    """

    loss_scale_state: LossScaleState
    grads_finite: jax.Array  # shape=(), dtype=jnp.bool_
    consecutive_skips: jax.Array  # shape=(), dtype=jnp.int32
    total_skips: jax.Array  # shape=(), dtype=jnp.int32
    nonfinite_leaves: jax.Array  # shape=(number of trained leaves,), dtype=jnp.bool_
    leaf_digests: jax.Array  # shape=(number of trained leaves,), dtype=jnp.uint32
    inner_state: PyTree


_STATE_DTYPES = {
    "loss_scale": jnp.float32,
    "finite_steps": jnp.int32,
    "hysteresis_left": jnp.int32,
    "grads_finite": jnp.bool_,
    "consecutive_skips": jnp.int32,
    "total_skips": jnp.int32,
    "nonfinite_leaves": jnp.bool_,
    "leaf_digests": jnp.uint32,
}

# Wrappers that are silently wrong around a loss scale: they add up, inspect or pass on scaled
# gradients, or keep the scale from backing off.
_INSIDE_ONLY = {
    optax.MultiStepsState: "optax.MultiSteps(inner, k)",
    optax.ApplyIfFiniteState: "optax.apply_if_finite(inner, n)",
    optax.ConditionallyTransformState: "optax.conditionally_transform(inner, f)",
    optax.contrib.MechanicState: "optax.contrib.mechanize(inner)",
    optax.contrib.SAMState: "optax.contrib.sam(inner, adversary)",
}


def with_loss_scale(
    inner: Any, loss_scale: LossScale, *, axis_name: str | Sequence[str] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Unscales gradients, skips non-finite steps and adjusts the loss scale.

    `update` takes the gradients of a loss that went through :func:`scale_loss`. Those narrower
    than float32 are taken to float32, then all are divided by the scale they were made with. If
    every element of every unscaled gradient is finite, `inner` makes its step. If not, params and
    `inner_state` keep their bits (momentum, counters, schedules, accumulators) and the updates
    are zero. Either way the rule then sets the scale of the next step.

    Used alone, it is for float32 params and a model that computes in float16.

    Args:
        inner: any optax optimizer, also one with extra args, or an object with
            `.gradient_transformation()` such as `optax.MultiSteps`. An extra arg named `grad` is
            unscaled like the gradients; all others are passed on as they are, so `value` must be
            the true loss, and a `value_fn` or `grad_fn` must return unscaled values.
        loss_scale: the rule: :func:`dynamic_loss_scale`, :func:`static_loss_scale` or your own.
        axis_name: under `jax.shard_map` or `jax.pmap`, the mesh axes over which all devices must
            agree whether a step is finite: one device's overflow then skips the step on all.
            Without it each device decides alone from the gradients that it sees, and params and
            scales drift apart without an error. It averages nothing: take the mean of loss or
            gradients yourself. Under plain `jax.jit` no axis is needed: arrays are global there.

    Returns:
        A transformation with :class:`WithLossScaleState`. It goes outermost: clipping,
        accumulation and masks go inside.

    Raises:
        ValueError: where `loss_scale` is no rule, `inner` holds a loss scale already, or an
            update would change the dtype of a state leaf.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import mpopt
        >>> tx = mpopt.with_loss_scale(optax.sgd(0.1), mpopt.dynamic_loss_scale(initial=8.0))
        >>> params = jnp.array([1.0, 2.0])
        >>> state = tx.init(params)
        >>> updates, state = tx.update(jnp.array([8.0, jnp.inf]), state, params)
        >>> optax.apply_updates(params, updates).tolist()
        [1.0, 2.0]
        >>> float(mpopt.loss_scale(state))
        4.0

    References:
        Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018.
    """
    inner = as_transformation(inner)
    if not isinstance(loss_scale, LossScale):
        raise ValueError(
            f"loss_scale must be a LossScale, got {loss_scale!r}. Use mpopt.static_loss_scale(s) "
            "for a fixed number, or mpopt.dynamic_loss_scale()."
        )

    def init_fn(params: PyTree) -> WithLossScaleState:
        trained = _tree.hide_untrained(params)
        inner_state = inner.init(trained)
        if _tree.find_states(inner_state, WithLossScaleState):
            raise ValueError(
                "inner holds a loss scale already: gradients would be unscaled twice. Wrap the "
                "optimizer once, outermost."
            )
        paths = [path for path, _ in _tree.leaves_with_paths(trained)]
        return WithLossScaleState(
            loss_scale_state=cast_loss_scale_state(loss_scale.init()),
            grads_finite=jnp.array(True),
            consecutive_skips=jnp.array(0, jnp.int32),
            total_skips=jnp.array(0, jnp.int32),
            nonfinite_leaves=jnp.zeros(len(paths), jnp.bool_),
            leaf_digests=jnp.array([path_digest(path) for path in paths], jnp.uint32),
            inner_state=_tree.own_buffers(inner_state, params),
        )

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, WithLossScaleState]:
        _check_state(state)
        scale = state.loss_scale_state.loss_scale
        if "grad" in extra:
            extra["grad"] = divide(_tree.match_gradients(extra["grad"], params)[0], scale)
        grads, params, reveal = _tree.match_gradients(updates, params)
        grads = divide(grads, scale)
        leaves_finite = finite_leaves(grads, axis_name)
        # The barrier makes one value of the decision. Without it XLA computes all reductions
        # again inside every fusion that uses it.
        finite = lax.optimization_barrier(
            jnp.all(leaves_finite) & jnp.isfinite(scale) & (scale > 0)
        )

        updates, inner_state = inner.update(grads, state.inner_state, params, **extra)
        inner_state = _tree.check_state_kept(state.inner_state, inner_state)
        # -0.0 is the zero that leaves every param its bits: -0.0 + 0.0 is 0.0.
        updates = jax.tree.map(
            lambda u: _select(finite, u, lax.full_like(jnp.asarray(u), -0.0)), updates
        )
        return reveal(updates), WithLossScaleState(
            loss_scale_state=cast_loss_scale_state(
                loss_scale.adjust(state.loss_scale_state, finite)
            ),
            grads_finite=finite,
            consecutive_skips=jnp.where(finite, 0, optax.safe_increment(state.consecutive_skips)),
            total_skips=jnp.where(
                finite, state.total_skips, optax.safe_increment(state.total_skips)
            ),
            nonfinite_leaves=jnp.where(finite, state.nonfinite_leaves, ~leaves_finite),
            leaf_digests=state.leaf_digests,
            inner_state=jax.tree.map(
                lambda new, old: _select(finite, new, old), inner_state, state.inner_state
            ),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def unscale(grads: PyTree, opt_state: PyTree) -> PyTree:
    """Returns float32 gradients with the loss scale divided out, to log or look at.

    `tx.update` unscales by itself: give it the scaled gradients.

    Args:
        grads: gradients of a scaled loss.
        opt_state: the optimizer state that they were made with, from *before* the update.

    Returns:
        The same tree. Gradients narrower than float32 become float32; float64 and complex keep
        their dtype; leaves that are no float pass.

    Raises:
        ValueError: as :func:`loss_scale`.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import mpopt
        >>> tx = mpopt.mixed_precision(optax.sgd(0.1), loss_scale=mpopt.static_loss_scale(128.0))
        >>> state = tx.init(jnp.zeros(2))
        >>> grads = mpopt.unscale(jnp.array([3.0, 4.0], jnp.float16) * 128, state)
        >>> float(optax.tree.norm(grads))
        5.0
    """
    scale = find_loss_scale_state(opt_state).loss_scale_state.loss_scale
    return divide(grads, scale)


def find_loss_scale_state(opt_state: PyTree) -> WithLossScaleState:
    """Returns the one loss-scale state inside `opt_state`, with NNX Variables unwrapped.

    Raises:
        ValueError: where there is none, or several, or one inside a wrapper that belongs inside.
    """
    nodes = _tree.find_states(opt_state, (WithLossScaleState, *_INSIDE_ONLY))
    found = [node for node in nodes if isinstance(node, WithLossScaleState)]
    for node in nodes:
        call = _INSIDE_ONLY.get(type(node))
        if call is not None and _tree.find_states(node, WithLossScaleState):
            raise ValueError(
                f"{call.partition('(')[0]} is around the loss scale, where it meets scaled "
                f"gradients and overflows. It goes inside: mpopt.mixed_precision({call})."
            )
    if len(found) != 1:
        reason = (
            "holds no loss scale: make the optimizer with mpopt.mixed_precision or "
            "mpopt.with_loss_scale, and pass the opt_state of its init or update"
            if not found
            else f"holds {len(found)} loss scales: use one, outermost, or pass the part of the "
            "state that is meant"
        )
        raise ValueError(f"The optimizer state {reason}.")
    state = found[0]
    fields = {
        name: jax.tree.map(_tree.unwrap, value, is_leaf=_tree.is_variable)
        for name, value in state._asdict().items()
        if name != "inner_state"
    }
    return state._replace(**fields)


def path_digest(path: str) -> int:
    """A 32-bit digest of a key path."""
    return zlib.crc32(path.encode())


def _check_state(state: WithLossScaleState) -> None:
    _tree.check_state_type(state, WithLossScaleState)
    _tree.check_state_type(state.loss_scale_state, LossScaleState)
    fields = {**state._asdict(), **state.loss_scale_state._asdict()}
    for name, dtype in _STATE_DTYPES.items():
        _tree.check_state_dtype(name, fields[name], dtype)


def _select(finite: jax.Array, new: Any, old: Any) -> jax.Array:
    # lax, not jnp.where: an optimizer has hundreds of leaves, and jnp takes long to trace.
    return lax.select(finite, jnp.asarray(new), old)
