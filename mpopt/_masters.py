"""Float32 master params for params kept in float16 or bfloat16."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from mpopt import _tree
from mpopt._casting import Policy
from mpopt._rounding import round_to
from mpopt._sharding import check_same_layout

PyTree = Any


class WithMasterParamsState(NamedTuple):
    """State of :func:`with_master_params`.

    Attributes:
        master_params: float32 masters in params' structure; `optax.MaskedNode()` where a leaf is
            its own master.
        inner_state: state of the inner optimizer, made from float32 params.
    """

    master_params: PyTree
    inner_state: PyTree


def with_master_params(
    inner: Any, *, policy: Policy | None = None
) -> optax.GradientTransformationExtraArgs:
    """Lets an optimizer work on float32 master params while the model computes in 16 bits.

    A leaf narrower than 32 bits (by its own dtype, or because `policy` says that it will be) gets
    a float32 master. The inner optimizer sees float32 gradients and float32 params only, so its
    state is float32 too. For master `m` and params leaf `p`, with `m'` the master after the
    step, the update is `u = float32(round(m')) - float32(p)`, in float32, so that
    `optax.apply_updates(p, u)` gives `round(m')` exactly. A float32 leaf is its own master: the
    inner update passes through untouched. Integers, keys and None are hidden from `inner` and
    get zero updates.

    `round` is to nearest even, saturating at the largest finite value. `u` is exact except where
    `|p| / |round(m')| >= 8196` with `|p| >= 1` (float16) or `>= 65793` (bfloat16), and in
    bfloat16 subnormals; `apply_updates` is then off by at most `2^-24 |p|`.

    Edits count: where `float32(p) != round(m)` before an update, the caller has changed the param
    (loaded weights, pruned, projected, swapped in an average), and the master becomes
    `float32(p)`. Transformations *after* this one in a chain see 16-bit steps: changes below one
    unit in the last place are lost. Scaling, decay and projections go inside.

    Apply the updates with `optax.apply_updates`. `p + u` and `equinox.apply_updates` give float32
    params, which the next update refuses. No update can be added to a typed PRNG key: keep keys
    out of the tree that goes to `optax.apply_updates`.

    Args:
        inner: any optax optimizer, also one with extra args, or an object with
            `.gradient_transformation()` such as `optax.MultiSteps`.
        policy: says which leaves of float32 params will be narrow. None goes by the dtypes that
            the params have.

    Returns:
        A transformation. `init` takes float32 params (exact masters) or params that are narrow
        already (their masters are the upcast). `update` needs `params`.

    Raises:
        ValueError: where `policy` is no policy; `init` and `update` name the leaf and the remedy
            where a tree or a dtype is not what they were promised.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import mpopt
        >>> tx = mpopt.with_master_params(optax.sgd(1e-3))
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> state = tx.init(params)
        >>> for _ in range(100):  # each step alone is below half a bfloat16 ulp
        ...     updates, state = tx.update({"w": -jnp.ones(2, jnp.bfloat16)}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> params["w"].tolist()
        [1.1015625, 1.1015625]

    References:
        Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018.
    """
    inner = as_transformation(inner)
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(f"policy must be an mpopt.Policy, got {policy!r}.")

    def init_fn(params: PyTree) -> WithMasterParamsState:
        _tree.check_float_widths(params)
        trained = _tree.hide_untrained(params)
        masters = _tree.map_with_paths(lambda path, leaf: _new_master(path, leaf, policy), trained)
        full = _map_masters(lambda master, p: p if master is None else master, masters, trained)
        inner_state = _tree.own_buffers(inner.init(full), params, masters)
        return WithMasterParamsState(masters, inner_state)

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, WithMasterParamsState]:
        if params is None and jax.tree.leaves(updates):
            raise ValueError(
                "with_master_params needs the params: call tx.update(grads, opt_state, params)."
            )
        _tree.check_state_type(state, WithMasterParamsState)
        if "grad" in extra:
            extra["grad"] = upcast(_tree.match_gradients(extra["grad"], params)[0])
        grads, params, reveal = _tree.match_gradients(updates, params)
        masters = state.master_params
        _check_params(params, masters, policy)
        full = _map_masters(_current_master, masters, params)
        inner_updates, inner_state = inner.update(upcast(grads), state.inner_state, full, **extra)
        inner_state = _tree.check_state_kept(state.inner_state, inner_state)
        stepped = _stored_on_cpu(_map_masters(_step, masters, full, inner_updates))
        updates = _map_masters(_param_update, masters, params, stepped, inner_updates)
        masters = _map_masters(
            lambda master, new: optax.MaskedNode() if master is None else new, masters, stepped
        )
        return reveal(updates), WithMasterParamsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` as a transformation that takes extra args; ValueError where it is none."""
    if not isinstance(inner, optax.GradientTransformation):
        convert = getattr(inner, "gradient_transformation", None)
        if convert is None:
            raise ValueError(f"inner must be an optax optimizer, got {inner!r}.")
        inner = convert()
        # optax.MultiSteps returns a plain GradientTransformation, although its update passes
        # extra args on.
        parameters = inspect.signature(inner.update).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return optax.GradientTransformationExtraArgs(inner.init, inner.update)
    return optax.with_extra_args_support(inner)


def upcast(tree: PyTree) -> PyTree:
    """Takes float16 and bfloat16 leaves to float32 and leaves the others."""
    return jax.tree.map(
        lambda x: lax.convert_element_type(x, jnp.float32) if _tree.is_narrow(x) else x, tree
    )


def edited_master(param: jax.Array, master: jax.Array) -> jax.Array:
    """Returns the master, or float32(param) where the param is not its rounding any more.

    Elementwise. A param that is not finite is no edit. For bfloat16 a difference up to the
    smallest normal is none either: XLA flushes subnormals.
    """
    wide = lax.convert_element_type(param, jnp.float32)
    rounded = round_to(master, param.dtype)
    edited = lax.bitwise_and(lax.ne(wide, rounded), lax.is_finite(wide))
    if param.dtype == jnp.bfloat16:
        smallest_normal = np.float32(jnp.finfo(jnp.bfloat16).smallest_normal)
        far = lax.gt(lax.abs(lax.sub(wide, rounded)), smallest_normal)
        edited = lax.bitwise_and(edited, far)
    return lax.select(edited, wide, master)


def _new_master(path: str, leaf: Any, policy: Policy | None) -> Any:
    dtype = _tree.leaf_dtype(leaf)
    narrow = _tree.is_narrow(leaf)
    if policy is not None and jnp.issubdtype(dtype, jnp.floating):
        promised = policy.leaf_dtype(path, leaf)
        if narrow and promised != dtype:
            raise ValueError(
                f"params leaf {path!r} is {dtype}, but the policy keeps it in {promised}. Call "
                "tx.init with float32 params, and give the model policy.cast_to_param(params)."
            )
        narrow = promised in _tree.NARROW_DTYPES
    return jnp.array(leaf, jnp.float32, copy=True) if narrow else optax.MaskedNode()


def _map_masters(f: Callable[..., Any], masters: PyTree, tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps `f(master, leaf, *rest_leaves)`; the master is None where a leaf has none."""
    paths = [path for path, _ in _tree.leaves_with_paths(tree)]
    leaves, treedef = jax.tree.flatten(tree)
    master_leaves = _tree.flatten_like(treedef, paths, masters, "master params in opt_state")
    rest_leaves = [
        _tree.flatten_like(treedef, paths, other, "updates of the inner optimizer")
        for other in rest
    ]
    rows = zip(master_leaves, leaves, *rest_leaves, strict=True)
    return jax.tree.unflatten(
        treedef,
        [f(None if isinstance(m, optax.MaskedNode) else m, *others) for m, *others in rows],
    )


def _check_params(params: PyTree, masters: PyTree, policy: Policy | None) -> None:
    paths = iter([path for path, _ in _tree.leaves_with_paths(params)])
    _map_masters(lambda m, p: _check_leaf(next(paths), p, m, policy), masters, params)


def _check_leaf(path: str, param: Any, master: Any, policy: Policy | None) -> None:
    dtype = _tree.leaf_dtype(param)
    if master is None:
        if _tree.is_narrow(param):
            raise ValueError(
                f"params leaf {path!r} is {dtype}, but has no float32 master: it was wide when "
                "tx.init saw it. Pass policy= and call tx.init with float32 params, or call "
                "tx.init with the narrow ones."
            )
        return
    if jnp.shape(master) != jnp.shape(param):
        raise ValueError(
            f"params leaf {path!r} has shape {jnp.shape(param)}, its master in opt_state has "
            f"{jnp.shape(master)}. Call tx.init for these params."
        )
    _tree.check_state_dtype(f"master_params/{path}", master, jnp.float32)
    check_same_layout(path, param, master)
    narrow = _tree.is_narrow(param)
    if not narrow or (policy is not None and dtype != policy.param_dtype):
        expected = "float16 or bfloat16" if policy is None else str(policy.param_dtype)
        raise ValueError(
            f"params leaf {path!r} is {dtype}, but it has a float32 master and must arrive in "
            f"{expected}. Cast params with policy.cast_to_param, and apply updates with "
            "optax.apply_updates(params, updates), not with p + u or equinox.apply_updates, which "
            "give float32."
        )


def _current_master(master: Any, param: Any) -> Any:
    return jnp.asarray(param) if master is None else edited_master(param, master)


def _step(master: Any, full: jax.Array, inner_update: Any) -> Any:
    del master
    inner_update = jnp.asarray(inner_update)
    if (inner_update.shape, inner_update.dtype) == (full.shape, full.dtype):
        return lax.add(full, inner_update)  # what apply_updates does, traced faster
    return optax.apply_updates(full, inner_update)


def _stored_on_cpu(stepped: PyTree) -> PyTree:
    """Makes XLA:CPU compute the new masters once and read them back for the params.

    It has no kernels of several outputs: it would go through the whole update again for each, and
    keep copies of what the first of them overwrites. XLA:GPU does all in one kernel a leaf, which
    a barrier would split.
    """
    return lax.platform_dependent(stepped, cpu=_barriers, default=_identity)


def _barriers(tree: PyTree) -> PyTree:
    # One a leaf: under `jax.shard_map` of jax 0.10 the results of one for all vary over the axes
    # over which any of them does.
    return jax.tree.map(lax.optimization_barrier, tree)


def _identity(tree: PyTree) -> PyTree:
    return tree


def _param_update(master: Any, param: Any, stepped: Any, inner_update: Any) -> Any:
    if master is None:
        return inner_update
    wide = lax.convert_element_type(param, jnp.float32)
    return lax.sub(round_to(stepped, param.dtype), wide)
