"""Loss-scale rules: how the scale grows after finite steps and backs off after others."""

import math
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

_SMALLEST_NORMAL = float(jnp.finfo(jnp.float32).smallest_normal)
_LARGEST_FLOAT32 = float(jnp.finfo(jnp.float32).max)
_LARGEST_INT32 = 2**31 - 1


class LossScaleState(NamedTuple):
    """What a loss-scale rule remembers.

    Attributes:
        loss_scale: the scale of the next step, float32 scalar.
        finite_steps: finite steps in a row since the scale last changed, int32 scalar.
        hysteresis_left: non-finite steps until the scale backs off, int32 scalar.
    """

    loss_scale: jax.Array  # shape=(), dtype=jnp.float32
    finite_steps: jax.Array  # shape=(), dtype=jnp.int32
    hysteresis_left: jax.Array  # shape=(), dtype=jnp.int32


class LossScale(NamedTuple):
    """A loss-scale rule: two pure functions.

    Write your own as `LossScale(init, adjust)`. What `adjust` returns is cast to the dtypes of
    :class:`LossScaleState`. A step whose scale is not finite and positive is skipped.

    Attributes:
        init: `init() -> LossScaleState`.
        adjust: `adjust(state, grads_finite) -> LossScaleState`, with a bool scalar; it is traced,
            so it chooses with `jnp.where`.

    Example:
        >>> import jax.numpy as jnp
        >>> import mpopt
        >>> def init():
        ...     return mpopt.LossScaleState(1024.0, 0, 1)
        >>> def adjust(state, grads_finite):
        ...     scale = jnp.where(grads_finite, state.loss_scale, state.loss_scale / 2)
        ...     return state._replace(loss_scale=scale)
        >>> only_down = mpopt.LossScale(init, adjust)
        >>> float(only_down.adjust(only_down.init(), jnp.array(False)).loss_scale)
        512.0
    """

    init: Callable[[], LossScaleState]
    adjust: Callable[[LossScaleState, jax.Array], LossScaleState]


def dynamic_loss_scale(
    initial: float = 2.0**15,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 2.0**-14,
    max_scale: float = 2.0**24,
    hysteresis: int = 1,
    hysteresis_reset: Literal["growth", "finite"] = "growth",
) -> LossScale:
    """The dynamic loss scale of mixed-precision training.

    After a finite step: `finite_steps += 1`; once it reaches `growth_interval`, the scale becomes
    `min(scale * growth_factor, max_scale)` and the count starts again. After a non-finite step:
    the count starts again and `hysteresis_left -= 1`; once that is used up, every further
    non-finite step makes the scale `max(scale * backoff_factor, min_scale)`. Each adjustment
    brings the scale into `[min_scale, max_scale]`, whatever it was. With factors that are powers
    of two, scaling and unscaling are exact.

    Args:
        initial: the first scale. One that is too high costs a few skipped steps.
        growth_factor: factor of growth, at least 1.
        backoff_factor: factor of back-off, at most 1.
        growth_interval: finite steps in a row before the scale grows.
        min_scale: the floor. It may lie below 1.
        max_scale: the cap.
        hysteresis: non-finite steps before the scale backs off: 1 backs off at once.
        hysteresis_reset: when `hysteresis_left` is refilled: `"growth"` when the scale grows (as
            in Megatron-LM), `"finite"` on every finite step (as in apex).

    Returns:
        A :class:`LossScale`.

    Raises:
        ValueError: for a setting that is not finite and positive as a normal float32 (the
            intervals: as an int32), for `initial` outside `[min_scale, max_scale]`, or an unknown
            `hysteresis_reset`.

    Example:
        >>> import jax.numpy as jnp
        >>> import mpopt
        >>> rule = mpopt.dynamic_loss_scale(initial=16.0, growth_interval=3)
        >>> state, scales = rule.init(), []
        >>> for finite in [True, True, True, False]:
        ...     state = rule.adjust(state, jnp.array(finite))
        ...     scales.append(float(state.loss_scale))
        >>> scales
        [16.0, 16.0, 32.0, 16.0]

    References:
        Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018.
    """
    initial = _positive_float32("initial", initial)
    growth_factor = _positive_float32("growth_factor", growth_factor)
    backoff_factor = _positive_float32("backoff_factor", backoff_factor)
    min_scale = _positive_float32("min_scale", min_scale)
    max_scale = _positive_float32("max_scale", max_scale)
    growth_interval = _positive_int32("growth_interval", growth_interval)
    hysteresis = _positive_int32("hysteresis", hysteresis)
    if growth_factor < 1:
        raise ValueError(f"growth_factor must be at least 1, got {growth_factor}.")
    if backoff_factor > 1:
        raise ValueError(f"backoff_factor must be at most 1, got {backoff_factor}.")
    # As float32: a bound that was given as np.float32 and one that was not are the same number.
    if not np.float32(min_scale) <= np.float32(initial) <= np.float32(max_scale):
        raise ValueError(
            f"initial={initial} must lie between min_scale={min_scale} and max_scale={max_scale}: "
            "change initial, or move the bound."
        )
    if hysteresis_reset not in ("growth", "finite"):
        raise ValueError(
            f"hysteresis_reset must be 'growth' or 'finite', got {hysteresis_reset!r}."
        )

    def init() -> LossScaleState:
        return LossScaleState(
            loss_scale=jnp.array(initial, jnp.float32),
            finite_steps=jnp.array(0, jnp.int32),
            hysteresis_left=jnp.array(hysteresis, jnp.int32),
        )

    def adjust(state: LossScaleState, grads_finite: jax.Array) -> LossScaleState:
        scale = state.loss_scale
        finite_steps = jnp.where(grads_finite, optax.safe_increment(state.finite_steps), 0)
        grows = finite_steps >= growth_interval
        # No lower than 0, so that a run stuck for 2^31 steps does not wrap around.
        used_up = jnp.maximum(state.hysteresis_left - 1, 0)
        hysteresis_left = jnp.where(grads_finite, state.hysteresis_left, used_up)
        backs_off = ~grads_finite & (hysteresis_left <= 0)
        refilled = grows if hysteresis_reset == "growth" else grads_finite
        scale = jnp.where(grows, scale * growth_factor, scale)
        scale = jnp.where(backs_off, scale * backoff_factor, scale)
        return LossScaleState(
            loss_scale=jnp.clip(scale, min_scale, max_scale),
            finite_steps=jnp.where(grows, 0, finite_steps),
            hysteresis_left=jnp.where(refilled, hysteresis, hysteresis_left),
        )

    return LossScale(init, adjust)


