"""What makes a precision, and what the optimizer does to params."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpopt
from experiments.optimizer import make_loss_scale, make_optimizer, make_policy, make_schedule
from experiments.presets import PRESETS

DIGITS = PRESETS["digits"]


def test_policy_keeps_norm_layers_in_float32():
    policy = make_policy(DIGITS)
    params = {"stages": {"norm1": {"scale": jnp.ones(2)}, "conv1": {"kernel": jnp.ones(2)}}}
    half = policy.cast_to_param(params)["stages"]
    assert half["norm1"]["scale"].dtype == jnp.float32
    assert half["conv1"]["kernel"].dtype == jnp.float16


@pytest.mark.parametrize(
    ("precision", "scale"), [("float16", 2.0**24), ("bfloat16", 1.0), ("float32", 1.0)]
)
def test_only_float16_is_scaled(precision, scale):
    config = dataclasses.replace(DIGITS, precision=precision)
    assert float(make_loss_scale(config).init().loss_scale) == scale


def test_schedule_warms_up_and_decays_to_zero():
    config = dataclasses.replace(DIGITS, epochs=10, warmup_epochs=2.0, learning_rate=0.4)
    schedule = make_schedule(config, steps_per_epoch=5)
    values = [float(schedule(step)) for step in (0, 5, 10, 30, 50)]
    np.testing.assert_allclose(values, [0.0, 0.2, 0.4, 0.2, 0.0], atol=1e-6)


@pytest.mark.parametrize("epochs", [1, 2])
def test_schedule_of_a_run_shorter_than_its_warmup(epochs):
    config = dataclasses.replace(DIGITS, epochs=epochs, warmup_epochs=2.0, learning_rate=0.4)
    schedule = make_schedule(config, steps_per_epoch=5)
    np.testing.assert_allclose(float(schedule(5)), 0.2, rtol=1e-6)


def test_constant_schedule():
    schedule = make_schedule(PRESETS["cifar10"], steps_per_epoch=781)
    assert {float(schedule(step)) for step in (0, 1, 7000)} == {0.01}


def test_step_schedule_divides_by_ten_after_each_epoch_named():
    config = dataclasses.replace(
        PRESETS["imagenet"], schedule="step", step_epochs=(3, 6), warmup_epochs=1.0
    )
    schedule = make_schedule(config, steps_per_epoch=10)
    values = [float(schedule(step)) for step in (0, 5, 10, 29, 31, 59, 61, 899)]
    expected = [0.0, 0.05, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    np.testing.assert_allclose(values, expected, rtol=1e-5)


def test_schedule_beyond_the_counter_of_steps_is_never_reached():
    step = dataclasses.replace(DIGITS, warmup_epochs=0.0, schedule="step", step_epochs=(1, 2**31))
    values = [float(make_schedule(step, steps_per_epoch=5)(count)) for count in (4, 6, 2**31 - 1)]
    np.testing.assert_allclose(values, [0.05, 0.005, 0.005], rtol=1e-6)
    warmup = make_schedule(dataclasses.replace(DIGITS, warmup_epochs=1e30), steps_per_epoch=5)
    np.testing.assert_allclose(float(warmup(2**30)), 0.025, rtol=1e-6)


def test_nesterov_looks_ahead():
    config = dataclasses.replace(
        DIGITS,
        precision="float32",
        nesterov=True,
        weight_decay=0.0,
        warmup_epochs=0,
        schedule="constant",
        learning_rate=1.0,
        momentum=0.5,
    )
    tx = make_optimizer(config, steps_per_epoch=5)
    params = jnp.zeros(1)
    state, updates = tx.init(params), []
    for _ in range(2):
        update, state = tx.update(jnp.ones(1), state, params)
        updates.append(float(update[0]))
    # The trace is 1 then 1.5; Nesterov's step is gradient + momentum × trace.
    np.testing.assert_allclose(updates, [-1.5, -1.75], rtol=1e-6)


def test_weight_decay_leaves_biases_and_norm_layers_alone():
    config = dataclasses.replace(
        DIGITS, precision="float32", warmup_epochs=0, schedule="constant", learning_rate=1.0
    )
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    tx = make_optimizer(config, steps_per_epoch=5)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -config.weight_decay, rtol=1e-6)
    np.testing.assert_array_equal(updates["bias"], 0)


def test_the_scale_rule_follows_the_configuration():
    config = dataclasses.replace(DIGITS, initial_loss_scale=8.0, growth_interval=1)
    params = jnp.ones((2, 2), jnp.float16)
    tx = make_optimizer(config, steps_per_epoch=5)
    _, state = tx.update(jnp.ones_like(params), tx.init(params), params)
    assert float(mpopt.loss_scale(state)) == 16.0
