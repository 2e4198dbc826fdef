"""Precision policy: which dtype each leaf is kept in, computed in and returned in."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpopt import _tree
from mpopt._rounding import round_to

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of a mixed-precision run.

    Only floating arrays are ever cast. Integers, PRNG keys, None, functions and Python numbers
    pass through as they are.

    Attributes:
        param_dtype: dtype of the params that the model computes with.
        compute_dtype: dtype for inputs and activations. None means `param_dtype`.
        output_dtype: dtype of what the model returns, for the loss.
        keep_float32: the params that stay float32: a regular expression, searched in the key
            path written `encoder/layers/0/norm/scale`, or `callable(path_string, leaf) -> bool`.
            None keeps none. An NNX Variable's own key is not part of the path.

    Raises:
        ValueError: for a dtype that is not a float of 16 bits or more, or a `keep_float32` that
            is neither a valid regular expression nor a callable.

    Example:
        >>> import jax.numpy as jnp
        >>> import mpopt
        >>> policy = mpopt.Policy(param_dtype=jnp.float16, keep_float32=r"(?i)norm|bn")
        >>> params = {"dense": {"kernel": jnp.ones((2, 2))}, "norm": {"scale": jnp.ones(2)}}
        >>> half = policy.cast_to_param(params)
        >>> half["dense"]["kernel"].dtype.name, half["norm"]["scale"].dtype.name
        ('float16', 'float32')
    """

    param_dtype: Any
    compute_dtype: Any = None
    output_dtype: Any = jnp.float32
    keep_float32: str | Callable[[str, Any], bool] | None = None

    def __post_init__(self) -> None:
        compute_dtype = self.param_dtype if self.compute_dtype is None else self.compute_dtype
        for name, dtype in (
            ("param_dtype", self.param_dtype),
            ("compute_dtype", compute_dtype),
            ("output_dtype", self.output_dtype),
        ):
            object.__setattr__(self, name, _float_dtype(name, dtype))
        if isinstance(self.keep_float32, str):
            try:
                re.compile(self.keep_float32)
            except re.error as error:
                raise ValueError(
                    f"keep_float32={self.keep_float32!r} is no valid regular expression: {error}."
                ) from error
        elif self.keep_float32 is not None and not callable(self.keep_float32):
            raise ValueError(
                "keep_float32 must be a regular expression, callable(path, leaf) -> bool or None, "
                f"got {self.keep_float32!r}."
            )

    def cast_to_param(self, tree: PyTree) -> PyTree:
        """Casts params to what the model computes with.

        Values are rounded to nearest even and saturate at the largest finite value, as the
        update does, so that params equal the cast of their masters from the start.

        Args:
            tree: params, any pytree.

        Returns:
            The same tree, with every array in a new buffer: floating ones in `param_dtype`, or
            in float32 where `keep_float32` says so.

        Example:
            >>> import jax.numpy as jnp
            >>> import mpopt
            >>> mpopt.Policy(jnp.float16).cast_to_param(jnp.array([1e-3, 1e9])).tolist()
            [0.0010004043579101562, 65504.0]
        """

        def cast(path: str, leaf: Any) -> Any:
            if not _tree.is_floating_array(leaf):
                if not isinstance(leaf, jax.Array):
                    return leaf
                return _tree.strong(jnp.array(leaf, copy=True))
            dtype = self.leaf_dtype(path, leaf)
            if dtype in _tree.NARROW_DTYPES and leaf.dtype != dtype:
                leaf = round_to(jnp.asarray(leaf, jnp.float32), dtype)
            return jnp.array(leaf, dtype, copy=True)

        return _tree.map_with_paths(cast, tree)

    def cast_to_compute(self, tree: PyTree) -> PyTree:
        """Casts every floating array to `compute_dtype`: inputs, or params inside the loss.

        Args:
            tree: any pytree. `keep_float32` does not apply here.

        Returns:
            The same tree. The cast is differentiable: gradients keep the dtype of `tree`.

        Example:
            >>> import jax.numpy as jnp
            >>> import mpopt
            >>> mpopt.Policy(jnp.float32, jnp.bfloat16).cast_to_compute(jnp.ones(2)).dtype.name
            'bfloat16'
        """
        return _cast_floating(tree, self.compute_dtype)

    def cast_to_output(self, tree: PyTree) -> PyTree:
        """Casts every floating array to `output_dtype`.

        Args:
            tree: any pytree.

        Returns:
            The same tree.

        Example:
            >>> import jax.numpy as jnp
            >>> import mpopt
            >>> mpopt.Policy(jnp.float16).cast_to_output(jnp.ones(2, jnp.float16)).dtype.name
            'float32'
        """
        return _cast_floating(tree, self.output_dtype)

    def keeps_float32(self, path: str, leaf: Any) -> bool:
        """Whether the params leaf at `path` (`encoder/norm/scale`) stays float32.

        Args:
            path: the key path, joined with `/`.
            leaf: the leaf, handed to a callable `keep_float32`.

        Returns:
            The rule's answer.

        Example:
            >>> import mpopt
            >>> policy = mpopt.Policy("float16", keep_float32="norm")
            >>> policy.keeps_float32("encoder/norm/scale", None)
            True
        """
        if self.keep_float32 is None:
            return False
        if isinstance(self.keep_float32, str):
            return re.search(self.keep_float32, path) is not None
        return bool(self.keep_float32(path, leaf))

    def leaf_dtype(self, path: str, leaf: Any) -> Any:
        """Returns the dtype that floating params leaf `leaf` at `path` has under this policy.

        Args:
            path: the key path, joined with `/`.
            leaf: the leaf, handed to a callable `keep_float32`.

        Returns:
            `param_dtype`, or float32 where the leaf is kept.

        Example:
            >>> import mpopt
            >>> mpopt.Policy("float16").leaf_dtype("kernel", None).name
            'float16'
        """
        return jnp.dtype(jnp.float32) if self.keeps_float32(path, leaf) else self.param_dtype


def _float_dtype(name: str, dtype: Any) -> Any:
    try:
        result = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"{name} must be a float dtype, got {dtype!r}.") from error
    if dtype is None or not jnp.issubdtype(result, jnp.floating) or jnp.finfo(result).bits < 16:
        raise ValueError(
            f"{name} must be float16, bfloat16, float32 or float64, got {dtype!r}: floats under "
            "16 bits cannot be trained by adding updates."
        )
    return result


def _cast_floating(tree: PyTree, dtype: Any) -> PyTree:
    return jax.tree.map(lambda x: jnp.asarray(x, dtype) if _tree.is_floating_array(x) else x, tree)
