"""A ResNet with one convolution that somebody left in float32."""

import jax.numpy as jnp

from experiments.resnet import ResNet


class PlantedResNet(ResNet):
    def __init__(self, **hyperparameters):
        super().__init__(**hyperparameters)
        self.stages[0][0].conv2.dtype = jnp.float32
