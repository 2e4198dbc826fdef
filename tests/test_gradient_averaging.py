"""Under shard_map and pmap the caller averages gradients: where, and what that gives."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, both_dtypes
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import (
    bookkeeping,
    collectives,
    exact_batches,
    exact_loss,
    exact_params,
    make_mesh,
    needs_eight_devices,
)

import mpopt

pytestmark = needs_eight_devices
RULE = mpopt.dynamic_loss_scale(2.0**10, growth_interval=2)
INNER = optax.sgd(0.125, momentum=0.5)
AVERAGING = optax.chain(optax.stateless(lambda grads, _: lax.pmean(grads, "data")), INNER)


def mean_loss(params, batch):
    return lax.pmean(exact_loss(params, batch), "data")


def step(tx, order, params, opt_state, batch):
    """One step; `order` says where gradients are averaged (None: on one device, nowhere)."""
    loss = mean_loss if order == "in the loss" else exact_loss
    # What a gradient is taken of must vary, or shard_map sums its gradient over the devices.
    own = lax.pcast(params, "data", to="varying") if order in ("before", "inside") else params
    value, grads = mpopt.value_and_grad(loss)(own, batch, opt_state=opt_state)
    if order in ("before", "pmap"):
        grads = lax.pmean(grads, "data")
    updates, opt_state = tx.update(grads, opt_state, params)
    if order in ("before", "inside", "pmap"):
        value = lax.pmean(value, "data")
    return optax.apply_updates(params, updates), opt_state, value


def sharded_step(tx, order, check_vma):
    return jax.jit(
        jax.shard_map(
            partial(step, tx, order),
            mesh=make_mesh(),
            in_specs=(P(), P(), P("data")),
            out_specs=P(),
            check_vma=check_vma,
        )
    )


def start(dtype, inner, axis_name):
    policy = mpopt.Policy(dtype)
    tx = mpopt.mixed_precision(inner, policy=policy, loss_scale=RULE, axis_name=axis_name)
    return tx, *jax.jit(lambda p: (policy.cast_to_param(p), tx.init(p)))(exact_params())


@functools.cache
def on_one_device(dtype, steps):
    tx, params, state = start(dtype, INNER, None)
    one = jax.jit(partial(step, tx, None))
    for batch in batches_with_an_overflow(steps):
        params, state, value = one(params, state, batch)
    return params, state, value


def batches_with_an_overflow(steps):
    """Row 29 of the second batch is on the fourth device; only the kernel sees it."""
    batches = exact_batches(steps)
    batches[1][0][29, 3] = np.inf
    return batches


@both_dtypes
@pytest.mark.parametrize(
    ("order", "check_vma"),
    [
        ("in the loss", True),
        ("before", True),
        ("before", False),
        ("inside", True),
        ("inside", False),
    ],
)
def test_every_order_gives_the_bits_of_one_device(order, check_vma, dtype):
    inner = AVERAGING if order == "inside" else INNER
    tx, params, state = start(dtype, inner, "data")
    run = sharded_step(tx, order, check_vma)
    batches = batches_with_an_overflow(5)
    for index, batch in enumerate(batches):
        params, state, value = run(params, state, batch)
        if index == 1:
            assert mpopt.nonfinite_params(state, params) == ["kernel"]
    expected, expected_state, expected_value = on_one_device(dtype, 5)
    assert_same_bits(params, expected)
    assert_same_bits(state.inner_state.master_params, expected_state.inner_state.master_params)
    assert_same_bits(value, expected_value)
    assert bookkeeping(state) == bookkeeping(expected_state)
    assert mpopt.loss_scale(state) == 2.0**10  # halved once, doubled once
    # Before the update gradients cross the wire in 16 bits, inside in float32.
    program = run.lower(params, state, batches[0]).as_text()
    narrow = {"float16": "f16", "bfloat16": "bf16"}[jnp.dtype(dtype).name]
    assert f"tensor<8x16x{'f32' if order == 'inside' else narrow}>) -> tensor<8x16x" in program


def test_pmap_gives_the_bits_of_one_device():
    tx, params, state = start(jnp.float16, INNER, "data")
    run = jax.pmap(
        partial(step, tx, "pmap"), "data", in_axes=(None, None, 0), devices=jax.devices()[:8]
    )
    batches = batches_with_an_overflow(3)
    for batch in batches:
        split = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch)
        copies = run(params, state, split)
        for device in range(1, 8):
            assert_same_bits(*(jax.tree.map(lambda x, d=d: x[d], copies) for d in (0, device)))
        params, state, _ = jax.tree.map(lambda x: x[0], copies)
    expected, expected_state, _ = on_one_device(jnp.float16, 3)
    assert_same_bits(params, expected)
    assert_same_bits(state, expected_state)


def test_without_check_vma_a_mean_in_the_loss_averages_no_gradient():
    # A trap of JAX: each device keeps its own gradient, and the params drift apart in silence.
    tx, params, state = start(jnp.float16, INNER, "data")
    run = sharded_step(tx, "in the loss", check_vma=False)
    program = run.lower(params, state, exact_batches(1)[0]).compile().as_text()
    assert not any("f16[8,16]" in types for _, types in collectives(program))
    new, _, _ = run(params, state, exact_batches(1)[0])
    shards = [np.asarray(shard.data) for shard in new["kernel"].addressable_shards]
    assert any(np.any(shards[0] != shard) for shard in shards[1:])
