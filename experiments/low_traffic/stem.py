"""Batch normalisation, ReLU and max-pool in one, for the largest activation of all."""

from functools import partial
from typing import Any

import jax

from experiments.low_traffic.max_pool import max_pool, max_pool_grad
from experiments.low_traffic.norm_relu import apply_relu, norm_relu_grads, normalise


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def norm_relu_pool(
    y: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `norm_relu` and its max-pool, without storing what is between them.

    Args:
        y: output of a convolution, `[batch, height, width, channels]`.
        scale: float32, one a channel.
        bias: float32, one a channel.
        epsilon: added to the variance.

    Returns:
        The maxima in `y`'s dtype, and mean and variance of each channel of `y` in float32. Mean
        and variance are for running averages: they have no gradient.
    """
    return _forward(y, scale, bias, epsilon)[0]


def _forward(y: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> Any:
    normalised, mean, variance = normalise(y, scale, bias, epsilon)
    pooled, index = max_pool(apply_relu(normalised))
    return (pooled, mean, variance), (normalised, index)


def _backward(epsilon: float, residuals: Any, cotangents: Any) -> Any:
    del epsilon
    normalised, index = residuals
    upstream = partial(max_pool_grad, sizes=normalised.y.shape[1:3])
    return norm_relu_grads(upstream, cotangents[0], (index,), normalised)


norm_relu_pool.defvjp(_forward, _backward)
