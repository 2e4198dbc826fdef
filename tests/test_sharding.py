"""Devices agree whether to skip: axis_name under shard_map and pmap, on virtual CPU devices."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpopt

DEVICES = 4
pytestmark = pytest.mark.skipif(jax.device_count() < DEVICES, reason="needs several devices")
RULE = mpopt.dynamic_loss_scale(1024.0)


def mesh(shape=(DEVICES,), names=("data",)):
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


def start(axis_name):
    tx = mpopt.mixed_precision(optax.adam(0.1), loss_scale=RULE, axis_name=axis_name)
    params = {"w": jnp.ones(3, jnp.float16)}
    return tx, params, tx.init(params)


def gradients(*bad):
    """A gradient for each device, with inf on some."""
    grads = np.full((DEVICES, 3), 512.0, np.float16)
    grads[list(bad), 1] = np.inf
    return jnp.asarray(grads)


def local_step(tx, params, state, grads):
    """A step of one device with its own gradient: what is replicated must come out equal."""
    updates, state = tx.update({"w": grads.reshape(3)}, state, params)
    params = optax.apply_updates(params, updates)
    return jax.tree.map(lambda x: x[None], (params, state))


@pytest.mark.parametrize(
    ("axis_name", "bad"),
    [("data", ()), ("data", (0,)), ("data", (1, 2)), (["data"], (3,)), (("data",), (3,))],
)
def test_inf_on_one_device_skips_on_all_under_shard_map(axis_name, bad):
    tx, params, state = start(axis_name)
    step = jax.jit(
        jax.shard_map(
            partial(local_step, tx),
            mesh=mesh(),
            in_specs=(P(), P(), P("data")),
            out_specs=P("data"),
        )
    )
    new, new_state = step(params, state, gradients(*bad))
    check(new, new_state, params, state, bad)


@pytest.mark.parametrize("bad", [(), (3,)])
def test_inf_on_one_device_skips_on_all_under_pmap(bad):
    tx, params, state = start("data")
    step = jax.pmap(
        partial(local_step, tx),
        axis_name="data",
        in_axes=(None, None, 0),
        devices=jax.devices()[:DEVICES],
    )
    new, new_state = jax.tree.map(lambda x: x[:, 0], step(params, state, gradients(*bad)))
    check(new, new_state, params, state, bad)


def check(new, new_state, params, state, bad):
    assert mpopt.grads_finite(new_state).tolist() == [not bad] * DEVICES
    assert mpopt.loss_scale(new_state).tolist() == [512.0 if bad else 1024.0] * DEVICES
    for device in range(DEVICES):
        on_device = jax.tree.map(lambda x: x[device], (new, new_state))  # noqa: B023 (called at once)
        if bad:
            assert_same_bits(on_device[0], params)
            assert_same_bits(on_device[1].inner_state, state.inner_state)
            assert mpopt.nonfinite_params(on_device[1], params) == ["w"]
        else:
            np.testing.assert_allclose(np.float32(on_device[0]["w"]), 0.9, rtol=1e-3)


def test_without_axis_name_devices_disagree():
    # Why the argument exists.
    tx, params, state = start(None)
    step = jax.shard_map(
        partial(local_step, tx),
        mesh=mesh(),
        in_specs=(P(), P(), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    _, new_state = jax.jit(step)(params, state, gradients(2))
    assert mpopt.grads_finite(new_state).tolist() == [True, True, False, True]


def test_all_named_axes_agree():
    tx, params, state = start(("data", "model"))
    step = jax.shard_map(
        partial(local_step, tx),
        mesh=mesh((2, 2), ("data", "model")),
        in_specs=(P(), P(), P(("data", "model"))),
        out_specs=P(("data", "model")),
    )
    _, new_state = jax.jit(step)(params, state, gradients(1))
    assert mpopt.grads_finite(new_state).tolist() == [False] * 4


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "specs",
    [(P("data"), P()), (P("data"), P("model")), (P("data"), P("data")), (P(), P())],
    ids=["one varies", "one axis each", "one axis for both", "none varies"],
)
def test_named_axes_agree_where_gradients_vary_over_some_of_them(specs, check_vma):
    # lax.pmin takes no mixture of axes over which a value varies and others.
    tx = mpopt.mixed_precision(optax.sgd(0.1), axis_name=("data", "model"))
    params = {"a": jnp.ones(2, jnp.float16), "b": jnp.ones(2, jnp.float16)}

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh((2, 2), ("data", "model")),
        in_specs=(dict(zip("ab", specs, strict=True)),),
        out_specs=P(),
        check_vma=check_vma,
    )
    def finite(grads):
        _, state = tx.update(grads, tx.init(params), params)
        return mpopt.grads_finite(state), mpopt.loss_scale(state)

    grads = {
        name: jnp.ones(2 if spec == P() else 4, jnp.float16)
        for name, spec in zip("ab", specs, strict=True)
    }
    assert finite(grads) == (True, 2.0**15)
    for name in "ab":
        # The last element is on the last device of the axis alone.
        bad = {**grads, name: grads[name].at[-1].set(jnp.inf)}
        assert finite(bad) == (False, 2.0**14)


def test_params_sharded_over_the_axis_train_their_own_part():
    # Fully sharded: each device holds its part of params, masters and gradients.
    tx = mpopt.mixed_precision(optax.sgd(1.0), loss_scale=RULE, axis_name="data")
    params = {"w": jnp.arange(8, dtype=jnp.float16)}

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh(),
        in_specs=(P("data"), P("data")),
        out_specs=(P("data"), P("data")),
    )
    def step(params, grads):
        state = tx.init(params)
        updates, state = tx.update({"w": grads}, state, params)
        return optax.apply_updates(params, updates), mpopt.grads_finite(state)[None]

    grads = jnp.full(8, 512, jnp.float16)
    new, finite = step(params, grads)
    np.testing.assert_array_equal(new["w"], np.arange(8) - 0.5)
    new, finite = step(params, grads.at[5].set(jnp.nan))
    assert_same_bits(new["w"], params["w"])
    assert finite.tolist() == [False] * DEVICES


def test_under_plain_jit_no_axis_is_needed():
    tx, params, state = start(None)
    sharding = NamedSharding(mesh(), P("data"))
    params = {"w": jax.device_put(jnp.ones(8, jnp.float16), sharding)}
    state = tx.init(params)
    assert state.inner_state.master_params["w"].sharding == sharding
    grads = {"w": jax.device_put(jnp.ones(8, jnp.float16).at[6].set(jnp.inf), sharding)}
    updates, new_state = jax.jit(tx.update)(grads, state, params)
    assert not mpopt.grads_finite(new_state)
    assert not np.any(np.asarray(updates["w"]))
    assert_same_bits(new_state.inner_state, state.inner_state)


def test_finite_check_of_sharded_leaves_is_one_all_reduce():
    # One reduction over leaves of different shardings would move whole gradients.
    tx = mpopt.mixed_precision(optax.sgd(0.1))
    layouts = {"rows": P("data", None), "columns": P(None, "data"), "whole": P()}
    params = {
        name: jax.device_put(jnp.ones((8, 8), jnp.float16), NamedSharding(mesh(), spec))
        for name, spec in layouts.items()
    }
    state = tx.init(params)
    program = jax.jit(tx.update).lower(params, state, params).compile().as_text()
    found = re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\(", program)
    assert found == ["all-reduce"]
