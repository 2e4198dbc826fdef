"""Pytree plumbing: which leaves are trained, what they are called, who owns their buffers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

PyTree = Any
NARROW_DTYPES = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))


def is_none(x: Any) -> bool:
    """Whether `x` is None, for `is_leaf=`."""
    return x is None


def is_variable(x: Any) -> bool:
    """Whether `x` is a Flax NNX Variable, told without importing flax."""
    return any(
        base.__name__ == "Variable" and base.__module__.startswith("flax.nnx")
        for base in type(x).__mro__
    )


def unwrap(x: Any) -> Any:
    """Returns the value of an NNX Variable that holds one array, and anything else as it is."""
    return jax.tree.leaves(x)[0] if is_variable(x) else x


def path_string(path: tuple[Any, ...]) -> str:
    """Writes a key path as `encoder/layers/0/norm/scale`."""
    return "/".join(_key_name(key) for key in path)


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def leaves_with_paths(
    tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """Lists `(path, leaf)` in the order of `jax.tree.leaves`.

    The key under which an NNX Variable keeps its array is left out, so that an `nnx.State`
    and the same tree of plain arrays give the same paths.
    """

    def stop(x: Any) -> bool:
        return is_variable(x) or (is_leaf is not None and is_leaf(x))

    result = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=stop)[0]:
        if is_variable(leaf):
            inner = jax.tree_util.tree_flatten_with_path(leaf, is_leaf=is_leaf)[0]
            result += [(path_string(path + sub_path[1:]), value) for sub_path, value in inner]
        else:
            result.append((path_string(path), leaf))
    return result


def map_with_paths(f: Callable[[str, Any], Any], tree: PyTree) -> PyTree:
    """Maps `f(path, leaf)` over the leaves of `tree`."""
    leaves = [f(path, leaf) for path, leaf in leaves_with_paths(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def leaf_dtype(x: Any) -> Any:
    """Returns the dtype that JAX gives leaf `x`, or None where it is no array or number."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return jnp.result_type(x) if isinstance(x, int | float | complex) else None
    if dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def is_inexact(x: Any) -> bool:
    """Whether leaf `x` is a floating or complex number or array: what a gradient step can move."""
    dtype = leaf_dtype(x)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def is_floating_array(x: Any) -> bool:
    """Whether `x` is an array (not a Python number) of real floats."""
    return hasattr(x, "dtype") and bool(jnp.issubdtype(x.dtype, jnp.floating))


def is_narrow(x: Any) -> bool:
    """Whether leaf `x` is float16 or bfloat16."""
    return leaf_dtype(x) in NARROW_DTYPES


def check_float_widths(tree: PyTree) -> None:
    """Raises ValueError where a leaf is a float of under 16 bits."""
    for path, leaf in leaves_with_paths(tree):
        dtype = leaf_dtype(leaf)
        if is_inexact(leaf) and jnp.finfo(dtype).bits < 16:
            raise ValueError(
                f"params leaf {path!r} has dtype {dtype}: floats under 16 bits cannot be trained "
                "by adding updates. Keep it in float16, bfloat16 or float32 and quantise inside "
                "the model."
            )


def hide_untrained(tree: PyTree) -> PyTree:
    """Puts `optax.MaskedNode()` where a leaf is no float: integers, keys, functions."""
    return jax.tree.map(lambda x: x if is_inexact(x) else optax.MaskedNode(), tree)


def flatten_like(
    treedef: Any, paths: list[str], tree: PyTree, name: str, reference: str = "params"
) -> list[Any]:
    """Flattens `tree` up to `treedef`; raises ValueError naming the first path that differs."""
    try:
        return treedef.flatten_up_to(tree)
    except (ValueError, TypeError, KeyError) as error:
        found = [path for path, _ in leaves_with_paths(tree, is_leaf=is_none)]
        missing = [path for path in paths if path not in set(found)]
        extra = [path for path in found if path not in set(paths)]
        if missing or extra:
            where = f"{missing[0]!r} is missing from" if missing else f"{extra[0]!r} is only in"
            detail = f"leaf {where} the {name}."
        else:
            detail = f"the same leaves, in other containers: {error}"
        raise ValueError(f"The {name} do not match the {reference}: {detail}") from error


def match_gradients(
    grads: PyTree, params: PyTree
) -> tuple[PyTree, PyTree, Callable[[PyTree], PyTree]]:
    """Pairs gradients with params and hides the leaves that are not trained.

    Args:
        grads: gradients in the structure of `params`. At a leaf that is not trained it may hold
            anything: None (Equinox), float0 (`allow_int=True`), an integer.
        params: the params, or None (then the gradients alone tell what is trained).

    Returns:
        The gradients and the params with `optax.MaskedNode()` at untrained leaves, and a
        function that turns the update of such a tree into one for all leaves, with zeros at
        untrained ones (None at those that nothing can be added to, if the gradient is None).

    Raises:
        ValueError: where the trees differ, or a gradient has another shape or no float dtype.
    """
    reference = grads if params is None else params
    pairs = leaves_with_paths(reference, is_leaf=is_none)
    paths = [path for path, _ in pairs]
    reference_leaves = [leaf for _, leaf in pairs]
    treedef = jax.tree.structure(reference, is_leaf=is_none)
    grad_leaves = flatten_like(treedef, paths, grads, "gradients")
    for path, param, grad in zip(paths, reference_leaves, grad_leaves, strict=True):
        _check_gradient(path, param, grad)

    masked = optax.MaskedNode()
    trained = [is_inexact(leaf) for leaf in reference_leaves]

    def hide(leaves: list[Any]) -> PyTree:
        rows = zip(trained, reference_leaves, leaves, strict=True)
        return jax.tree.unflatten(
            treedef, [leaf if keep or ref is None else masked for keep, ref, leaf in rows]
        )

    def reveal(updates: PyTree) -> PyTree:
        update_leaves = flatten_like(treedef, paths, updates, "updates of the inner optimizer")
        rows = zip(trained, update_leaves, reference_leaves, grad_leaves, strict=True)
        return jax.tree.unflatten(
            treedef, [u if keep else _zero_update(p, g) for keep, u, p, g in rows]
        )

    return hide(grad_leaves), None if params is None else hide(reference_leaves), reveal


