"""The training loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.losses import cross_entropy


@pytest.fixture
def logits():
    return jnp.asarray(np.random.default_rng(0).normal(size=(6, 5)), jnp.float32)


def test_smoothed_loss_is_that_of_smoothed_one_hot_labels(logits):
    labels = jnp.arange(6) % 5
    targets = optax.smooth_labels(jax.nn.one_hot(labels, 5), 0.1)
    expected = optax.softmax_cross_entropy(logits, targets)
    actual = jax.jit(cross_entropy, static_argnums=2)(logits, labels, 0.1)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_no_smoothing_is_the_plain_loss_to_the_bit(logits):
    labels = jnp.arange(6) % 5
    expected = jax.jit(optax.softmax_cross_entropy_with_integer_labels)(logits, labels)
    np.testing.assert_array_equal(jax.jit(cross_entropy)(logits, labels), expected)
