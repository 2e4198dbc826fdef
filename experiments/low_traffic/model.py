"""The ResNet made of low-traffic blocks."""

import jax

from experiments.low_traffic.block import LowTrafficBottleneck, apply_norm
from experiments.low_traffic.norm_relu import norm_relu
from experiments.low_traffic.stem import norm_relu_pool
from experiments.resnet import ResNet


class LowTrafficResNet(ResNet):
    """A `ResNet` whose training moves fewer bytes: the same function of the same params."""

    bottleneck = LowTrafficBottleneck

    def apply_stem(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Applies the layers before the first block.

        Args:
            images: in the dtype of the activations, `[batch, height, width, channels]`.
            train: whether norm layers use, and update, the statistics of this batch.

        Returns:
            The input of the first block.
        """
        if not train:
            return super().apply_stem(images, train=False)
        apply = norm_relu_pool if self.stem == "imagenet" else norm_relu
        return apply_norm(apply, self.stem_norm, self.stem_conv(images))
