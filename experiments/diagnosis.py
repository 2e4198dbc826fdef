"""Where a 16-bit computation leaves its range: by the name of the layer, from the traced program.

A jaxpr is the list of operations that JAX records of a function. The params that an operation
reads tell which layer it belongs to.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Overflow:
    """The first operation of a function that makes a non-finite number of finite ones.

    Attributes:
        layer: key path of the layer, as `stages/1/0/conv2`; empty where no param was read yet.
        operation: the operation's name in the jaxpr, as `conv_general_dilated`.
        dtype: dtype of its result.
        largest_input: largest magnitude among its inputs.
    """

    layer: str
    operation: str
    dtype: str
    largest_input: float

    def __str__(self) -> str:
        """Says it in words."""
        where = f"at {self.layer}" if self.layer else "before the first layer"
        return (
            f"{where}: {self.operation} makes {self.dtype} infinity or NaN of finite inputs up to "
            f"{self.largest_input:.3g}"
        )


def find_overflow(function: Callable[..., Any], params: PyTree, *args: PyTree) -> Overflow | None:
    """Runs a function operation by operation and stops at the first that overflows.

    Args:
        function: any traceable function of `params` and `args`.
        params: arrays whose key paths name the layers.
        *args: further trees of arrays.

    Returns:
        What was found, or None where every intermediate result is finite.
    """
    closed = jax.make_jaxpr(function)(params, *args)
    flat, _ = jax.tree.flatten((params, *args))
    search = _Search()
    try:
        search.run(closed.jaxpr, closed.consts, flat, _origins(params, len(flat)))
    except _FoundError as found:
        return found.overflow
    return None


def backward_order(function: Callable[..., Any], params: PyTree, *args: PyTree) -> list[str]:
    """Orders params as their gradients are made: the last layer's first.

    Args:
        function: the loss, traced but not run.
        params: its first argument.
        *args: its other arguments.

    Returns:
        Key paths of all params that the function reads, the one read last at the front.
    """
    closed = jax.make_jaxpr(function)(params, *args)
    order: dict[str, None] = {}
    num_inputs = len(closed.jaxpr.invars)
    for path in _reads(closed.jaxpr, _origins(params, num_inputs)):
        order.setdefault(path)
    return list(order)[::-1]


class _FoundError(Exception):
    def __init__(self, overflow: Overflow) -> None:
        super().__init__(str(overflow))
        self.overflow = overflow


class _Search:
    """An interpreter of jaxprs that looks at every result."""

    def __init__(self) -> None:
        self.layer = ""

    def run(
        self, jaxpr: jex.Jaxpr, consts: list[Any], args: list[Any], origins: list[str | None]
    ) -> list[Any]:
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))
        origin = _Origins(jaxpr, origins)
        for eqn in jaxpr.eqns:
            inputs = [v.val if isinstance(v, jex.Literal) else values[v] for v in eqn.invars]
            read = origin.read_by(eqn)
            inner = _inner_jaxpr(eqn)
            if inner is not None:
                outputs = self.run(*inner, inputs, origin.of_inputs(eqn))
            else:
                if read:
                    self.layer = read.rpartition("/")[0]
                outputs = self._check(eqn, inputs)
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [v.val if isinstance(v, jex.Literal) else values[v] for v in jaxpr.outvars]

    def _check(self, eqn: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
        outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
        outputs = outputs if eqn.primitive.multiple_results else [outputs]
        if not all(map(_is_finite, outputs)) and all(map(_is_finite, inputs)):
            bad = next(output for output in outputs if not _is_finite(output))
            raise _FoundError(
                Overflow(self.layer, eqn.primitive.name, str(bad.dtype), max(map(_largest, inputs)))
            )
        return outputs


class _Origins:
    """Which variables of a jaxpr are one param, cast or reshaped."""

    def __init__(self, jaxpr: jex.Jaxpr, origins: list[str | None]) -> None:
        self._origin = {
            var: path for var, path in zip(jaxpr.invars, origins, strict=True) if path is not None
        }

    def of_inputs(self, eqn: jex.JaxprEqn) -> list[str | None]:
        return [None if isinstance(v, jex.Literal) else self._origin.get(v) for v in eqn.invars]

    def read_by(self, eqn: jex.JaxprEqn) -> str | None:
        """Returns the param that the operation uses; one that only recasts it passes it on."""
        named = [path for path in self.of_inputs(eqn) if path is not None]
        arrays = [v for v in eqn.invars if not isinstance(v, jex.Literal)]
        if len(named) == len(arrays) == 1:
            self._origin.update((var, named[0]) for var in eqn.outvars)
            return None
        return named[-1] if named else None


def _origins(params: PyTree, num_inputs: int) -> list[str | None]:
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        for path, _ in jax.tree.flatten_with_path(params)[0]
    ]
    return [*paths, *[None] * (num_inputs - len(paths))]


def _reads(jaxpr: jex.Jaxpr, origins: list[str | None]) -> Iterator[str]:
    """Yields the params in the order in which operations use them."""
    origin = _Origins(jaxpr, origins)
    for eqn in jaxpr.eqns:
        read = origin.read_by(eqn)
        inner = _inner_jaxpr(eqn)
        if inner is not None:
            yield from _reads(inner[0], origin.of_inputs(eqn))
        elif read:
            yield read


def _inner_jaxpr(eqn: jex.JaxprEqn) -> tuple[jex.Jaxpr, list[Any]] | None:
    """Returns the function that an operation calls once with its own inputs, if it is such."""
    if eqn.primitive.name in ("scan", "while", "cond"):
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(name)
        # With its constants or without, which are one type in newer releases of jax.
        jaxpr, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", [])
        if isinstance(jaxpr, jex.Jaxpr) and len(jaxpr.invars) == len(eqn.invars):
            return jaxpr, list(consts)
    return None


def _is_finite(x: Any) -> bool:
    x = np.asarray(x) if not jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.zeros(())
    return bool(np.isfinite(x).all()) if jnp.issubdtype(x.dtype, np.inexact) else True


def _largest(x: Any) -> float:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return 0.0
    x = np.asarray(x)
    if not jnp.issubdtype(x.dtype, np.inexact) or x.size == 0:
        return 0.0
    return float(np.abs(x.astype(np.float64)).max())


def order_names(names: list[str], order: list[str]) -> list[str]:
    """Sorts leaves by the order of the backward pass.

    Args:
        names: key paths.
        order: from :func:`backward_order`; leaves that it lacks come last.

    Returns:
        The same names.
    """
    rank: Mapping[str, int] = {path: index for index, path in enumerate(order)}
    return sorted(names, key=lambda name: rank.get(name, math.inf))
