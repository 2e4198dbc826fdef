"""What is compiled: the train step of a run, and the optimizer's update alone."""

import dataclasses
import importlib
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.augment import Augmentation
from experiments.config import TrainConfig
from experiments.errors import UsageError
from experiments.optimizer import make_optimizer, make_policy
from experiments.resnet import Blocks, resnet_type
from experiments.train_state import TrainState, init_train_state
from experiments.train_step import make_train_step

IMAGE_SETS = {
    "digits": (10, 1),
    "fashion_mnist": (10, 1),
    "cifar10": (10, 3),
    "cifar100": (100, 3),
    "imagenet2012": (1000, 3),
}
"""Classes and channels of the presets' image sets, none of which has to be on disk."""

# It only is a number in the schedule: the program is the same for any.
_STEPS_PER_EPOCH = 1000


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to compile and the shapes of its arguments.

    Attributes:
        function: jitted.
        arguments: pytrees of `jax.ShapeDtypeStruct`; no array exists.
    """

    function: Any
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class StepPrograms:
    """The programs of a run.

    Attributes:
        step: the train step.
        update: the optimizer's part of it.
        num_params: number of params.
        num_leaves: number of arrays that they are in.
    """

    step: Program
    update: Program
    num_params: int
    num_leaves: int


def make_programs(
    config: TrainConfig, model: str | None = None, num_classes: int | None = None
) -> StepPrograms:
    """Makes the step as `training_setup.set_up` does, from shapes alone.

    The step gets one batch and its indices, as from a stream, so that no image set counts among
    its arguments.

    Args:
        config: the run.
        model: see `find_model`; the run's blocks by default.
        num_classes: size of the output; the image set's by default.

    Returns:
        The programs.

    Raises:
        UsageError: where the model or the image set is not known.
    """
    classes, channels = _image_set(config, num_classes)
    policy, tx = make_policy(config), make_optimizer(config, _STEPS_PER_EPOCH)
    model_class = find_model(model or config.blocks)

    def make_model(key: jax.Array) -> Any:
        return model_class(
            num_classes=classes,
            in_channels=channels,
            width=config.width,
            stage_sizes=config.stage_sizes,
            stem=config.stem,
            dtype=policy.compute_dtype,
            rngs=nnx.Rngs(params=key),
        )

    key = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
    graphdef, params_f32, batch_stats = nnx.split(
        nnx.eval_shape(make_model, key), nnx.Param, nnx.BatchStat
    )
    state: TrainState = jax.eval_shape(
        lambda params, stats: init_train_state(params, stats, tx, policy), params_f32, batch_stats
    )
    # The statistics are constants of the program; any have the same cost.
    statistics = ((0.5,) * channels, (0.25,) * channels)
    augmentation = Augmentation(*statistics, config.crop_padding, config.flip, config.cutout)
    count, side = config.batch_size, config.image_size
    batch = (
        jax.ShapeDtypeStruct((count, side, side, channels), jnp.uint8),
        jax.ShapeDtypeStruct((count,), jnp.int32),
        jax.ShapeDtypeStruct((count,), jnp.int32),
    )
    train_step = make_train_step(
        graphdef, tx, policy, augmentation, label_smoothing=config.label_smoothing
    )

    def update(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    leaves = jax.tree.leaves(state.params)
    return StepPrograms(
        step=Program(train_step, (state, key, *batch)),
        # Gradients have the dtypes of the params.
        update=Program(
            jax.jit(update, donate_argnums=(1, 2)), (state.params, state.opt_state, state.params)
        ),
        num_params=sum(leaf.size for leaf in leaves),
        num_leaves=len(leaves),
    )


def find_model(name: str) -> Any:
    """Imports a model.

    Args:
        name: blocks of `experiments.resnet.resnet_type`, or `MODULE:CLASS`.

    Returns:
        The class, which takes the arguments of `experiments.resnet.ResNet`.

    Raises:
        UsageError: where there is none.
    """
    if name in get_args(Blocks):
        return resnet_type(cast(Blocks, name))
    module, _, class_name = name.partition(":")
    try:
        return getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"--model must be one of {', '.join(get_args(Blocks))}, or MODULE:CLASS that can be "
            f"imported, got {name}: {error}."
        ) from error


def _image_set(config: TrainConfig, num_classes: int | None) -> tuple[int, int]:
    """Returns the numbers of classes and channels."""
    name = config.dataset_name.split(":")[0].split("/")[0]
    if name not in IMAGE_SETS and num_classes is None:
        raise UsageError(
            f"the classes of {name} are not known here: give --num-classes (the images then count "
            f"as having 3 channels). Known: {', '.join(IMAGE_SETS)}."
        )
    classes, channels = IMAGE_SETS.get(name, (0, 3))
    return num_classes or classes, channels
