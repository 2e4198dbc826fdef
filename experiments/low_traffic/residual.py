"""The end of a bottleneck: normalisation, expansion, normalisation, shortcut and ReLU."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from experiments.low_traffic.gram_fold import FoldGrads, complete, convolve, fold, fold_grads
from experiments.low_traffic.norm_relu import apply_relu, norm_relu_grads, normalise


class Norm(NamedTuple):
    """The params of a norm.

    Attributes:
        scale: float32, one a channel.
        bias: float32, one a channel.
    """

    scale: jax.Array
    bias: jax.Array


class Layer(NamedTuple):
    """A 1x1 convolution and its norm.

    Attributes:
        kernel: `[inputs, features]`.
        scale: of the norm, float32.
        bias: of the norm, float32.
    """

    kernel: jax.Array
    scale: jax.Array
    bias: jax.Array


class Statistics(NamedTuple):
    """Statistics of a batch.

    Attributes:
        mean: float32, one a channel.
        variance: float32, one a channel.
    """

    mean: jax.Array
    variance: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def norm_expand(
    y: jax.Array,
    norm: Norm,
    layer: Layer,
    shortcut: jax.Array,
    projection: Layer | None,
    epsilon: float,
) -> tuple[jax.Array, tuple[Statistics, ...]]:
    """Computes `relu(layer(relu(norm(y))) + shortcut)`, the layer's norm folded into it.

    Its gradient keeps `y`, the normalised value, the output and, where there is a projection,
    `shortcut`.

    Args:
        y: output of the 3x3 convolution, `[batch, height, width, inputs]`.
        norm: of it.
        layer: the expansion and its norm.
        shortcut: what is added; the input of `projection` where there is one.
        projection: the shortcut's own convolution and norm, folded likewise.
        epsilon: of the norms.

    Returns:
        The result in `y`'s dtype, and the statistics of the norm, the layer and the projection.
        They are for running averages: they have no gradient.
    """
    return _forward(y, norm, layer, shortcut, projection, epsilon)[0]


def _forward(
    y: jax.Array,
    norm: Norm,
    layer: Layer,
    shortcut: jax.Array,
    projection: Layer | None,
    epsilon: float,
) -> Any:
    normalised, *statistics = normalise(y, norm.scale, norm.bias, epsilon)
    # Without the barrier XLA stores the value before the ReLU too, for the sum that `fold` takes.
    a = lax.optimization_barrier(apply_relu(normalised))
    folded = [fold(a, *layer, epsilon)]
    bias, added = folded[0].bias, shortcut
    if projection is not None:
        folded.append(fold(shortcut, *projection, epsilon))
        bias = bias + folded[1].bias
        added = convolve(shortcut, folded[1].kernel.astype(a.dtype))
    # One call of cuDNN, with bias, sum and ReLU.
    sums = convolve(a, folded[0].kernel.astype(a.dtype)) + bias.astype(a.dtype) + added
    out = jax.nn.relu(sums)
    all_statistics = (Statistics(*statistics), *(Statistics(f.mean, f.variance) for f in folded))
    kept = shortcut if projection is not None else None
    return (out, all_statistics), (normalised, a, layer, kept, projection, out, folded)


def _backward(epsilon: float, residuals: Any, cotangents: Any) -> Any:
    normalised, a, layer, shortcut, projection, out, folded = residuals
    # Without the barrier XLA keeps the sum before the ReLU for the mask, and leaves the ReLU out of
    # the convolution.
    out = lax.optimization_barrier(out)
    grad = jnp.where(out > 0, cotangents[0], 0)
    wide = grad.astype(folded[0].bias.dtype)
    grad_sum, grad_max = lax.reduce(
        (wide, jnp.abs(wide)), (jnp.zeros((), wide.dtype),) * 2, _add_and_max, (0, 1, 2)
    )
    # The barrier keeps the maxima in the reduction that the sums are in.
    grad_sum, grad_max = lax.optimization_barrier((grad_sum, grad_max))
    grad_of = partial(fold_grads, grad, grad_sum, grad_max)
    grads = grad_of(a, layer.kernel, layer.scale, folded[0], epsilon)
    grad_y, *grad_norm = norm_relu_grads(
        complete, grads.inputs, (grads.unit, grads.row), normalised
    )
    grad_shortcut, grad_projection = grad, None
    if projection is not None:
        through = grad_of(shortcut, projection.kernel, projection.scale, folded[1], epsilon)
        grad_shortcut = complete(through.inputs, through.unit, through.row)
        grad_projection = _layer_grads(through, projection)
    return grad_y, Norm(*grad_norm), _layer_grads(grads, layer), grad_shortcut, grad_projection


def _add_and_max(totals: Sequence[jax.Array], values: Sequence[jax.Array]) -> list[jax.Array]:
    return [totals[0] + values[0], jnp.maximum(totals[1], values[1])]


def _layer_grads(grads: FoldGrads, layer: Layer) -> Layer:
    return Layer(grads.kernel.astype(layer.kernel.dtype), grads.scale, grads.bias)


norm_expand.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def fork(x: jax.Array, stride: int) -> tuple[jax.Array, jax.Array]:
    """Returns what the two ways of a block read.

    Args:
        x: input of the block, `[batch, height, width, channels]`.
        stride: of the shortcut's 1x1 convolution.

    Returns:
        `x`, and the pixels of it that the shortcut reads.
    """
    return x, x[:, ::stride, ::stride]


def _fork_forward(x: jax.Array, stride: int) -> Any:
    return fork(x, stride), jnp.zeros((0, *x.shape[1:3]), jnp.int8)


def _fork_backward(stride: int, like: jax.Array, cotangents: Any) -> Any:
    main, shortcut = cotangents
    # Without the barrier XLA adds within the convolution, for which it spreads the other summand
    # over an array of full size.
    main = lax.optimization_barrier(main)
    padding = [(0, 0, 0)]
    for size, num_read in zip(like.shape[1:], shortcut.shape[1:3], strict=True):
        padding.append((0, size - (num_read - 1) * stride - 1, stride - 1))
    zero = jnp.zeros((), shortcut.dtype)
    return (main + lax.pad(shortcut, zero, [*padding, (0, 0, 0)]),)


fork.defvjp(_fork_forward, _fork_backward)
