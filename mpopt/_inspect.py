"""Accessors: what the mixed-precision state holds, wherever it sits in an optimizer state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpopt import _tree
from mpopt._masters import WithMasterParamsState, edited_master
from mpopt._scaling import find_loss_scale_state, path_digest
from mpopt._sharding import check_same_layout
from mpopt._unscaling import align_leading

PyTree = Any


def loss_scale(opt_state: PyTree) -> jax.Array:
    """Returns the loss scale in force: the one of the next step.

    Args:
        opt_state: optimizer state that holds a loss scale at any depth; `nnx.Optimizer.opt_state`
            too. Inside or outside `jit`.

    Returns:
        A float32 scalar, in a buffer of its own: it outlives a donated `opt_state`.

    Raises:
        ValueError: where `opt_state` holds no loss scale, or several, or one inside a wrapper
            that belongs inside it (`optax.MultiSteps`, `optax.apply_if_finite`).

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import mpopt
        >>> state = mpopt.mixed_precision(optax.sgd(0.1)).init(jnp.zeros(2, jnp.float16))
        >>> float(mpopt.loss_scale(state))
        32768.0
    """
    return _copy(find_loss_scale_state(opt_state).loss_scale_state.loss_scale)


def grads_finite(opt_state: PyTree) -> jax.Array:
    """Returns whether the last update was applied; True before the first.

    Args:
        opt_state: as in :func:`loss_scale`.

    Returns:
        A bool scalar.

    Raises:
        ValueError: as :func:`loss_scale`.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import mpopt
        >>> tx = mpopt.mixed_precision(optax.sgd(0.1))
        >>> params = jnp.zeros(2, jnp.float16)
        >>> _, state = tx.update(jnp.full(2, jnp.inf, jnp.float16), tx.init(params), params)
        >>> bool(mpopt.grads_finite(state))
        False
    """
    return _copy(find_loss_scale_state(opt_state).grads_finite)


def metrics(opt_state: PyTree) -> dict[str, jax.Array]:
    """Returns what to log: `loss_scale, grads_finite, consecutive_skips, total_skips`.

    Args:
        opt_state: as in :func:`loss_scale`.

    Returns:
        A dict of scalars: float32, bool, int32, int32.

    Raises:
        ValueError: as :func:`loss_scale`.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import mpopt
        >>> state = mpopt.mixed_precision(optax.sgd(0.1)).init(jnp.zeros(2, jnp.float16))
        >>> {name: value.item() for name, value in mpopt.metrics(state).items()}
        {'loss_scale': 32768.0, 'grads_finite': True, 'consecutive_skips': 0, 'total_skips': 0}
    """
    state = find_loss_scale_state(opt_state)
    return {
        "loss_scale": _copy(state.loss_scale_state.loss_scale),
        "grads_finite": _copy(state.grads_finite),
        "consecutive_skips": _copy(state.consecutive_skips),
        "total_skips": _copy(state.total_skips),
    }


def where_applied(opt_state: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """Returns `new` where the last step was applied, else `old`.

    For what changes beside the optimizer: batch statistics (those of an overflowing batch are NaN
    for ever), averages of params, counters.

    Args:
        opt_state: the optimizer state *after* the update.
        new: a tree of arrays or numbers.
        old: a tree of the same structure, shapes and dtypes.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: where the trees differ, naming the leaf, and as :func:`loss_scale`.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import mpopt
        >>> tx = mpopt.mixed_precision(optax.sgd(0.1))
        >>> params = jnp.zeros(2, jnp.float16)
        >>> _, state = tx.update(jnp.full(2, jnp.nan, jnp.float16), tx.init(params), params)
        >>> mpopt.where_applied(state, {"mean": jnp.full(1, jnp.nan)}, {"mean": jnp.ones(1)})
        {'mean': Array([1.], dtype=float32)}
    """
    applied = find_loss_scale_state(opt_state).grads_finite
    pairs = _tree.leaves_with_paths(old)
    treedef = jax.tree.structure(old)
    new_leaves = _tree.flatten_like(
        treedef, [path for path, _ in pairs], new, "new values of where_applied", "old ones"
    )
    rows = [(path, a, b) for (path, b), a in zip(pairs, new_leaves, strict=True)]
    return jax.tree.unflatten(treedef, [_select(applied, *row) for row in rows])


def _select(applied: jax.Array, path: str, new: Any, old: Any) -> Any:
    described = [_describe(x) for x in (new, old)]
    if described[0] != described[1]:
        raise ValueError(
            f"where_applied: leaf {path!r} is {described[0]} in new and {described[1]} in old. "
            "Cast the new value: the result must keep its dtype from step to step."
        )
    return jnp.where(align_leading(applied, jnp.asarray(old)), new, old)


def _describe(x: Any) -> str:
    dtype = _tree.leaf_dtype(x)
    return type(x).__name__ if dtype is None else f"{dtype}{list(jnp.shape(x))}"


def master_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the full float32 params: what to export, evaluate or average.

    Args:
        opt_state: optimizer state that holds master params at any depth. Several disjoint ones
            (`optax.partition`) are merged.
        params: the current params.

    Returns:
        A tree in params' structure, in new buffers: the master where a leaf has one (or
        `float32(param)` where the param was edited since), a narrow leaf without one upcast, and
        every other leaf as it is.

    Raises:
        ValueError: where `opt_state` holds no master params, two for one leaf, or one of another
            shape or explicit sharding.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import mpopt
        >>> policy = mpopt.Policy(jnp.float16)
        >>> tx = mpopt.mixed_precision(optax.sgd(0.1), policy=policy)
        >>> params_f32 = {"w": jnp.array([0.1, 3.0])}
        >>> opt_state = tx.init(params_f32)
        >>> params = policy.cast_to_param(params_f32)
        >>> bool(jnp.all(mpopt.master_params(opt_state, params)["w"] == params_f32["w"]))
        True
    """
    states = _tree.find_states(opt_state, WithMasterParamsState)
    if not states:
        raise ValueError(
            "The optimizer state holds no master params: make the optimizer with "
            "mpopt.mixed_precision or mpopt.with_master_params."
        )
    masters: dict[str, jax.Array] = {}
    for state in states:
        for path, leaf in _tree.leaves_with_paths(state.master_params):
            if path in masters:
                raise ValueError(f"The optimizer state holds two masters for params leaf {path!r}.")
            masters[path] = leaf

    def full(path: str, leaf: Any) -> Any:
        master = masters.pop(path, None)
        if master is None:
            wide = jnp.float32 if _tree.is_narrow(leaf) else _tree.leaf_dtype(leaf)
            return leaf if wide is None else jnp.array(leaf, wide, copy=True)
        if jnp.shape(master) != jnp.shape(leaf):
            raise ValueError(
                f"params leaf {path!r} has shape {jnp.shape(leaf)}, its master has "
                f"{jnp.shape(master)}."
            )
        check_same_layout(path, leaf, master)
        return edited_master(leaf, master) if _tree.is_narrow(leaf) else _copy(master)

    result = _tree.map_with_paths(full, params)
    if masters:
        raise ValueError(
            f"The optimizer state has a master for {next(iter(masters))!r}, params have no such "
            "leaf. Pass the tree that tx.init and tx.update get."
        )
    return result


