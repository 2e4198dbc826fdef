"""Eight devices against one on the same global batches: masters, counters, skips."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, both_dtypes
from meshes import (
    LAYOUTS,
    Training,
    bookkeeping,
    exact_batches,
    exact_loss,
    exact_params,
    needs_eight_devices,
    random_batches,
    random_params,
    tanh_loss,
)

import mpopt

pytestmark = needs_eight_devices
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
RULE = mpopt.dynamic_loss_scale(2.0**10, growth_interval=3)


def train(layout, policy, loss, params_f32, batches, inner):
    tx = mpopt.mixed_precision(inner, loss_scale=RULE, policy=policy)
    training = Training(layout, tx, policy, loss, params_f32)
    params, opt_state, value = training.run(batches)
    assert training.step._cache_size() == 1
    return params, opt_state, value


@functools.cache
def on_one_device(run, dtype):
    return run(None, dtype)


def exact_run(layout, dtype):
    inner = optax.sgd(0.125, momentum=0.5)
    policy = mpopt.Policy(dtype)
    return train(layout, policy, exact_loss, exact_params(), exact_batches(6), inner)


def float32_run(layout, dtype):
    policy = mpopt.Policy(dtype)
    return train(layout, policy, tanh_loss, random_params(), random_batches(7), optax.adam(1e-3))


def narrow_run(layout, dtype):
    policy = mpopt.Policy(dtype, keep_float32="norm")
    return train(layout, policy, tanh_loss, random_params(), random_batches(7), optax.sgd(0.1, 0.9))


@both_dtypes
@every_layout
def test_masters_are_bit_equal_where_sums_are_exact(layout, dtype):
    params, state, _ = exact_run(layout, dtype)
    params_1, state_1, _ = on_one_device(exact_run, dtype)
    assert_same_bits(params, params_1)
    assert_same_bits(state, state_1)
    assert bookkeeping(state) == bookkeeping(state_1)
    assert mpopt.loss_scale(state) == 2.0**12


@every_layout
def test_float32_params_equal_those_of_one_device_within_reduction_order(layout):
    params, state, loss = float32_run(layout, jnp.float32)
    params_1, state_1, loss_1 = on_one_device(float32_run, jnp.float32)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(params_1), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(loss, loss_1, rtol=1e-5)
    assert bookkeeping(state) == bookkeeping(state_1)
    assert mpopt.loss_scale(state) == 2.0**12


@pytest.mark.parametrize(
    ("layout", "dtype"), [("zero1", jnp.float16), ("tensor", jnp.bfloat16)], ids=str
)
def test_narrow_params_stay_near_those_of_one_device(layout, dtype):
    params, state, _ = narrow_run(layout, dtype)
    params_1, state_1, _ = on_one_device(narrow_run, dtype)
    ulp = float(jnp.finfo(dtype).eps)
    full_params = jax.jit(mpopt.master_params)
    masters, masters_1 = full_params(state, params), full_params(state_1, params_1)
    for a, b in zip(jax.tree.leaves(masters), jax.tree.leaves(masters_1), strict=True):
        np.testing.assert_allclose(a, b, atol=2 * ulp)
    cast = jax.jit(mpopt.Policy(dtype, keep_float32="norm").cast_to_param)
    assert_same_bits(params, cast(masters))
    assert bookkeeping(state) == bookkeeping(state_1)


@both_dtypes
@every_layout
def test_inf_in_one_leaf_on_one_device_skips_on_all(layout, dtype):
    # Row 29 of 64 is on the fourth of eight devices, the second of four; only the kernel sees it.
    policy = mpopt.Policy(dtype)
    tx = mpopt.mixed_precision(optax.adam(0.1), loss_scale=RULE, policy=policy)
    training = Training(layout, tx, policy, exact_loss, exact_params())
    good, bad = exact_batches(2)
    bad[0][29, 3] = np.inf
    params, opt_state = training.start()
    params, opt_state, _ = training.step(params, opt_state, good)
    new, new_state, _ = training.step(params, opt_state, bad)
    assert_same_bits(new, params)
    assert_same_bits(new_state.inner_state, opt_state.inner_state)
    assert mpopt.nonfinite_params(new_state, new) == ["kernel"]
    metrics = {name: value.item() for name, value in mpopt.metrics(new_state).items()}
    assert metrics == {
        "loss_scale": 512.0,
        "grads_finite": False,
        "consecutive_skips": 1,
        "total_skips": 1,
    }
    bookkeeping(new_state)
    assert jax.tree.map(lambda x: x.sharding.spec, new) == jax.tree.map(
        lambda s: s.spec, training.params_sharding
    )
