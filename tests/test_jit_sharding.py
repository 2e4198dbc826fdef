"""Layouts under jit: init, eval_shape, map_params, explicit axes, FSDP's compiled update."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import assert_same_bits, both_dtypes
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    Training,
    collectives,
    mesh_of,
    needs_eight_devices,
    params_sharding,
    random_batches,
    random_params,
    shard_bytes,
    tanh_loss,
)

import mpopt

pytestmark = needs_eight_devices
POLICY = mpopt.Policy(jnp.float16, keep_float32="norm")
AXIS_TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])


def transformation(inner=None):
    inner = optax.adam(1e-2) if inner is None else inner
    return mpopt.mixed_precision(inner, policy=POLICY)


def placed(layout, axis_type=AxisType.Auto):
    params = random_params()
    mesh = mesh_of(layout, axis_type)
    return mesh, jax.device_put(params, params_sharding(layout, params, mesh))


def assert_layout_of_params(opt_state, params):
    """Masters and moments lie as their params do, scalars and flags on every device."""
    adam = opt_state.inner_state.inner_state[0]
    for tree in (opt_state.inner_state.master_params, adam.mu, adam.nu):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            param = params[path[0].key][path[1].key]
            assert leaf.sharding.is_equivalent_to(param.sharding, leaf.ndim), path
    flags = opt_state._replace(inner_state=adam.count)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(flags))


def assert_equivalent(shapes, *shardings):
    for leaf, a, b in zip(*map(jax.tree.leaves, (shapes, *shardings)), strict=True):
        assert a.is_equivalent_to(b, leaf.ndim)


@AXIS_TYPES
@pytest.mark.parametrize("layout", ["replicated", "fsdp", "tensor"])
def test_init_under_jit_lays_the_state_out_as_the_params(layout, axis_type):
    mesh, params = placed(layout, axis_type)
    tx = transformation()
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(tx.init, params)
        sharding = mpopt.opt_state_sharding(shapes, mesh, params=params)
        assert_layout_of_params(jax.jit(tx.init, out_shardings=sharding)(params), params)
        # Arrays that init makes outside jit come from the params: nothing has to be said.
        eager = tx.init(params)
        assert_layout_of_params(jax.device_put(eager, sharding), params)
        master = eager.inner_state.master_params["first"]["kernel"]
        assert master.sharding.is_equivalent_to(params["first"]["kernel"].sharding, 2)
        if axis_type == AxisType.Explicit:
            # The types carry the layout: neither out_shardings nor params= is needed.
            assert_layout_of_params(jax.jit(tx.init)(params), params)
            assert_equivalent(shapes, mpopt.opt_state_sharding(shapes, mesh), sharding)


@pytest.mark.parametrize("layout", ["replicated", "fsdp", "tensor"])
def test_update_on_explicit_axes_keeps_every_layout_and_traces_once(layout):
    mesh, params_f32 = placed(layout, AxisType.Explicit)
    tx = transformation(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))
    traces = []
    with jax.set_mesh(mesh):
        opt_state = jax.jit(tx.init)(params_f32)
        params = jax.jit(POLICY.cast_to_param)(params_f32)

        @jax.jit
        def step(params, opt_state):
            traces.append(1)
            grads = jax.tree.map(lambda p: p * 1024, params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        new, new_state = step(*step(params, opt_state))
        assert mpopt.grads_finite(new_state)
        masters = jax.jit(mpopt.master_params)(new_state, new)
        assert_same_bits(new, jax.jit(POLICY.cast_to_param)(masters))
    for before, after in zip(
        jax.tree.leaves((params, opt_state, params)),
        jax.tree.leaves((new, new_state, masters)),
        strict=True,
    ):
        assert after.sharding.is_equivalent_to(before.sharding, before.ndim)
    assert len(traces) == 1


@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
def test_map_params_sees_the_masters_and_the_moments(layout):
    mesh, params = placed(layout)
    tx = transformation()
    shapes = jax.eval_shape(tx.init, params)
    mapped = optax.tree.map_params(
        tx,
        # A float32 leaf is its own master.
        lambda leaf, sharding: leaf if isinstance(leaf, optax.MaskedNode) else sharding,
        shapes,
        params_sharding(layout, params, mesh),
        transform_non_params=lambda leaf: NamedSharding(mesh, P()),
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    assert_equivalent(shapes, mapped, mpopt.opt_state_sharding(shapes, mesh, params=params))


@both_dtypes
def test_fsdp_holds_and_updates_shards_only(dtype):
    policy = mpopt.Policy(dtype)
    tx = mpopt.mixed_precision(optax.adam(1e-2), policy=policy)
    fsdp = Training("fsdp", tx, policy, tanh_loss, random_params(width=512))
    batch = random_batches(1)[0]
    params, opt_state = fsdp.start()
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    for device in jax.devices()[:8]:
        assert shard_bytes(params, device) == 2 * num_params / 8
        assert shard_bytes(opt_state.inner_state, device) == 12 * num_params / 8 + 4
    step = fsdp.lower(batch).compile().memory_analysis()
    # Params, masters and two moments, and what is left beside them: flags, counters, the batch.
    assert step.argument_size_in_bytes - 14 * num_params / 8 < 2000

    update = jax.jit(
        lambda params, opt_state, grads: apply(tx, params, opt_state, grads),
        out_shardings=(fsdp.params_sharding, fsdp.state_sharding),
        donate_argnums=(0, 1),
    )
    compiled = update.lower(params, opt_state, params).compile()
    program = re.sub(r"\{.*?\}", "", compiled.as_text())
    assert not re.search(r"\w+\[(16,512|512,8|512)\]", program)
    # Nothing but the flags crosses the wire, and no float32 copy of all params is held beside.
    assert [kind for kind, _ in collectives(program)] == ["all-reduce"]
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * num_params / 2


def apply(tx, params, opt_state, grads):
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state
