"""Batch normalisation and ReLU in one, whose gradient keeps the convolution's output alone."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from experiments.resnet import at_least_float32


class Normalised(NamedTuple):
    """What the gradient of a normalisation needs.

    Attributes:
        y: output of a convolution, channels last.
        scale: float32, one a channel.
        bias: float32, one a channel.
        mean: of `y`, float32, one a channel.
        inverse_std: one over the deviation of `y`, float32, one a channel.
    """

    y: jax.Array
    scale: jax.Array
    bias: jax.Array
    mean: jax.Array
    inverse_std: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def norm_relu(
    y: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalises with the statistics of the batch and applies a ReLU.

    The same function as `nnx.BatchNorm` and `nnx.relu`. Its gradient keeps `y` alone of the large
    arrays: the normalised value and the sign before the ReLU are computed again from it, in the
    kernels that need them.

    Args:
        y: output of a convolution, channels last.
        scale: float32, one a channel.
        bias: float32, one a channel.
        epsilon: added to the variance.

    Returns:
        The result in `y`'s dtype, and mean and variance of each channel in float32. Mean and
        variance are for running averages: they have no gradient.
    """
    return _forward(y, scale, bias, epsilon)[0]


def _forward(y: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> Any:
    normalised, mean, variance = normalise(y, scale, bias, epsilon)
    return (apply_relu(normalised), mean, variance), normalised


def _backward(epsilon: float, normalised: Normalised, cotangents: Any) -> Any:
    del epsilon
    return norm_relu_grads(lambda grad: grad, cotangents[0], (), normalised)


def normalise(
    y: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
) -> tuple[Normalised, jax.Array, jax.Array]:
    """Computes the statistics of a batch.

    Args:
        y: as for `norm_relu`.
        scale: as for `norm_relu`.
        bias: as for `norm_relu`.
        epsilon: as for `norm_relu`.

    Returns:
        What the rest is computed from, mean and variance.
    """
    axes = tuple(range(y.ndim - 1))
    y_wide = y.astype(at_least_float32(y.dtype))
    # One pass, as flax does by default; rounding can take the difference below zero.
    total, total_square = lax.reduce(
        (y_wide, lax.square(y_wide)), (jnp.zeros((), y_wide.dtype),) * 2, _add, axes
    )
    count = y.size // y.shape[-1]
    mean = total / count
    variance = jnp.maximum(0.0, total_square / count - lax.square(mean))
    return Normalised(y, scale, bias, mean, lax.rsqrt(variance + epsilon)), mean, variance


def apply_relu(normalised: Normalised) -> jax.Array:
    """Returns the result of `norm_relu`.

    Args:
        normalised: from `normalise`.

    Returns:
        The result.
    """
    return jax.nn.relu(_before_relu(normalised).astype(normalised.y.dtype))


def norm_relu_grads(
    upstream: Callable[..., jax.Array],
    grad: jax.Array,
    others: tuple[jax.Array, ...],
    normalised: Normalised,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of `norm_relu`.

    Args:
        upstream: gives the gradient of the result, from `grad` and `others`. It is computed twice,
            for the sums over the batch and for the gradient that needs them, rather than stored.
        grad: a gradient that is stored.
        others: what else `upstream` takes.
        normalised: from `normalise`.

    Returns:
        The gradients of `y`, scale and bias.
    """
    y, dtype = normalised.y, normalised.mean.dtype
    count = y.size // y.shape[-1]
    # Without the barriers XLA stores what both passes, or the forward pass, have in common.
    y, others = lax.optimization_barrier((y, others))
    masked, standard = _masked(upstream(grad, *others), normalised._replace(y=y))
    # One reduction, as XLA stores the masked gradient for two.
    grad_bias, grad_scale = lax.reduce(
        (masked, masked * standard), (jnp.zeros((), dtype),) * 2, _add, tuple(range(y.ndim - 1))
    )
    y, others, grad_bias, grad_scale = lax.optimization_barrier((y, others, grad_bias, grad_scale))
    masked, standard = _masked(upstream(grad, *others), normalised._replace(y=y))
    multiplier = normalised.inverse_std * normalised.scale
    grad_y = (masked - (grad_bias + standard * grad_scale) / count) * multiplier
    return grad_y.astype(y.dtype), grad_scale, grad_bias


def _add(totals: Sequence[jax.Array], values: Sequence[jax.Array]) -> list[jax.Array]:
    return [total + value for total, value in zip(totals, values, strict=True)]


def _before_relu(normalised: Normalised) -> jax.Array:
    """Normalises in float32, in the order of operations of `nnx.BatchNorm`."""
    y, scale, bias, mean, inverse_std = normalised
    return (y.astype(mean.dtype) - mean) * (inverse_std * scale) + bias


def _masked(grad: jax.Array, normalised: Normalised) -> tuple[jax.Array, jax.Array]:
    """Returns the gradient before the ReLU and the value before scale and bias.

    The ReLU lets through what is beyond a threshold of its channel. With the comparison in this
    form XLA computes it within the reduction over the batch; else it stores the outcome.
    """
    y, scale, bias, mean, inverse_std = normalised
    multiplier = inverse_std * scale
    sign = jnp.sign(multiplier)
    steepness = jnp.where(multiplier == 0, 1, jnp.abs(multiplier))
    threshold = sign * mean - bias / steepness
    y_wide = y.astype(mean.dtype)
    masked = jnp.where(sign * y_wide > threshold, grad.astype(mean.dtype), 0)
    return masked, (y_wide - mean) * inverse_std


norm_relu.defvjp(_forward, _backward)
