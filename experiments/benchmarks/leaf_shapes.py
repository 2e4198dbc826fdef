"""The params of well-known models, by shape: all that an optimizer's cost depends on."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from experiments.resnet import RESNET50_STAGES, ResNet

Shapes = dict[str, tuple[int, ...]]

VOCABULARY = 50_257
CONTEXT = 1_024


def resnet_shapes(
    width: int = 64, stage_sizes: Sequence[int] = RESNET50_STAGES, num_classes: int = 1000
) -> Shapes:
    """Returns the params of the experiments' ResNet; by default ResNet-50's 161.

    Args:
        width: channels of the first stage.
        stage_sizes: blocks in each stage.
        num_classes: size of the output.

    Returns:
        Shapes by key path.
    """

    def make(key: jax.Array) -> ResNet:
        return ResNet(
            num_classes=num_classes,
            in_channels=3,
            width=width,
            stage_sizes=stage_sizes,
            rngs=nnx.Rngs(params=key),
        )

    model = nnx.eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(str(key.key) for key in path): leaf.shape for path, leaf in leaves}


def gpt2_shapes(width: int = 768, layers: int = 12) -> Shapes:
    """Returns the params of GPT-2 (Radford et al. 2019); by default the smallest's 148, 124M.

    The output layer shares the embedding's weights.

    Args:
        width: size of an activation.
        layers: number of blocks.

    Returns:
        Shapes by key path.
    """
    shapes: Shapes = {"embedding": (VOCABULARY, width), "positions": (CONTEXT, width)}
    for layer in range(layers):
        block = {
            **_norm("norm1", width),
            **_dense("attention/qkv", width, 3 * width),
            **_dense("attention/out", width, width),
            **_norm("norm2", width),
            **_dense("mlp/up", width, 4 * width),
            **_dense("mlp/down", 4 * width, width),
        }
        shapes |= {f"blocks/{layer}/{name}": shape for name, shape in block.items()}
    return shapes | _norm("norm", width)


def same_shapes(count: int, shape: tuple[int, ...]) -> Shapes:
    """Returns leaves of one shape.

    Args:
        count: how many.
        shape: of each.
    """
    return {f"layer{index:04}": shape for index in range(count)}


def num_params(shapes: Shapes) -> int:
    """Returns the number of elements of all leaves.

    Args:
        shapes: the leaves.
    """
    return sum(int(np.prod(shape)) for shape in shapes.values())


def draw(shapes: Shapes, scale: float, seed: int) -> dict[str, Any]:
    """Makes float32 arrays of normal numbers on the host.

    Args:
        shapes: the leaves.
        scale: standard deviation.
        seed: the same one gives the same numbers.

    Returns:
        Arrays by key path.
    """
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape, np.float32) * np.float32(scale)
        for name, shape in shapes.items()
    }


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}/scale": (width,), f"{name}/bias": (width,)}


def _dense(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}/kernel": (inputs, outputs), f"{name}/bias": (outputs,)}
