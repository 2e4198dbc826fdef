"""ZeRO-1: masters and moments split over the devices, params gathered in 16 bits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import both_dtypes
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    Training,
    collectives,
    make_mesh,
    needs_eight_devices,
    partitioned_text,
    random_batches,
    random_params,
    shard_bytes,
    tanh_loss,
)

import mpopt

pytestmark = needs_eight_devices
SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


SGD = optax.sgd(0.1, momentum=0.9)


def training(layout, dtype, inner=SGD):
    policy = mpopt.Policy(dtype)
    tx = mpopt.mixed_precision(inner, policy=policy)
    return Training(layout, tx, policy, tanh_loss, random_params(width=512))


def gathered(text):
    """The dtypes of the all-gathered arrays of two or more dimensions."""
    types = [t for kind, types in collectives(text) if kind == "all-gather" for t in types]
    return {t.partition("[")[0] for t in types if "," in t}


@both_dtypes
def test_each_device_holds_an_eighth_of_masters_and_moments(dtype):
    zero1 = training("zero1", dtype, optax.adam(1e-2))
    params, opt_state, _ = zero1.run(random_batches(2))
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    for device in jax.devices()[:8]:
        assert shard_bytes(params, device) == 2 * num_params
        masters = opt_state.inner_state.master_params
        assert shard_bytes(masters, device) == 4 * num_params / 8
        # Two moments, and Adam's count.
        assert shard_bytes(opt_state.inner_state.inner_state, device) == 8 * num_params / 8 + 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_params_are_gathered_in_their_own_dtype(dtype, tmp_path):
    program = partitioned_text(training("zero1", dtype).lower(random_batches(1)[0]), tmp_path)
    assert gathered(program) == {SHORT[dtype]}
    reduced = [t for kind, types in collectives(program) if kind == "all-reduce" for t in types]
    assert {t.partition("[")[0] for t in reduced if "," in t} == {SHORT[dtype]}


def test_compiled_program_gathers_float16():
    program = training("zero1", jnp.float16).lower(random_batches(1)[0]).compile().as_text()
    assert gathered(program) == {"f16"}
    # The decision is made on the shards: no more than a flag a leaf crosses the wire for it.
    assert re.search(
        r"\(pred\[\], pred\[\], pred\[\]\) all-reduce", re.sub(r"\{.*?\}", "", program)
    )


def test_scan_that_carries_shards_gathers_float16_params_and_nothing_else():
    # out_shardings do not reach into a loop.
    zero1 = training("zero1", jnp.float16)
    shards = mpopt.opt_state_sharding(zero1.params_f32, zero1.mesh, "data", min_size=1)

    def step(carry, batch):
        params, opt_state = carry
        params = lax.with_sharding_constraint(params, zero1.params_sharding)
        params, opt_state, _ = zero1._step(params, opt_state, batch)
        return (lax.with_sharding_constraint(params, shards), opt_state), None

    batches = jax.device_put(
        np.stack(random_batches(3)), NamedSharding(zero1.mesh, P(None, "data"))
    )
    scan = jax.jit(
        lambda batches, *carry: lax.scan(step, carry, batches)[0],
        out_shardings=(zero1.params_sharding, zero1.state_sharding),
    )
    program = scan.lower(batches, *zero1.start()).compile()
    found = {(kind, t) for kind, types in collectives(program.as_text()) for t in types}
    assert {t for kind, t in found if kind == "all-gather"} == {
        *("f16[16,512]", "f16[512]", "f16[512,8]")
    }
    params, _ = program(batches, *zero1.start())
    expected, _, _ = zero1.run(random_batches(3))
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2e-3, atol=1e-4)


@both_dtypes
def test_explicit_axes_take_a_reshard_before_and_after(dtype):
    mesh = make_mesh(axis_type=AxisType.Explicit)
    policy = mpopt.Policy(dtype)
    tx = mpopt.mixed_precision(SGD, policy=policy)
    with jax.set_mesh(mesh):
        params_f32 = jax.device_put(random_params(width=512), NamedSharding(mesh, P()))
        sharding = mpopt.opt_state_sharding(
            jax.eval_shape(tx.init, params_f32), mesh, "data", min_size=1
        )
        shards = mpopt.opt_state_sharding(params_f32, mesh, "data", min_size=1)
        opt_state = jax.jit(tx.init, out_shardings=sharding)(params_f32)
        params = jax.jit(policy.cast_to_param)(params_f32)

        @jax.jit
        def step(params, opt_state, batch):
            grads = mpopt.value_and_grad(tanh_loss)(params, batch, opt_state=opt_state)[1]
            own, grads = jax.sharding.reshard((params, grads), (shards, shards))
            updates, opt_state = tx.update(grads, opt_state, own)
            own = optax.apply_updates(own, updates)
            replicated = jax.tree.map(lambda p: jax.typeof(p).sharding, params)
            return jax.sharding.reshard(own, replicated), opt_state

        batches = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in random_batches(2)]
        for batch in batches:
            params, opt_state = step(params, opt_state, batch)
        assert step._cache_size() <= 2
        with pytest.raises(ValueError, match=r"'first/kernel' has the explicit sharding P\(None"):
            jax.jit(tx.update)(params, opt_state, params)
        with pytest.raises(ValueError, match="'first/kernel' has the explicit sharding"):
            mpopt.master_params(opt_state, params)
    expected, _, _ = training("zero1", dtype).run(random_batches(2))
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), atol=4 * jnp.finfo(dtype).eps)
