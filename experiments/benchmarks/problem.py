"""What is trained in a measurement: the same for every contender."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mpopt
from experiments.benchmarks.leaf_shapes import Shapes, draw
from experiments.resnet import NORM_PARAMS, RESNET50_STAGES, Stem, init_resnet
from experiments.train_step import make_loss_fn

PyTree = Any
LossFn = Callable[[PyTree, PyTree, PyTree], tuple[jax.Array, PyTree]]

SGD = optax.sgd(1e-3, momentum=0.9)
ADAMW = optax.adamw(1e-3)


class Problem(NamedTuple):
    """A loss and an optimizer.

    Attributes:
        params: float32, as the model's init gives them.
        stats: what the forward pass changes beside them: batch statistics.
        tx: the optimizer in float32.
        loss: `loss(compute_dtype)` gives `loss_fn(params, stats, batch) -> (loss, stats)`, with a
            float32 loss. The model casts params to the compute dtype itself.
        batch: `batch(compute_dtype)` gives the batch.
    """

    params: PyTree
    stats: PyTree
    tx: optax.GradientTransformation
    loss: Callable[[Any], LossFn]
    batch: Callable[[Any], PyTree]


def linear_problem(shapes: Shapes, tx: optax.GradientTransformation) -> Problem:
    """Makes a problem whose step is nothing but the update.

    The loss is the sum of `params · g`, so that XLA deletes its value, and its gradients are `g`
    times the scale, in the dtypes that a model gives.

    Args:
        shapes: the params.
        tx: the optimizer.

    Returns:
        The problem; norm leaves stay in float32, as in a model.
    """

    def loss_fn(params: PyTree, stats: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        products = jax.tree.map(
            lambda p, g: jnp.sum(p.astype(g.dtype).astype(jnp.float32) * g.astype(jnp.float32)),
            params,
            batch,
        )
        return jax.tree.reduce(jnp.add, products), stats

    gradients = draw(shapes, 1e-3, seed=1)
    return Problem(
        params=jax.tree.map(jnp.asarray, draw(shapes, 1e-2, seed=0)),
        stats=(),
        tx=tx,
        loss=lambda dtype: loss_fn,
        batch=lambda dtype: policy(dtype).cast_to_param(jax.tree.map(jnp.asarray, gradients)),
    )


def resnet_problem(
    tx: optax.GradientTransformation,
    *,
    batch_size: int,
    image_size: int,
    num_classes: int = 10,
    width: int = 64,
    stage_sizes: Sequence[int] = RESNET50_STAGES,
    stem: Stem = "imagenet",
    **hyperparameters: Any,
) -> Problem:
    """Makes a problem of the experiments' ResNet on random images.

    Args:
        tx: the optimizer.
        batch_size: images a step.
        image_size: their height and width.
        num_classes: size of the output.
        width: channels of the first stage.
        stage_sizes: blocks in each stage.
        stem: see `experiments.resnet.ResNet`.
        **hyperparameters: more arguments of `experiments.resnet.init_resnet`.

    Returns:
        The problem.
    """
    model: dict[str, Any] = dict(
        num_classes=num_classes,
        in_channels=3,
        width=width,
        stage_sizes=stage_sizes,
        stem=stem,
        **hyperparameters,
    )
    # The rbg generator compiles in a third of threefry's time.
    key = jax.random.key(0, impl="rbg")
    _, params, stats = init_resnet(key, dtype=jnp.float32, **model)

    def loss(dtype: Any) -> LossFn:
        graphdef = _graphdef(key, dtype=dtype, **model)
        batch_loss = make_loss_fn(graphdef, policy(dtype))
        return lambda params, stats, batch: batch_loss(params, stats, *batch)

    rng = np.random.default_rng(0)
    images = rng.standard_normal((batch_size, image_size, image_size, 3), np.float32)
    labels = jnp.asarray(rng.integers(0, num_classes, batch_size, np.int32))
    return Problem(params, stats, tx, loss, lambda dtype: (jnp.asarray(images, dtype), labels))


def policy(dtype: Any) -> mpopt.Policy:
    """Returns the policy of a compute dtype: everything in it but the norm layers.

    Args:
        dtype: of params and activations.
    """
    return mpopt.Policy(param_dtype=dtype, keep_float32=NORM_PARAMS)


def _graphdef(key: jax.Array, **hyperparameters: Any) -> nnx.GraphDef[Any]:
    """Returns a model's definition; nothing is computed."""
    found = []

    def trace(key: jax.Array) -> None:
        found.append(init_resnet(key, **hyperparameters)[0])

    jax.eval_shape(trace, key)
    return found[0]
