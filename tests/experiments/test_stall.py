"""When a training is stuck, and what it says of the cause."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import mpopt
from experiments.augment import Augmentation
from experiments.diagnosis import Overflow
from experiments.optimizer import make_optimizer, make_policy
from experiments.presets import PRESETS
from experiments.resnet import init_resnet
from experiments.stall import MIN_LOSS_SCALE, StalledError, check_progress, diagnose_step
from experiments.steps import Progress, StepReader, StepRecord
from experiments.train_state import init_train_state
from experiments.train_step import make_batch, make_loss_fn, make_train_step

FLOAT16 = dataclasses.replace(PRESETS["digits"], max_consecutive_skips=30)
OVERFLOW = Overflow("stages/0/1/conv2", "conv_general_dilated", "float16", 1234.5)


def progress(records, consecutive_skips=0, loss_scale=1.0):
    return Progress(100, loss_scale, consecutive_skips, 40, tuple(records))


def steps(count, applied, loss_scale=1.0, loss=1.0):
    return [StepRecord(i, loss, loss_scale, loss_scale, applied, ()) for i in range(1, count + 1)]


def check(config, now, leaves=(), overflow=None):
    check_progress(now, config, lambda: (list(leaves), overflow))


def never():
    raise AssertionError("diagnosing takes a while and is for the end")


def test_ordinary_skips_are_no_reason():
    for precision, skips in (("float16", 30), ("bfloat16", 5), ("float32", 5)):
        config = dataclasses.replace(FLOAT16, precision=precision)
        now = progress(steps(3, True, loss=9.0) + steps(5, False), consecutive_skips=skips)
        check_progress(now, config, never)


def test_too_many_skips_in_a_row_stop_the_run_with_all_that_is_known():
    leaves = [f"layer{index}" for index in range(7)]
    now = progress(steps(20, False), consecutive_skips=31, loss_scale=0.25)
    with pytest.raises(StalledError) as error:
        check(FLOAT16, now, leaves, OVERFLOW)
    assert str(error.value) == (
        "Training stopped at step 100: 31 steps in a row were skipped; loss scale 0.25, 40 skipped "
        "steps in all.\n"
        "Non-finite gradients, in the order of the backward pass: layer0, layer1, layer2, layer3, "
        "layer4 and 2 more.\n"
        "The forward pass of that step overflows at stages/0/1/conv2: conv_general_dilated makes "
        "float16 infinity or NaN of finite inputs up to 1.23e+03.\n"
        "No loss scale can mend that. Keep that layer in float32, lower --learning-rate, or try "
        "--precision bfloat16."
    )
    assert error.value.exit_code == 1


def test_skips_at_the_floor_of_the_scale_stop_the_run_sooner():
    above = steps(15, False, 2 * MIN_LOSS_SCALE)
    check_progress(progress(above + steps(5, False, MIN_LOSS_SCALE), 20), FLOAT16, never)
    with pytest.raises(StalledError, match="6 steps in a row were skipped at the smallest"):
        check(FLOAT16, progress(above + steps(6, False, MIN_LOSS_SCALE), 21))
    # An applied step in between: the floor is where the scale belongs.
    mixed = steps(9, False, MIN_LOSS_SCALE) + steps(1, True) + steps(3, False, MIN_LOSS_SCALE)
    check_progress(progress(mixed, 3), FLOAT16, never)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_few_skips_stop_a_run_whose_scale_cannot_fall(precision):
    config = dataclasses.replace(FLOAT16, precision=precision)
    with pytest.raises(StalledError, match="6 steps in a row.*\n.*Lower --learning-rate"):
        check(config, progress(steps(6, False), 6))


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_applied_step_with_a_loss_that_is_not_finite_stops_the_run(loss):
    with pytest.raises(StalledError, match=f"the loss of step 1 is {loss}"):
        check(FLOAT16, progress(steps(1, True, loss=loss) + steps(3, True)))


def test_planted_layer_whose_activations_exceed_float16_is_named():
    """A real step of the real model, with one kernel too large."""
    config = dataclasses.replace(
        PRESETS["digits"], width=2, stage_sizes=(1, 1), image_size=8, batch_size=4
    )
    policy, tx = make_policy(config), make_optimizer(config, 10)
    augmentation = Augmentation((0.5,), (0.25,))
    graphdef, params_f32, batch_stats = init_resnet(
        jax.random.key(0, impl="rbg"),
        num_classes=4,
        in_channels=1,
        width=2,
        stage_sizes=(1, 1),
        dtype=policy.compute_dtype,
    )

    def plant(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return jnp.full_like(leaf, 6e4) if name.startswith("stages/1/0/conv3/kernel") else leaf

    params_f32 = jax.tree.map_with_path(plant, params_f32)
    state = jax.jit(init_train_state, static_argnums=(2, 3))(params_f32, batch_stats, tx, policy)
    reader = StepReader(state)
    key = jax.random.key(1, impl="rbg")
    images = jax.random.randint(key, (4, 8, 8, 1), 0, 256).astype(jnp.uint8)
    batch = (images, jnp.arange(4), jnp.arange(4))
    train_step = make_train_step(graphdef, tx, policy, augmentation)
    for _ in range(3):
        state = train_step(state, key, *batch)
    now = reader.read(state)
    assert now.total_skips == 3
    loss_fn = make_loss_fn(graphdef, policy)
    leaves, overflow = diagnose_step(
        loss_fn, state, lambda: make_batch(key, state.step - 1, *batch, policy, augmentation)
    )
    assert overflow.layer == "stages/1/0/conv3"
    assert set(leaves[:2]) == {"head/bias", "head/kernel"}
    assert set(leaves) == set(mpopt.nonfinite_params(state.opt_state, state.params))
    with pytest.raises(StalledError, match="overflows at stages/1/0/conv3: conv_general_dilated"):
        check(dataclasses.replace(config, max_consecutive_skips=2), now, leaves, overflow)