def nonfinite_params(opt_state: PyTree, params: PyTree) -> list[str]:
    """Names the leaves whose gradient was non-finite in the last skipped step. Host side.

    Args:
        opt_state: as in :func:`loss_scale`.
        params: the params (values do not matter).

    Returns:
        Key paths such as `encoder/layers/0/kernel`, in the order of params' leaves; empty when
        no step was skipped yet.

    Raises:
        ValueError: inside `jit`, and as :func:`loss_scale`.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import mpopt
        >>> tx = mpopt.mixed_precision(optax.sgd(0.1))
        >>> params = {"a": jnp.zeros(2, jnp.float16), "b": jnp.zeros(2, jnp.float16)}
        >>> grads = {"a": jnp.ones(2, jnp.float16), "b": jnp.full(2, jnp.inf, jnp.float16)}
        >>> _, state = tx.update(grads, tx.init(params), params)
        >>> mpopt.nonfinite_params(state, params)
        ['b']
    """
    state = find_loss_scale_state(opt_state)
    # An ensemble has leading axes: a leaf counts when it overflowed in any member.
    flags = _host(state.nonfinite_leaves, "nonfinite_params")
    flags = np.atleast_1d(np.any(flags, axis=tuple(range(flags.ndim - 1))))
    digests = _host(state.leaf_digests, "nonfinite_params")
    digests = digests[(0,) * (digests.ndim - 1)]
    paths = {path_digest(path): path for path, _ in _tree.leaves_with_paths(params)}
    return [
        paths.get(int(digest), f"leaf {index} of the {len(flags)} that the optimizer sees")
        for index, digest in enumerate(digests)
        if flags[index]
    ]


def raise_if_stalled(opt_state: PyTree, params: PyTree, max_consecutive_skips: int) -> None:
    """Raises when more than `max_consecutive_skips` steps in a row were skipped. Host side.

    A run whose every step overflows even at the smallest scale goes on without an error and
    learns nothing. Call this every few hundred steps, or where metrics are fetched anyway.

    Args:
        opt_state: as in :func:`loss_scale`.
        params: the params, for the names.
        max_consecutive_skips: skips in a row that are tolerated.

    Raises:
        FloatingPointError: names the scale, the count and the leaves.
        ValueError: inside `jit`, and as :func:`loss_scale`.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import mpopt
        >>> tx = mpopt.mixed_precision(optax.sgd(0.1))
        >>> params = {"w": jnp.zeros(2, jnp.float16)}
        >>> state = tx.init(params)
        >>> for _ in range(3):
        ...     _, state = tx.update({"w": jnp.full(2, jnp.nan, jnp.float16)}, state, params)
        >>> mpopt.raise_if_stalled(state, params, max_consecutive_skips=2)
        Traceback (most recent call last):
            ...
        FloatingPointError: 3 steps in a row were skipped, loss scale 4096. Non-finite gradients: w
    """
    state = find_loss_scale_state(opt_state)
    skips = int(_host(state.consecutive_skips, "raise_if_stalled").max(initial=0))
    if skips <= max_consecutive_skips:
        return
    names = nonfinite_params(opt_state, params)
    listed = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    scale = float(_host(state.loss_scale_state.loss_scale, "raise_if_stalled").min())
    raise FloatingPointError(
        f"{skips} steps in a row were skipped, loss scale {scale:g}. Non-finite gradients: "
        f"{listed or 'none; the loss scale itself is not finite and positive'}"
    )


def _copy(x: Any) -> jax.Array:
    return jnp.array(x, copy=True)


def _host(x: Any, function: str) -> np.ndarray:
    if isinstance(x, Tracer):
        raise ValueError(f"mpopt.{function} reads values: call it outside jit.")
    return np.asarray(x)
