"""The bottleneck whose training moves fewer bytes."""

from collections.abc import Callable

import jax
from flax import nnx

from experiments.low_traffic.norm_relu import norm_relu
from experiments.low_traffic.residual import Layer, Norm, Statistics, fork, norm_expand
from experiments.resnet import Bottleneck


class LowTrafficBottleneck(Bottleneck):
    """A `Bottleneck` whose training moves fewer bytes: the same function of the same params.

    Evaluation is the plain block's.
    """

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Applies the block.

        Args:
            x: images, `[batch, height, width, channels]`.
            train: whether norm layers use, and update, the statistics of this batch.

        Returns:
            The block's output.
        """
        if not train:
            return super().__call__(x, train=False)
        shortcut, projection = x, None
        if self.has_projection:
            x, shortcut = fork(x, self.shortcut_conv.strides)
            projection = _layer(self.shortcut_conv, self.shortcut_norm)
        y = self.conv2(apply_norm(norm_relu, self.norm1, self.conv1(x)))
        layer = _layer(self.conv3, self.norm3)
        out, statistics = norm_expand(
            y, _norm(self.norm2), layer, shortcut, projection, self.norm2.epsilon
        )
        norms = [self.norm2, self.norm3]
        if self.has_projection:
            norms.append(self.shortcut_norm)
        for norm, batch in zip(norms, statistics, strict=True):
            _update(norm, batch)
        return out


def apply_norm(
    apply: Callable[..., tuple[jax.Array, ...]], norm: nnx.BatchNorm, y: jax.Array
) -> jax.Array:
    """Applies a norm layer in training, and updates the running statistics.

    Args:
        apply: `norm_relu`, or a function that goes on from it.
        norm: the layer.
        y: output of a convolution.

    Returns:
        The result, in `y`'s dtype.
    """
    out, *statistics = apply(y, *_norm(norm), norm.epsilon)
    _update(norm, Statistics(*statistics))
    return out


def _norm(norm: nnx.BatchNorm) -> Norm:
    assert norm.scale is not None and norm.bias is not None
    return Norm(norm.scale[...], norm.bias[...])


def _layer(conv: nnx.Conv, norm: nnx.BatchNorm) -> Layer:
    return Layer(conv.kernel[0, 0].astype(conv.dtype), *_norm(norm))


def _update(norm: nnx.BatchNorm, batch: Statistics) -> None:
    """Moves the running statistics, as the layer itself does."""
    for running, new in ((norm.mean, batch.mean), (norm.var, batch.variance)):
        moved = norm.momentum * running[...] + (1 - norm.momentum) * new
        running[...] = jax.lax.stop_gradient(moved)
