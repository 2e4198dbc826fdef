"""What must hold on a device to the bit, whatever its compiler makes of the program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpopt
from experiments.benchmarks.contenders import mpopt_masters
from experiments.benchmarks.leaf_shapes import Shapes
from experiments.benchmarks.problem import ADAMW, linear_problem, policy

SHAPES: Shapes = {
    "conv/kernel": (3, 3, 64, 64),
    "dense/kernel": (513, 257),
    "dense/bias": (257,),
    "norm/scale": (257,),
}
HALF_DTYPES = (jnp.float16, jnp.bfloat16)


def params_are_rounded_masters(dtype: Any) -> str | None:
    """Compares params with NumPy's rounding of the masters after 20 updates.

    Args:
        dtype: of the params.

    Returns:
        What is wrong, or None.
    """
    contender = mpopt_masters(linear_problem(SHAPES, ADAMW), dtype)
    state, batch = contender.init(), linear_problem(SHAPES, ADAMW).batch(dtype)
    for _ in range(20):
        state = contender.step(state, batch)
    params, opt_state, _ = jax.device_get(state)
    masters = optax.tree.get(opt_state, "master_params")
    if bool(mpopt.metrics(opt_state)["total_skips"]):
        return "updates were skipped"
    for name, param in params.items():
        if param.dtype != dtype:
            continue
        wrong = int(np.sum(_bits(param) != _bits(masters[name].astype(param.dtype))))
        if wrong:
            return f"{wrong} of {param.size} elements of {name} differ from the rounded masters"
    return None


def rounding_is_numpys(dtype: Any, count: int = 1 << 22) -> str | None:
    """Rounds random bit patterns on the device and with NumPy.

    Infinities are excepted, which become the largest finite value, and in bfloat16 what is below
    the smallest normal float32, which XLA flushes to zero.

    Args:
        dtype: to round to.
        count: how many.

    Returns:
        What is wrong, or None.
    """
    bits = np.random.default_rng(0).integers(0, 2**32, count, np.uint32)
    values = bits.view(np.float32)
    is_normal = np.abs(values) >= np.finfo(np.float32).smallest_normal
    values = np.where(is_normal | (dtype == jnp.float16), values, np.float32(0))
    rounded = jax.device_get(jax.jit(policy(dtype).cast_to_param)({"kernel": values}))["kernel"]
    largest = np.asarray(jnp.finfo(dtype).max, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(dtype)
        expected = np.where(np.isinf(expected), np.copysign(largest, expected), expected)
    both_nan = np.isnan(rounded) & np.isnan(expected)
    wrong = int(np.sum((_bits(rounded) != _bits(expected)) & ~both_nan))
    return f"{wrong} of {count} patterns are rounded otherwise" if wrong else None


def skip_keeps_bits(dtype: Any) -> str | None:
    """Takes an update with an infinite gradient.

    Args:
        dtype: of the params.

    Returns:
        What is wrong, or None.
    """
    problem = linear_problem(SHAPES, ADAMW)
    contender = mpopt_masters(problem, dtype)
    batch = problem.batch(dtype)
    before = contender.step(contender.init(), batch)
    kept = jax.device_get((before[0], before[1].inner_state))
    batch = {**batch, "dense/kernel": batch["dense/kernel"].at[1, 2].set(jnp.inf)}
    after = jax.device_get(contender.step(before, batch))
    if bool(mpopt.grads_finite(after[1])):
        return "the step was applied"
    for old, new in zip(
        jax.tree.leaves(kept), jax.tree.leaves((after[0], after[1].inner_state)), strict=True
    ):
        if np.any(_bits(old) != _bits(new)):
            return f"a leaf of shape {np.shape(old)} and dtype {old.dtype} changed"
    return None


CHECKS: dict[str, Callable[[Any], str | None]] = {
    "params are the rounded masters": params_are_rounded_masters,
    "rounding is NumPy's": rounding_is_numpys,
    "a skipped step keeps all bits": skip_keeps_bits,
}


def _bits(array: Any) -> np.ndarray:
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")
