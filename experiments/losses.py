"""The training loss."""

import jax
import jax.numpy as jnp
import optax


def cross_entropy(logits: jax.Array, labels: jax.Array, label_smoothing: float = 0.0) -> jax.Array:
    """Computes the cross-entropy with smoothed labels (Szegedy et al. 2016).

    The label's class has the probability `1 - s + s / n`, each other one `s / n`, for `n` classes
    and a smoothing of `s`.

    Args:
        logits: `[batch, num_classes]`.
        labels: integers, `[batch]`.
        label_smoothing: `s`, at least 0 and less than 1.

    Returns:
        The loss of each example.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    if label_smoothing == 0:
        return losses
    uniform = -jnp.mean(jax.nn.log_softmax(logits), axis=-1)
    return (1 - label_smoothing) * losses + label_smoothing * uniform
