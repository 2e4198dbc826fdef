"""The model: it is a ResNet-50."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.resnet import ResNet, init_resnet


def abstract(**options):
    return nnx.eval_shape(lambda: ResNet(rngs=nnx.Rngs(0), **options))


def count_params(model):
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_full_width_has_the_params_of_resnet50():
    # The number of torchvision's resnet50 and of Keras' ResNet50 v1.5.
    assert count_params(abstract(num_classes=1000, in_channels=3)) == 25_557_032


def test_it_has_53_convolutions_and_one_dense_layer():
    model = abstract(num_classes=10, in_channels=3)
    modules = [module for _, module in nnx.iter_modules(model)]
    assert sum(isinstance(module, nnx.Conv) for module in modules) == 53
    assert sum(isinstance(module, nnx.Linear) for module in modules) == 1


@pytest.mark.parametrize(
    ("stem", "sizes"), [("imagenet", [32, 8, 8, 4, 2, 1]), ("cifar", [32, 32, 32, 16, 8, 4])]
)
def test_stem_decides_the_resolution(stem, sizes):
    seen = []

    def forward(images):
        options = {"num_classes": 3, "in_channels": 1, "width": 2, "stage_sizes": (1, 1, 1, 1)}
        model = ResNet(**options, stem=stem, rngs=nnx.Rngs(0))
        seen.append(images.shape[1])
        x = model.stem_conv(images)
        if stem == "imagenet":
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        seen.append(x.shape[1])
        for stage in model.stages:
            for block in stage:
                x = block(x, train=True)
            seen.append(x.shape[1])

    jax.eval_shape(forward, jnp.zeros((2, 32, 32, 1)))
    assert seen == sizes


def test_strides_are_in_the_3x3_convolution():
    model = abstract(num_classes=3, in_channels=1, width=2, stage_sizes=(1, 1))
    block = model.stages[1][0]
    assert (block.conv1.strides, block.conv2.strides) == (1, 2)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_activations_are_in_dtype_and_statistics_in_float32(dtype):
    graphdef, params, batch_stats = init_resnet(
        jax.random.key(0), num_classes=3, in_channels=1, width=2, stage_sizes=(1,), dtype=dtype
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}

    @jax.jit
    def forward(params, batch_stats, images):
        model = nnx.merge(graphdef, params, batch_stats)
        logits = model(images, train=True)
        return logits, nnx.state(model, nnx.BatchStat)

    images = np.random.default_rng(0).normal(size=(2, 16, 16, 1)).astype(np.float32)
    logits, new_stats = forward(params, batch_stats, images)
    assert logits.dtype == dtype
    assert {leaf.dtype.name for leaf in jax.tree.leaves(new_stats)} == {"float32"}
    changed = [
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(new_stats), jax.tree.leaves(batch_stats), strict=True)
    ]
    assert all(changed)


def test_pooling_a_large_map_does_not_overflow_float16():
    model = ResNet(
        num_classes=2, in_channels=1, width=1, stage_sizes=(), stem="cifar",
        dtype=jnp.float16, rngs=nnx.Rngs(0),
    )  # fmt: skip
    model.stem_norm.bias[...] = jnp.full(1, 1000.0)
    assert np.isfinite(model(jnp.ones((1, 64, 64, 1)), train=False)).all()
