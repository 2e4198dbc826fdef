"""A 1x1 convolution and its batch normalisation as one convolution, by the Gram of the input.

For `y = a @ kernel` the statistics of `y` follow from those of the input, which has a quarter of
its channels:

    mean(y) = mean(a) @ kernel
    var(y) = diag(kernel.T @ cov(a) @ kernel),    cov(a) = a.T @ a / count - outer(mean(a), mean(a))

So normalisation folds into the kernel and a bias before the convolution runs, and neither `y` nor
its normalised value is ever stored.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from experiments.low_traffic.precision import power_of_two_above
from experiments.resnet import at_least_float32

_ALL = ((0, 1, 2), (0, 1, 2))
# The bound on the matrix becomes 2**-6. The matrix itself is some hundred times smaller, where the
# smallest step of float16 is a thousandth of it.
_MATRIX_BITS = 6


class Folded(NamedTuple):
    """A convolution that normalises, and what its gradient needs.

    Attributes:
        kernel: the kernel times the norm's multiplier, `[inputs, features]`, float32.
        bias: float32, `[features]`.
        mean: of the convolution's output, float32, `[features]`.
        variance: of the convolution's output, float32, `[features]`.
        input_mean: float32, `[inputs]`.
        product: mean square of the input times the kernel, float32, `[inputs, features]`.
        kernel_max: largest magnitudes of the kernel before it was folded, float32, `[features]`.
    """

    kernel: jax.Array
    bias: jax.Array
    mean: jax.Array
    variance: jax.Array
    input_mean: jax.Array
    product: jax.Array
    kernel_max: jax.Array


class FoldGrads(NamedTuple):
    """Gradients of a folded convolution.

    Attributes:
        inputs: part of the gradient of the inputs, in their dtype and divided by `unit`.
        unit: a power of two, float32 scalar.
        row: the part that is the same at every position, float32, `[inputs]`.
        kernel: float32, `[inputs, features]`.
        scale: float32, `[features]`.
        bias: float32, `[features]`.
    """

    inputs: jax.Array
    unit: jax.Array
    row: jax.Array
    kernel: jax.Array
    scale: jax.Array
    bias: jax.Array


def fold(
    a: jax.Array, kernel: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
) -> Folded:
    """Folds the normalisation of `a @ kernel` into the kernel and a bias.

    The variance is a difference of two sums, as in flax's one-pass variance, and is kept from
    falling below zero like it. But its terms are of the size of the *input's* mean, which a ReLU
    bounds to about its deviation, and come from float32 sums of exact products, where the usual
    way squares rounded outputs.

    Args:
        a: inputs of the convolution, `[batch, height, width, inputs]`.
        kernel: `[inputs, features]`.
        scale: of the norm, float32.
        bias: of the norm, float32.
        epsilon: of the norm.

    Returns:
        The folded convolution.
    """
    wide = at_least_float32(a.dtype)
    count = a.size // a.shape[-1]
    input_mean = jnp.sum(a, (0, 1, 2), dtype=wide) / count
    gram = lax.dot_general(a, a, (_ALL, ((), ())), preferred_element_type=wide)
    kernel = kernel.astype(wide)
    product = _dot(gram / count, kernel)
    zero = jnp.zeros((), wide)
    mean, mean_square, kernel_max = lax.reduce(
        (input_mean[:, None] * kernel, kernel * product, jnp.abs(kernel)),
        (zero, zero, zero),
        _add_add_max,
        (0,),
    )
    variance = jnp.maximum(0.0, mean_square - lax.square(mean))
    multiplier = scale * lax.rsqrt(variance + epsilon)
    # The convolution gets the kernel rounded; with that one's mean in the bias, the output's mean
    # is exact.
    rounded = (kernel * multiplier).astype(a.dtype).astype(wide)
    return Folded(
        kernel=kernel * multiplier,
        bias=bias - jnp.sum(input_mean[:, None] * rounded, axis=0),
        mean=mean,
        variance=variance,
        input_mean=input_mean,
        product=product,
        kernel_max=kernel_max,
    )


def convolve(a: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies the channels by a matrix, as the 1x1 convolution that XLA adds a bias to.

    Args:
        a: `[batch, height, width, inputs]`.
        kernel: `[inputs, features]`, of the same dtype.

    Returns:
        `[batch, height, width, features]`.
    """
    return lax.conv_general_dilated(
        a, kernel[None, None], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def fold_grads(
    grad: jax.Array,
    grad_sum: jax.Array,
    grad_max: jax.Array,
    a: jax.Array,
    kernel: jax.Array,
    scale: jax.Array,
    folded: Folded,
    epsilon: float,
) -> FoldGrads:
    """Returns the gradients of `convolve(a, folded.kernel) + folded.bias`.

    The normalisation's own gradient reaches the input through sum and Gram, so that the wide output
    is not needed: it is `a` times a small symmetric matrix, and a row.

    The matrix is a mean over the batch, and below float16's normal range where `grad` is not. Its
    error is the same at every position and would add up in the gradients below. So is that of a
    kernel which a small scale folded into. Hence the gradient of the inputs is computed in a unit,
    a power of two: the largest of what the matrix calls for, by a bound on its elements, and of
    what keeps the result and the kernel within float16's range.

    Args:
        grad: of the output.
        grad_sum: its sum over all positions, float32, `[features]`.
        grad_max: its largest magnitudes, float32, `[features]`.
        a: as for `fold`.
        kernel: as for `fold`.
        scale: as for `fold`.
        folded: what `fold` returned.
        epsilon: as for `fold`.

    Returns:
        The gradients.
    """
    wide = folded.kernel.dtype
    count = a.size // a.shape[-1]
    kernel = kernel.astype(wide)
    inverse_std = lax.rsqrt(folded.variance + epsilon)
    multiplier = scale * inverse_std

    # Of the folded kernel, in float32: partial sums in float16 overflow under a loss scale.
    grad_folded = lax.dot_general(a, grad, (_ALL, ((), ())), preferred_element_type=wide)
    grad_multiplier = jnp.sum(grad_folded * kernel, axis=0) - grad_sum * folded.mean
    grad_mean = -grad_sum * multiplier
    grad_variance = -0.5 * grad_multiplier * multiplier * lax.square(inverse_std)
    # The gradient ends where the variance was kept from falling below zero.
    grad_variance = jnp.where(folded.variance > 0, grad_variance, 0)
    # The mean is in the variance too.
    grad_mean -= 2 * grad_variance * folded.mean
    grad_kernel = (
        grad_folded * multiplier
        + jnp.outer(folded.input_mean, grad_mean)
        + 2 * folded.product * grad_variance
    )

    # Of the inputs: `grad @ folded.kernel.T + a @ matrix + row`.
    weights = grad_variance * (2 / count)
    kernel_max = folded.kernel_max
    unit = power_of_two_above(
        2.0**_MATRIX_BITS * jnp.sum(jnp.abs(weights) * lax.square(kernel_max)),
        2.0**-13 * jnp.max(grad_max) * jnp.sum(jnp.abs(multiplier) * kernel_max),
        2.0**-14 * jnp.max(jnp.abs(multiplier) * kernel_max),
    ).astype(wide)
    matrix = _dot(kernel * (weights / unit), kernel.T)
    through_kernel = convolve(grad, (kernel * (multiplier / unit)).astype(a.dtype).T)
    return FoldGrads(
        # One call of cuDNN, with the sum.
        inputs=convolve(a, matrix.astype(a.dtype)) + through_kernel,
        unit=unit,
        row=jnp.sum(kernel * (grad_mean / count), axis=1),
        kernel=grad_kernel,
        scale=grad_multiplier * inverse_std,
        bias=grad_sum,
    )


def complete(inputs: jax.Array, unit: jax.Array, row: jax.Array) -> jax.Array:
    """Returns the gradient of a folded convolution's inputs from its parts in `FoldGrads`.

    Args:
        inputs: the part divided by `unit`.
        unit: of it.
        row: what is the same at every position.

    Returns:
        The gradient, in the dtype of `inputs`.
    """
    return (inputs.astype(unit.dtype) * unit + row).astype(inputs.dtype)


def _add_add_max(totals: Sequence[jax.Array], values: Sequence[jax.Array]) -> list[jax.Array]:
    return [totals[0] + values[0], totals[1] + values[1], jnp.maximum(totals[2], values[2])]


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies small matrices in full float32, for which a GPU would take TF32."""
    return jnp.dot(x, y, precision=lax.Precision.HIGHEST)
