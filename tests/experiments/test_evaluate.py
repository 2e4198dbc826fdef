"""Evaluation: every example once, with running statistics as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpopt
from experiments.augment import Augmentation
from experiments.evaluate import evaluate
from experiments.inputs.order import padded_batches
from experiments.resnet import NORM_PARAMS, ResNet, init_resnet
from experiments.train_step import make_eval_step

AUGMENTATION = Augmentation(mean=(0.5,), std=(0.25,), crop_padding=2, flip=True)


@pytest.mark.parametrize("batch_size", [5, 64])
def test_last_partial_batch_counts(batch_size):
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.integers(0, 256, (13, 8, 8, 1), np.uint8))
    labels = jnp.asarray(rng.integers(0, 4, 13), jnp.int32)
    policy = mpopt.Policy(jnp.float32, keep_float32=NORM_PARAMS)
    graphdef, params, batch_stats = init_resnet(
        jax.random.key(0), num_classes=4, in_channels=1, width=2, stage_sizes=(1,), stem="cifar"
    )
    eval_step = make_eval_step(graphdef, policy, AUGMENTATION)
    batches = ((images, labels, *padding) for padding in padded_batches(13, batch_size))
    loss, accuracy = evaluate(eval_step, params, batch_stats, batches)

    model = nnx.merge(graphdef, params, batch_stats)
    logits = model((images / 255.0 - 0.5) / 0.25, train=False)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    np.testing.assert_allclose(loss, float(losses.mean()), rtol=1e-5)
    assert accuracy == float((logits.argmax(-1) == labels).sum()) / 13


def test_running_statistics_beyond_float16_are_used_as_they_are():
    """Flax casts them to float16 unless told otherwise: a variance of 1e5 becomes infinite."""
    model = ResNet(
        num_classes=2, in_channels=1, width=4, stage_sizes=(), dtype=jnp.float16, rngs=nnx.Rngs(0)
    )
    model.stem_norm.mean[...] = jnp.full(4, 1e5)
    model.stem_norm.var[...] = jnp.full(4, 1e5)
    x = jnp.full((1, 2, 2, 4), 4e4, jnp.float16)
    actual = model.stem_norm(x, use_running_average=True)
    assert actual.dtype == jnp.float16
    expected = (np.float32(np.float16(4e4)) - 1e5) / np.sqrt(1e5)
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected, rtol=1e-3)
