"""The ways to train in mixed precision, each as its own documentation says."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

import mpopt
from experiments.benchmarks.problem import Problem, policy

PyTree = Any
Step = Callable[[PyTree, PyTree], PyTree]


class NotMeasured(Exception):
    """A contender whose library is not there, or that is left out; the message says so."""


class Contender:
    """A train step.

    Attributes:
        dtype: what it computes in.
        init: makes the first state; params and optimizer state come first and second in it.
        python_step: `python_step(state, batch) -> state`, not compiled.
        step: the same, compiled; the state is donated.
        traces: how often `step` has been traced.
    """

    def __init__(self, dtype: Any, init: Callable[[], PyTree], step: Step) -> None:
        """Makes the compiled step."""
        self.dtype = dtype
        self.init = init
        self.traces = 0

        def counted(state: PyTree, batch: PyTree) -> PyTree:
            self.traces += 1
            return step(state, batch)

        self.python_step = counted
        self.step = jax.jit(counted, donate_argnums=0)


def optax_alone(problem: Problem, dtype: Any = jnp.float32) -> Contender:
    """Plain training in float32, with a model that computes in `dtype`; no scale, no skip."""
    loss, tx = problem.loss(dtype), problem.tx

    def step(state: PyTree, batch: PyTree) -> PyTree:
        params, opt_state, stats = state
        grads, stats = jax.grad(loss, has_aux=True)(params, stats, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, stats

    return Contender(dtype, lambda: _init(problem, tx), step)


def flax_dynamic_scale(problem: Problem, dtype: Any = jnp.float16) -> Contender:
    """Flax's DynamicScale: float32 params, selects over params, optimizer state and statistics."""
    loss, tx = problem.loss(dtype), problem.tx

    def step(state: PyTree, batch: PyTree) -> PyTree:
        params, opt_state, stats, scale = state
        grad_fn = scale.value_and_grad(loss, has_aux=True)
        scale, is_fin, (_, new_stats), grads = grad_fn(params, stats, batch)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        select = partial(jnp.where, is_fin)
        return (
            jax.tree.map(select, new_params, params),
            jax.tree.map(select, new_opt_state, opt_state),
            jax.tree.map(select, new_stats, stats),
            scale,
        )

    return Contender(dtype, lambda: (*_init(problem, tx), DynamicScale()), step)


def jmp_readme(problem: Problem, dtype: Any = jnp.float16) -> Contender:
    """The way of jmp: its policy casts params, its loss scale adjusts, its select_tree selects."""
    try:
        import jmp
    except ImportError as error:
        raise NotMeasured("jmp is not installed: pip install jmp") from error
    loss, tx = problem.loss(dtype), problem.tx
    narrow = jnp.dtype(dtype)
    casts = jmp.Policy(
        compute_dtype=narrow, param_dtype=jnp.dtype(jnp.float32), output_dtype=narrow
    )

    def loss_fn(params: PyTree, scale: Any, stats: PyTree, batch: PyTree) -> Any:
        value, stats = loss(casts.cast_to_compute(params), stats, batch)
        return scale.scale(value), stats

    def step(state: PyTree, batch: PyTree) -> PyTree:
        params, opt_state, stats, (loss_scale, counter) = state
        scale = jmp.DynamicLossScale(loss_scale, counter)
        grads, new_stats = jax.grad(loss_fn, has_aux=True)(params, scale, stats, batch)
        grads = scale.unscale(grads)
        is_finite = jmp.all_finite(grads)
        scale = scale.adjust(is_finite)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state, new_stats
        kept = jmp.select_tree(is_finite, new, (params, opt_state, stats))
        return (*kept, (scale.loss_scale, scale.counter))

    def init() -> PyTree:
        # The README's half_dtype()(2 ** 15) fails in adjust, whose smallest scale is float32.
        scale = jmp.DynamicLossScale(jnp.asarray(2.0**15))
        # By its leaves: the object is refused as an argument of `step.lower`.
        return (*_init(problem, tx), (scale.loss_scale, scale.counter))

    return Contender(dtype, init, step)


def mpopt_masters(problem: Problem, dtype: Any = jnp.float16) -> Contender:
    """All of mpopt: params in half precision, float32 masters in the optimizer's state."""
    rule = mpopt.dynamic_loss_scale() if dtype == jnp.float16 else mpopt.static_loss_scale(1.0)
    tx = mpopt.mixed_precision(problem.tx, policy=policy(dtype), loss_scale=rule)
    return _mpopt(problem, dtype, tx, policy(dtype).cast_to_param)


def mpopt_scale_only(problem: Problem, dtype: Any = jnp.float16) -> Contender:
    """The loss scale of mpopt with float32 params: what DynamicScale does, in one optimizer."""
    tx = mpopt.with_loss_scale(problem.tx, mpopt.dynamic_loss_scale())
    return _mpopt(problem, dtype, tx, lambda params: params)


Maker = Callable[[Problem], Contender]

REFERENCE = "optax float32"
_JMP = "jmp float16"
CONTENDERS: Mapping[str, Maker] = {
    REFERENCE: optax_alone,
    "Flax DynamicScale float16": flax_dynamic_scale,
    _JMP: jmp_readme,
    "mpopt float16": mpopt_masters,
    "mpopt float16, float32 params": mpopt_scale_only,
    "mpopt bfloat16": partial(mpopt_masters, dtype=jnp.bfloat16),
}
"""By the name that tables show; the others are compared with `REFERENCE`."""

SLOW_LEAVES = 64
"""More leaves take jmp minutes to compile."""


def choose(names: Sequence[str] = tuple(CONTENDERS), *, slow: bool = True) -> dict[str, Maker]:
    """Picks contenders.

    Args:
        names: those to pick.
        slow: whether jmp takes part where there are more than `SLOW_LEAVES` leaves.

    Returns:
        The makers.
    """
    chosen = {name: CONTENDERS[name] for name in names}
    if not slow and _JMP in chosen:
        chosen[_JMP] = _jmp_of_few_leaves
    return chosen


def _jmp_of_few_leaves(problem: Problem) -> Contender:
    leaves = len(jax.tree.leaves(problem.params))
    if leaves > SLOW_LEAVES:
        raise NotMeasured(
            f"compiles for minutes with {leaves} leaves, as XLA:CPU repeats the finite check in "
            "every fusion; --slow measures it"
        )
    return jmp_readme(problem)


def _mpopt(
    problem: Problem,
    dtype: Any,
    tx: optax.GradientTransformationExtraArgs,
    cast: Callable[[PyTree], PyTree],
) -> Contender:
    loss = problem.loss(dtype)

    def step(state: PyTree, batch: PyTree) -> PyTree:
        params, opt_state, stats = state

        def loss_fn(params: PyTree) -> tuple[jax.Array, PyTree]:
            value, new_stats = loss(params, stats, batch)
            return mpopt.scale_loss(value, opt_state), new_stats

        grads, new_stats = jax.grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        new_stats = mpopt.where_applied(opt_state, new_stats, stats)
        return optax.apply_updates(params, updates), opt_state, new_stats

    return Contender(dtype, lambda: _init(problem, tx, cast), step)


def _init(
    problem: Problem,
    tx: optax.GradientTransformation,
    cast: Callable[[PyTree], PyTree] = lambda params: params,
) -> PyTree:
    """Makes params, optimizer state and statistics in buffers of their own, to be donated."""

    @jax.jit
    def make(params: PyTree, stats: PyTree) -> PyTree:
        return jax.tree.map(jnp.copy, (cast(params), tx.init(params), stats))

    return make(problem.params, problem.stats)
