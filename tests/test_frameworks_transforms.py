"""Plain pytrees and JAX transformations: every container, vmap, scan, cond, checkpoint, aux."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import mpopt

INITIAL_SCALE = 1024.0
POLICY = mpopt.Policy(jnp.float16)
RULE = mpopt.dynamic_loss_scale(INITIAL_SCALE)
# Gradients of the third batch exceed float16.
BATCHES = np.stack([np.random.RandomState(i).randn(4) * (1e4 if i == 2 else 1) for i in range(5)])
BATCHES = BATCHES.astype(np.float16)
A = np.random.RandomState(9).randn(4, 4).astype(np.float32)
B = np.zeros(4, np.float32)


@partial(jax.tree_util.register_dataclass, data_fields=["a", "b"], meta_fields=["name"])
@dataclasses.dataclass
class Layer:
    a: Any
    b: Any
    name: str = "layer"


def frozen_dict(a, b):
    return pytest.importorskip("flax.core").freeze({"layer": {"a": a, "b": b}})


CONTAINERS = {
    "list": lambda a, b: [a, b],
    "tuple with None": lambda a, b: (None, a, (b,)),
    "dataclass": lambda a, b: Layer(a, b),
    "FrozenDict": frozen_dict,
    "with an integer": lambda a, b: {"p": [a, b], "z": jnp.array(7)},
}


def as_dict(a, b):
    return {"a": a, "b": b}


def floats(tree):
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def loss_of(params, x):
    a, b = floats(params)
    return jnp.mean(jnp.square((x @ a + b) * jnp.max(jnp.abs(x))).astype(jnp.float32))


def start(make=as_dict, inner=None, offset=0.0):
    tx = mpopt.mixed_precision(
        optax.adamw(0.01) if inner is None else inner, loss_scale=RULE, policy=POLICY
    )
    params_f32 = make(jnp.array(A + offset), jnp.array(B))
    return tx, POLICY.cast_to_param(params_f32), tx.init(params_f32)


def make_step(tx, loss=loss_of):
    def step(params, opt_state, x):
        def scaled_loss(params):
            return mpopt.scale_loss(loss(params, x), opt_state)

        grads = jax.grad(scaled_loss, allow_int=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def train(tx, params, opt_state, batches=BATCHES, loss=loss_of):
    step = jax.jit(make_step(tx, loss), donate_argnums=(0, 1))
    for x in batches:
        params, opt_state = step(params, opt_state, x)
    assert step._cache_size() == 1
    return params, opt_state


def assert_same_bits(tree, other):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(scope="module")
def dict_run():
    """Params, state and masters of a run over plain dicts, with one skipped step."""
    params, opt_state = train(*start())
    assert float(mpopt.loss_scale(opt_state)) == INITIAL_SCALE / 2
    assert int(mpopt.metrics(opt_state)["total_skips"]) == 1
    assert np.abs(np.float32(params["a"]) - A).min() > 1e-3
    return params, opt_state, mpopt.master_params(opt_state, params)


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_trains_as_a_dict_does(name, dict_run):
    params, opt_state = train(*start(CONTAINERS[name]))
    assert jax.tree.structure(params) == jax.tree.structure(CONTAINERS[name](0, 0))
    assert_same_bits(floats(params), dict_run[0])
    exported = mpopt.master_params(opt_state, params)
    assert_same_bits(floats(exported), dict_run[2])
    assert type(exported) is type(params)
    assert mpopt.metrics(opt_state) == mpopt.metrics(dict_run[1])
    if name == "with an integer":
        assert int(params["z"]) == int(exported["z"]) == 7


def test_container_paths_reach_the_names_of_overflowed_leaves():
    for make, expected in (
        (CONTAINERS["dataclass"], ["a", "b"]),
        (CONTAINERS["tuple with None"], ["1", "2/0"]),
        (frozen_dict, ["layer/a", "layer/b"]),
    ):
        tx, params, opt_state = start(make)
        _, opt_state = tx.update(jax.tree.map(lambda p: p * jnp.inf, params), opt_state, params)
        # 0 * inf is NaN, so both leaves count.
        assert mpopt.nonfinite_params(opt_state, params) == expected


def test_vmap_ensemble_gives_every_member_its_own_scale(dict_run):
    # Four members, as many as the last axis is long: a wrong broadcast would not be an error.
    txs = [start(offset=offset) for offset in (0.0, 0.0, 0.25, 0.5)]
    tx = txs[0][0]
    masters_f32 = jax.tree.map(lambda *x: jnp.stack(x), *[s.inner_state[0] for _, _, s in txs])
    params, opt_state = POLICY.cast_to_param(masters_f32), jax.vmap(tx.init)(masters_f32)
    # Member 0 meets no overflow.
    batches = np.stack([BATCHES] * 4, axis=1)
    batches[2, 0] = BATCHES[1]
    step = jax.jit(jax.vmap(make_step(tx)), donate_argnums=(0, 1))
    for x in batches:
        params, opt_state = step(params, opt_state, x)

    scales = INITIAL_SCALE * np.array([1, 0.5, 0.5, 0.5])
    np.testing.assert_array_equal(mpopt.loss_scale(opt_state), scales)
    np.testing.assert_array_equal(mpopt.metrics(opt_state)["total_skips"], [0, 1, 1, 1])
    member = jax.tree.map(lambda x: x[1], (params, opt_state))
    for a, b in zip(jax.tree.leaves(member), jax.tree.leaves(dict_run[:2]), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-3, atol=1e-6)
    masters = mpopt.master_params(opt_state, params)
    assert_same_bits(POLICY.cast_to_param(masters), params)
    assert mpopt.nonfinite_params(opt_state, params) == ["a", "b"]
    mpopt.raise_if_stalled(opt_state, params, 0)

    # Outside vmap the accessors line the scales up with the leading axis.
    ones = jax.tree.map(lambda p: jnp.ones_like(p) * jnp.float16(INITIAL_SCALE), params)
    unscaled = mpopt.unscale(ones, opt_state)
    assert_same_bits(unscaled, jax.vmap(mpopt.unscale)(ones, opt_state))
    np.testing.assert_array_equal(unscaled["a"][:, 0, 0], INITIAL_SCALE / scales)


def test_vmap_ensemble_member_that_skips_keeps_its_old_values():
    tx, params, opt_state = start()
    params, opt_state = jax.tree.map(lambda x: jnp.stack([x] * 4), (params, opt_state))
    x = np.stack([BATCHES[0], BATCHES[2], BATCHES[0], BATCHES[2]])
    stepped, opt_state = jax.jit(jax.vmap(make_step(tx)))(params, opt_state, x)
    np.testing.assert_array_equal(mpopt.grads_finite(opt_state), [True, False, True, False])
    for old, new in zip(jax.tree.leaves(params), jax.tree.leaves(stepped), strict=True):
        np.testing.assert_array_equal((old == new).reshape(4, -1).all(1), [0, 1, 0, 1])
    statistics = mpopt.where_applied(opt_state, jnp.ones((4, 4)), jnp.zeros((4, 4)))
    np.testing.assert_array_equal(statistics, np.ones((4, 4)) * [[1], [0], [1], [0]])


def test_scan_over_steps_equals_the_loop(dict_run):
    tx, params, opt_state = start()

    @partial(jax.jit, donate_argnums=(0, 1))
    def epoch(params, opt_state, batches):
        def body(carry, x):
            carry = make_step(tx)(*carry, x)
            return carry, mpopt.metrics(carry[1])

        return lax.scan(body, (params, opt_state), batches)

    (params, opt_state), history = epoch(params, opt_state, BATCHES)
    np.testing.assert_array_equal(history["grads_finite"], [True, True, False, True, True])
    np.testing.assert_array_equal(history["consecutive_skips"], [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(
        history["loss_scale"], INITIAL_SCALE * np.array([1, 1, 0.5, 0.5, 0.5])
    )
    masters = mpopt.master_params(opt_state, params)
    for a, b in zip(jax.tree.leaves(masters), jax.tree.leaves(dict_run[2]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert_same_bits(POLICY.cast_to_param(masters), params)


def test_cond_may_leave_the_update_out():
    tx, params, opt_state = start()

    @jax.jit
    def maybe_step(params, opt_state, x, go):
        return lax.cond(go, make_step(tx), lambda p, s, x: (p, s), params, opt_state, x)

    kept = maybe_step(params, opt_state, BATCHES[2], False)
    assert_same_bits(kept, (params, opt_state))
    stepped, skipped_state = maybe_step(params, opt_state, BATCHES[2], True)
    assert_same_bits(stepped, params)
    assert float(mpopt.loss_scale(skipped_state)) == INITIAL_SCALE / 2
    assert maybe_step._cache_size() == 1


@pytest.mark.parametrize("scale_inside", [True, False])
def test_checkpointed_loss_gives_the_same_scaled_gradients(scale_inside):
    _, params, opt_state = start()

    def scaled(params, x):
        if scale_inside:
            return jax.checkpoint(lambda p: mpopt.scale_loss(loss_of(p, x), opt_state))(params)
        return mpopt.scale_loss(jax.checkpoint(loss_of)(params, x), opt_state)

    for x in (BATCHES[0], BATCHES[2]):
        plain = jax.jit(jax.grad(lambda p, x: mpopt.scale_loss(loss_of(p, x), opt_state)))
        got, expected = jax.jit(jax.grad(scaled))(params, x), plain(params, x)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert a.dtype == b.dtype == jnp.float16
            np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2e-3)


def test_checkpointed_run_equals_the_plain_run(dict_run):
    params, opt_state = train(*start(), loss=lambda p, x: jax.checkpoint(loss_of)(p, x))
    assert mpopt.metrics(opt_state) == mpopt.metrics(dict_run[1])
    np.testing.assert_allclose(np.float32(params["a"]), np.float32(dict_run[0]["a"]), rtol=2e-3)


def test_value_and_grad_with_aux_returns_the_true_loss_and_steps_despite_a_nan_in_aux():
    tx, params, opt_state = start()

    def with_aux(params, x, power, *, offset):
        return loss_of(params, x) ** power + offset, {"logged": jnp.array(jnp.nan), "n": x.size}

    @jax.jit
    def both(params, opt_state, x):
        def scaled(p):
            loss, aux = with_aux(p, x, 1, offset=2.0)
            return mpopt.scale_loss(loss, opt_state), aux

        ours = mpopt.value_and_grad(with_aux, has_aux=True)
        return (
            ours(params, x, 1, offset=2.0, opt_state=opt_state),
            jax.value_and_grad(scaled, has_aux=True)(params),
        )

    ((loss, aux), grads), ((jax_loss, _), jax_grads) = both(params, opt_state, BATCHES[0])
    assert_same_bits((loss, grads), (jax_loss, jax_grads))
    np.testing.assert_allclose(loss, loss_of(params, BATCHES[0]) + 2, rtol=1e-3)
    assert np.isnan(aux["logged"]) and int(aux["n"]) == 4
    assert loss.dtype == jnp.float32 and grads["a"].dtype == jnp.float16
    _, opt_state = tx.update(grads, opt_state, params)
    assert bool(mpopt.grads_finite(opt_state))


def test_value_and_grad_by_several_argnums():
    _, params, opt_state = start()
    loss, (grad_a, grad_x) = mpopt.value_and_grad(
        lambda a, b, x: loss_of({"a": a, "b": b}, x), argnums=(0, 2)
    )(params["a"], params["b"], jnp.asarray(BATCHES[0]), opt_state=opt_state)
    assert grad_a.shape == (4, 4) and grad_x.shape == (4,) and loss.shape == ()
    plain = jax.grad(lambda a: loss_of({"a": a, "b": params["b"]}, BATCHES[0]))(params["a"])
    np.testing.assert_allclose(
        np.float32(grad_a), INITIAL_SCALE * np.float32(plain), rtol=2e-3, atol=1e-2
    )
