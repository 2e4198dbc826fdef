"""ResNet v1.5 in Flax NNX: bottleneck blocks, of any width, depth and stem."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

RESNET50_STAGES = (3, 4, 6, 3)
EXPANSION = 4
NORM_PARAMS = r"(?i)norm"
"""Matches the key path of every norm layer's params, for `mpopt.Policy(keep_float32=...)`."""

Stem = Literal["imagenet", "cifar"]
Blocks = Literal["plain", "low_traffic"]

# He et al. 2015 with the fan-out, as in the reference implementations.
_conv_init = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


def at_least_float32(dtype: Any) -> Any:
    """Returns the dtype of norm layers and of sums over a batch or an image.

    Args:
        dtype: a floating dtype.

    Returns:
        float32, or `dtype` where it is wider.
    """
    return jnp.promote_types(dtype, jnp.float32)


def _widen(args: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """Makes a norm layer compute in float32 or wider, whatever the `dtype` of its result.

    Flax's own promotion casts the running statistics to `dtype` in evaluation, and float16 turns
    a variance above 65504 into infinity.
    """
    del dtype, inexact
    return tuple(x.astype(at_least_float32(x.dtype)) for x in map(jnp.asarray, args))


def _make_conv(
    in_features: int, features: int, kernel: int, strides: int, *, dtype: Any, rngs: nnx.Rngs
) -> nnx.Conv:
    return nnx.Conv(
        in_features,
        features,
        (kernel, kernel),
        strides=strides,
        padding="SAME",
        use_bias=False,
        dtype=dtype,
        kernel_init=_conv_init,
        rngs=rngs,
    )


def _make_norm(
    features: int, *, dtype: Any, rngs: nnx.Rngs, scale_init: Any = nnx.initializers.ones
) -> nnx.BatchNorm:
    return nnx.BatchNorm(
        features,
        momentum=0.9,
        epsilon=1e-5,
        dtype=dtype,
        param_dtype=jnp.float32,
        scale_init=scale_init,
        promote_dtype=_widen,
        rngs=rngs,
    )


class Bottleneck(nnx.Module):
    """1×1, 3×3 and 1×1 convolutions beside a shortcut; v1.5 strides in the 3×3.

    Args:
        in_features: channels of the input.
        width: channels of the 3×3 convolution; the output has `EXPANSION` times as many.
        strides: stride of the block.
        dtype: dtype of the convolutions and of their outputs.
        rngs: random number streams for the initial params.
    """

    def __init__(
        self, in_features: int, width: int, strides: int, *, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        """Makes the layers."""
        conv = partial(_make_conv, dtype=dtype, rngs=rngs)
        norm = partial(_make_norm, dtype=dtype, rngs=rngs)
        features = width * EXPANSION
        self.conv1 = conv(in_features, width, 1, 1)
        self.norm1 = norm(width)
        self.conv2 = conv(width, width, 3, strides)
        self.norm2 = norm(width)
        self.conv3 = conv(width, features, 1, 1)
        # Each block starts as the identity (Goyal et al. 2017, section 5.1).
        self.norm3 = norm(features, scale_init=nnx.initializers.zeros)
        self.has_projection = strides != 1 or in_features != features
        if self.has_projection:
            self.shortcut_conv = conv(in_features, features, 1, strides)
            self.shortcut_norm = norm(features)

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Applies the block.

        Args:
            x: images, `[batch, height, width, channels]`.
            train: whether norm layers use, and update, the statistics of this batch.

        Returns:
            The block's output.
        """
        y = nnx.relu(self.norm1(self.conv1(x), use_running_average=not train))
        y = nnx.relu(self.norm2(self.conv2(y), use_running_average=not train))
        y = self.norm3(self.conv3(y), use_running_average=not train)
        if self.has_projection:
            x = self.shortcut_norm(self.shortcut_conv(x), use_running_average=not train)
        return nnx.relu(x + y)


class ResNet(nnx.Module):
    """ResNet v1.5 with bottleneck blocks (He et al. 2015).

    Params are made in float32; cast them with a `mpopt.Policy`. Norm layers compute in float32
    and hand on their result in `dtype`; running statistics are always float32.

    Args:
        num_classes: size of the output.
        in_channels: channels of the images.
        width: channels of the first stage's 3×3 convolutions; 64 is the standard ResNet-50.
        stage_sizes: blocks in each stage.
        stem: `"imagenet"`: 7×7 convolution and max-pool, each of stride 2; `"cifar"`: one 3×3
            convolution that keeps the resolution.
        dtype: dtype of the convolutions, of the dense head and of their outputs.
        rngs: random number streams for the initial params.
    """

    bottleneck: ClassVar[type[Bottleneck]] = Bottleneck

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int,
        width: int = 64,
        stage_sizes: Sequence[int] = RESNET50_STAGES,
        stem: Stem = "imagenet",
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the layers."""
        kernel, strides = (7, 2) if stem == "imagenet" else (3, 1)
        self.stem = stem
        self.dtype = dtype
        self.stem_conv = _make_conv(in_channels, width, kernel, strides, dtype=dtype, rngs=rngs)
        self.stem_norm = _make_norm(width, dtype=dtype, rngs=rngs)
        features = width
        stages = []
        for stage, num_blocks in enumerate(stage_sizes):
            blocks = []
            for block in range(num_blocks):
                strides = 2 if stage > 0 and block == 0 else 1
                blocks.append(
                    self.bottleneck(features, width * 2**stage, strides, dtype=dtype, rngs=rngs)
                )
                features = width * 2**stage * EXPANSION
            stages.append(nnx.List(blocks))
        self.stages = nnx.List(stages)
        self.head = nnx.Linear(features, num_classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Computes the logits.

        Args:
            images: normalised images, `[batch, height, width, channels]`.
            train: whether norm layers use, and update, the statistics of this batch.

        Returns:
            Logits in `dtype`, `[batch, num_classes]`.
        """
        x = self.apply_stem(images.astype(self.dtype), train=train)
        for stage in self.stages:
            for block in stage:
                x = block(x, train=train)
        # The mean over positions sums in float32: in float16 the sum of a large map overflows.
        x = jnp.mean(x, axis=(1, 2), dtype=at_least_float32(x.dtype)).astype(self.dtype)
        return self.head(x)

    def apply_stem(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Applies the layers before the first block.

        Args:
            images: in the dtype of the activations, `[batch, height, width, channels]`.
            train: whether norm layers use, and update, the statistics of this batch.

        Returns:
            The input of the first block.
        """
        x = nnx.relu(self.stem_norm(self.stem_conv(images), use_running_average=not train))
        if self.stem == "imagenet":
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        return x


def resnet_type(blocks: Blocks) -> type[ResNet]:
    """Returns the class of a model by the name of its blocks.

    Args:
        blocks: `"plain"`: the layers one after another; `"low_traffic"`: the same function of the
            same params, with hand-written gradients that move fewer bytes.

    Returns:
        :class:`ResNet`, or the subclass with those gradients.
    """
    if blocks == "plain":
        return ResNet
    from experiments.low_traffic.model import LowTrafficResNet  # it derives from this one

    return LowTrafficResNet


def init_resnet(
    key: jax.Array, *, blocks: Blocks = "plain", **hyperparameters: Any
) -> tuple[nnx.GraphDef[ResNet], nnx.State, nnx.State]:
    """Makes a ResNet in functional form.

    Args:
        key: random key of the initial params. Threefry keys make the compiled initialisation
            slow on CPUs (20 s against 4 s for ResNet-50 with `impl="rbg"`).
        blocks: see :func:`resnet_type`. Params and statistics do not depend on it.
        **hyperparameters: arguments of :class:`ResNet`, without `rngs`.

    Returns:
        The graph definition, the float32 params and the batch statistics.
    """

    def make(key: jax.Array) -> ResNet:
        return resnet_type(blocks)(**hyperparameters, rngs=nnx.Rngs(params=key))

    graphdef = nnx.graphdef(nnx.eval_shape(make, key))
    params, batch_stats = jax.jit(lambda key: nnx.state(make(key), nnx.Param, nnx.BatchStat))(key)
    return graphdef, params, batch_stats