def static_loss_scale(scale: float) -> LossScale:
    """A loss scale that never changes; non-finite steps are still skipped.

    `static_loss_scale(1.0)` guards a bfloat16 run, which needs no scaling.

    Args:
        scale: the scale, any scalar.

    Returns:
        A :class:`LossScale`. After a resume with another `scale`, that one is in force from the
        second step on.

    Raises:
        ValueError: unless `scale` is finite and positive as a normal float32.

    Example:
        >>> import mpopt
        >>> float(mpopt.static_loss_scale(128).init().loss_scale)
        128.0
    """
    scale = _positive_float32("scale", scale)

    def init() -> LossScaleState:
        return LossScaleState(
            loss_scale=jnp.array(scale, jnp.float32),
            finite_steps=jnp.array(0, jnp.int32),
            hysteresis_left=jnp.array(1, jnp.int32),
        )

    def adjust(state: LossScaleState, grads_finite: jax.Array) -> LossScaleState:
        finite_steps = jnp.where(grads_finite, optax.safe_increment(state.finite_steps), 0)
        return state._replace(
            loss_scale=jnp.full_like(state.loss_scale, scale), finite_steps=finite_steps
        )

    return LossScale(init, adjust)


def cast_loss_scale_state(state: Any) -> LossScaleState:
    """Casts what a rule returned to the dtypes of :class:`LossScaleState`, in new buffers."""
    try:
        scale, finite_steps, hysteresis_left = state
        result = LossScaleState(
            jnp.array(scale, jnp.float32),
            jnp.array(finite_steps, jnp.int32),
            jnp.array(hysteresis_left, jnp.int32),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            "A loss-scale rule must return LossScaleState(loss_scale, finite_steps, "
            f"hysteresis_left), got {state!r}."
        ) from error
    shapes = {name: jnp.shape(value) for name, value in result._asdict().items()}
    if any(shapes.values()):
        raise ValueError(f"A loss-scale rule must return scalars, got shapes {shapes}.")
    return result


def _positive_float32(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError("a string is no number")
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a positive number, got {value!r}.") from error
    if not math.isfinite(number) or not _SMALLEST_NORMAL <= number <= _LARGEST_FLOAT32:
        raise ValueError(
            f"{name} must be finite and positive as a normal float32 "
            f"({_SMALLEST_NORMAL:.3g} to {_LARGEST_FLOAT32:.3g}), got {value!r}."
        )
    return number


def _positive_int32(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} must be a positive integer, got {value!r}.") from error
    if isinstance(value, bool) or not 1 <= number <= _LARGEST_INT32:
        raise ValueError(f"{name} must lie between 1 and {_LARGEST_INT32} (int32), got {value!r}.")
    return number
