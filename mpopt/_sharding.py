"""Where each leaf of the optimizer state lives on a mesh: ZeRO-1 and FSDP."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mpopt import _tree

PyTree = Any
Rule = Callable[[str, Any], PartitionSpec | None]


def opt_state_sharding(
    opt_state: PyTree,
    mesh: Mesh | AbstractMesh,
    axis_name: str | Sequence[str] | None = None,
    *,
    params: PyTree | None = None,
    min_size: int = 2**14,
    rule: Rule | None = None,
) -> PyTree:
    """Says on which devices of a mesh each part of an optimizer state lives.

    A leaf starts from the layout of the param that it belongs to (a master, a moment: the leaf
    whose key path ends in the param's and has its shape), or else from its own. With `axis_name`
    its largest dimension that is free there and divisible by the size of the axis is split over
    that axis as well; of equal dimensions the first. Scalars, vectors of integers (flags and
    digests, which the host reads), leaves of fewer than `min_size` elements, leaves without such a
    dimension and leaves that are split over the axis already stay as they are. So replicated
    params give ZeRO-1, and params that are split for tensor parallelism stay split.

    Without `axis_name` the state follows the params. Under `jax.jit`, moments start as zeros that
    depend on no param: without `out_shardings` they come out replicated where the params are
    split.

    It takes any tree of arrays: given float32 params, it gives the layout of params for FSDP.

    Args:
        opt_state: the state, or its shapes: `jax.eval_shape(tx.init, params)`.
        mesh: the devices.
        axis_name: the mesh axis, or several, over which data is split and now the state too.
        params: the params, or `jax.ShapeDtypeStruct`s with their shardings. None goes by the
            shardings that the leaves of `opt_state` have.
        min_size: elements from which on a leaf is split. A small one costs a message and saves
            little.
        rule: `rule(key_path, leaf) -> PartitionSpec | None`, with a path such as
            `inner_state/master_params/encoder/kernel`. A spec goes before all of the above; None
            leaves the leaf to it.

    Returns:
        The tree with a `NamedSharding` for each leaf, for `out_shardings=` and `in_shardings=` of
        `jax.jit`, and for `jax.device_put`.

    Raises:
        ValueError: for something else than a mesh, an axis that the mesh does not have, a leaf
            that is no array, params on another mesh, or a spec that does not fit its leaf.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import mpopt
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> params = {"kernel": jnp.zeros((256, 1024)), "bias": jnp.zeros(1024)}
        >>> tx = mpopt.mixed_precision(optax.adam(1e-3), policy=mpopt.Policy(jnp.float16))
        >>> sharding = mpopt.opt_state_sharding(jax.eval_shape(tx.init, params), mesh, "data")
        >>> opt_state = jax.jit(tx.init, out_shardings=sharding)(params)
        >>> masters = sharding.inner_state.master_params
        >>> masters["kernel"].spec, masters["bias"].spec
        (P(None, 'data'), P())

    References:
        Rajbhandari et al., `ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
        <https://arxiv.org/abs/1910.02054>`_, 2020.

        Xu et al., `Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training
        <https://arxiv.org/abs/2004.13336>`_, 2020.
    """
    axes = _check_arguments(mesh, axis_name, min_size, rule)
    param_leaves = {} if params is None else dict(_tree.leaves_with_paths(params))
    param_specs = {
        path: (jnp.shape(leaf), _own_spec(f"params leaf {path!r}", leaf, mesh))
        for path, leaf in param_leaves.items()
        if _tree.leaf_dtype(leaf) is not None
    }

    def place(path: str, leaf: Any) -> NamedSharding:
        what = f"opt_state leaf {path!r}"
        if _tree.leaf_dtype(leaf) is None:
            raise ValueError(
                f"{what} is {leaf!r}, which is no array: leave it out of the tree (None, "
                "equinox.filter)."
            )
        spec = None if rule is None else rule(path, leaf)
        if spec is not None:
            return _check_spec(what, spec, leaf, mesh)
        spec = _spec_of_param(path, leaf, param_specs)
        if spec is None:
            spec = _own_spec(what, leaf, mesh)
        shape = jnp.shape(leaf)
        if axes and math.prod(shape) >= min_size and (_tree.is_inexact(leaf) or len(shape) > 1):
            spec = _split(spec, shape, axes, math.prod(mesh.shape[axis] for axis in axes))
        return _check_spec(what, spec, leaf, mesh)

    return _tree.map_with_paths(place, opt_state)


def check_same_layout(path: str, param: Any, master: Any) -> None:
    """Raises ValueError where a param and its master differ in their types' shardings."""
    layouts = [jax.typeof(x).sharding for x in (param, master)]
    specs = [layout.spec for layout in layouts]
    if specs[0] != specs[1] and not any(layout.mesh.empty for layout in layouts):
        raise ValueError(
            f"params leaf {path!r} has the explicit sharding {specs[0]}, its float32 master in "
            f"opt_state has {specs[1]}. Bring params and gradients to the layout of the masters "
            "with jax.sharding.reshard, and the params back after optax.apply_updates."
        )


def _check_arguments(
    mesh: Any, axis_name: str | Sequence[str] | None, min_size: Any, rule: Any
) -> tuple[str, ...]:
    """Returns the axes; ValueError names the argument that is wrong."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}: see jax.make_mesh.")
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    for axis in axes:
        if axis not in mesh.axis_names:
            raise ValueError(
                f"axis_name={axis!r} is no axis of the mesh, which has {dict(mesh.shape)}."
            )
    try:
        valid = not isinstance(min_size, bool) and operator.index(min_size) >= 0
    except TypeError:
        valid = False
    if not valid:
        raise ValueError(f"min_size must be a number of elements, 0 or more, got {min_size!r}.")
    if rule is not None and not callable(rule):
        raise ValueError(
            f"rule must be rule(key_path, leaf) -> PartitionSpec or None, got {rule!r}."
        )
    return axes


def _own_spec(what: str, leaf: Any, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the spec of a leaf that is on the mesh; P() for one that is on a single device."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return PartitionSpec()
    if dict(sharding.mesh.shape) != dict(mesh.shape):
        raise ValueError(
            f"{what} is on a mesh with axes {dict(sharding.mesh.shape)}, not on the one given, "
            f"which has {dict(mesh.shape)}. Pass the mesh of the params."
        )
    return sharding.spec


def _spec_of_param(
    path: str, leaf: Any, param_specs: dict[str, tuple[tuple[int, ...], PartitionSpec]]
) -> PartitionSpec | None:
    """Returns the spec of the param in whose key path `path` ends, if shapes agree."""
    suffix = path
    while True:
        shape, spec = param_specs.get(suffix, (None, None))
        if shape == jnp.shape(leaf):
            return spec
        if not suffix:
            return None
        suffix = suffix.partition("/")[2]


def _split(
    spec: PartitionSpec, shape: tuple[int, ...], axes: tuple[str, ...], size: int
) -> PartitionSpec:
    """Adds `axes` to the largest free dimension that `size` divides, the first of equal ones."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    used = {name for entry in entries for name in (entry if isinstance(entry, tuple) else [entry])}
    free = [i for i, n in enumerate(shape) if entries[i] is None and n and n % size == 0]
    if used.intersection(axes) or not free:
        return spec
    entries[max(free, key=lambda i: shape[i])] = axes[0] if len(axes) == 1 else axes
    return PartitionSpec(*entries)


def _check_spec(what: str, spec: Any, leaf: Any, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns the sharding; ValueError where the spec does not fit the mesh or the leaf."""
    if not isinstance(spec, PartitionSpec):
        raise ValueError(
            f"rule returned {spec!r} for {what}: return a jax.sharding.PartitionSpec, or None."
        )
    shape = jnp.shape(leaf)
    try:
        if len(spec) > len(shape):
            raise ValueError(f"it has {len(spec)} entries for {len(shape)} dimensions.")
        sharding = NamedSharding(mesh, spec)
        sharding.shard_shape(shape)
    except Exception as error:  # JAX's own kinds are not all public.
        raise ValueError(
            f"{spec} does not fit {what} of shape {shape} on a mesh with axes "
            f"{dict(mesh.shape)}: {error}"
        ) from error
    return sharding