def _check_gradient(path: str, param: Any, grad: Any) -> None:
    if not is_inexact(param):
        return
    if not is_inexact(grad):
        got = "None" if grad is None else f"{leaf_dtype(grad) or type(grad).__name__}"
        raise ValueError(
            f"The gradient of params leaf {path!r} is {got}, but the leaf is {leaf_dtype(param)}: "
            "differentiate with respect to it, or leave it out of params (a None, "
            "optax.partition, optax.masked)."
        )
    if jnp.shape(grad) != jnp.shape(param):
        raise ValueError(
            f"The gradient of params leaf {path!r} has shape {jnp.shape(grad)}, the leaf has "
            f"{jnp.shape(param)}."
        )


def _zero_update(param: Any, grad: Any) -> Any:
    dtype = leaf_dtype(param)
    if (
        dtype is not None
        and dtype != jax.dtypes.float0
        and not jnp.issubdtype(dtype, jax.dtypes.extended)
    ):
        return jnp.zeros_like(param)
    # Nothing can be added to a key or a function.
    return None if grad is None else np.zeros(jnp.shape(grad), jax.dtypes.float0)


def own_buffers(tree: PyTree, *others: PyTree) -> PyTree:
    """Gives every array leaf of `tree` a strong dtype and a buffer of its own.

    A buffer that appears twice, in `tree` or in `others`, cannot be donated.
    """
    taken = {_buffer_id(leaf) for other in others for leaf in jax.tree.leaves(other)}

    def own(leaf: Any) -> Any:
        if leaf_dtype(leaf) is None:
            return leaf
        shared = _buffer_id(leaf) in taken
        if shared or not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
            leaf = jnp.array(leaf, copy=True)
        leaf = strong(leaf)
        taken.add(_buffer_id(leaf))
        return leaf

    return jax.tree.map(own, tree)


def strong(leaf: jax.Array) -> jax.Array:
    """Returns `leaf` with a dtype that does not give way to others in later arithmetic."""
    return (
        jax.lax.convert_element_type(leaf, leaf.dtype)
        if getattr(leaf, "weak_type", False)
        else leaf
    )


def _buffer_id(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.size:
        try:
            return leaf.addressable_shards[0].data.unsafe_buffer_pointer()
        except (AttributeError, IndexError, RuntimeError, NotImplementedError):
            pass
    return ("object", id(leaf))


def check_state_kept(old: PyTree, new: PyTree) -> PyTree:
    """Returns `new` with strong dtypes; raises ValueError where a leaf differs in kind from `old`.

    A state that changes its structure, dtypes or shapes is traced anew every step and cannot be
    carried through `lax.scan`, nor be restored when a step is skipped.
    """
    pairs = leaves_with_paths(old)
    treedef = jax.tree.structure(old)
    if jax.tree.structure(new) != treedef:
        raise ValueError(
            "The inner optimizer's update changes the structure of its state from "
            f"{treedef} to {jax.tree.structure(new)}. A step cannot be skipped then, nor can "
            "lax.scan carry the state. optax.monitor does this; optax.snapshot does not."
        )
    leaves = []
    for (path, before), after in zip(pairs, jax.tree.leaves(new), strict=True):
        dtypes = leaf_dtype(before), leaf_dtype(after)
        shapes = jnp.shape(before), jnp.shape(after)
        if dtypes[0] != dtypes[1] or shapes[0] != shapes[1]:
            raise ValueError(
                f"The inner optimizer's update turns its state leaf {path!r} from "
                f"{dtypes[0]}{list(shapes[0])} into {dtypes[1]}{list(shapes[1])}. Give the inner "
                "optimizer explicit dtypes (accumulator_dtype=, mu_dtype=), and gradients of at "
                "most float32. If opt_state comes from a checkpoint, restore it into "
                "jax.eval_shape(tx.init, params)."
            )
        leaves.append(strong(jnp.asarray(after)))
    return jax.tree.unflatten(treedef, leaves)


def check_state_type(state: Any, state_type: type) -> None:
    """Raises ValueError where `state` is not of the type that `tx.init` makes."""
    if not isinstance(state, state_type):
        raise ValueError(
            f"opt_state holds a {type(state).__name__} where tx.init makes a "
            f"{state_type.__name__}. Pass the opt_state of tx.init or tx.update; restore a "
            "checkpoint into the template jax.eval_shape(tx.init, params), not without one."
        )


def check_state_dtype(path: str, leaf: Any, dtype: Any) -> None:
    """Raises ValueError where a leaf of the optimizer state is not what `tx.init` made it."""
    if leaf_dtype(leaf) != dtype:
        raise ValueError(
            f"opt_state leaf {path!r} is {leaf_dtype(leaf)}, but tx.init makes it "
            f"{jnp.dtype(dtype)}. Was it set by hand? Give the value that dtype. Was a checkpoint "
            "restored into a template of other dtypes? Make the template with "
            "jax.eval_shape(tx.init, params) for the params that tx.init got."
        )


def find_states(opt_state: PyTree, state_type: type | tuple[type, ...]) -> list[Any]:
    """Lists the states of a type anywhere in a nested optimizer state, outermost only."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, state_type))
    return [node for node in nodes if isinstance(node, state_type)]
