"""Float32 masters: fidelity to float32 training, exact updates, edits, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    NUMPY_DTYPE,
    assert_same_bits,
    bits,
    both_dtypes,
    fill,
    jitted_step,
    numpy_cast,
    params_tree,
    random_bits,
)

import mpopt

OPTIMIZERS = {
    "sgd-momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(optax.linear_schedule(1e-2, 1e-3, 500), weight_decay=1e-2),
}
optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def assert_params_are_rounded_masters(params, masters, dtype):
    for param, master in zip(jax.tree.leaves(params), jax.tree.leaves(masters), strict=True):
        assert param.dtype == dtype
        np.testing.assert_array_equal(np.asarray(param), numpy_cast(master, dtype))


def start(inner, params_f32, dtype):
    """A jitted step of `with_master_params`, the narrow params and the state."""
    policy = mpopt.Policy(dtype)
    tx = mpopt.with_master_params(inner, policy=policy)
    return jitted_step(tx), policy.cast_to_param(params_f32), tx.init(params_f32)


# Fidelity to the float32 optimizer.


@both_dtypes
@optimizers
def test_equals_the_float32_optimizer_to_the_bit_op_by_op(optimizer, dtype):
    policy, inner = mpopt.Policy(dtype), optimizer()
    rule = mpopt.dynamic_loss_scale(2.0**10, growth_interval=4)
    tx = mpopt.mixed_precision(inner, loss_scale=rule, policy=policy)
    wide = params_tree()
    params, state, inner_state = policy.cast_to_param(wide), tx.init(wide), inner.init(wide)
    rng = np.random.RandomState(0)
    with jax.disable_jit():
        for i in range(20):
            scale = float(mpopt.loss_scale(state))
            grads = jax.tree.map(lambda p: jnp.array(rng.randn(*p.shape) * scale, dtype), params)  # noqa: B023 (called at once)
            if i in (7, 13):
                grads["b"] = grads["b"].at[1].set(jnp.inf)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            if i not in (7, 13):
                true = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)  # noqa: B023 (called at once)
                updates, inner_state = inner.update(true, inner_state, wide)
                wide = optax.apply_updates(wide, updates)
            masters = state.inner_state.master_params
            assert_same_bits(masters, wide)
            assert_same_bits(state.inner_state.inner_state, inner_state)
            assert_params_are_rounded_masters(params, masters, dtype)
    assert int(mpopt.metrics(state)["total_skips"]) == 2


@both_dtypes
@optimizers
def test_a_thousand_compiled_steps_stay_with_the_float32_optimizer(optimizer, dtype):
    policy, inner = mpopt.Policy(dtype), optimizer()
    rule = mpopt.dynamic_loss_scale(2.0**8, growth_interval=150, max_scale=2.0**12)
    tx = mpopt.mixed_precision(inner, loss_scale=rule, policy=policy)
    wide = params_tree()

    def narrow_grads(i, scale):
        noise = jax.tree.map(
            lambda p: jax.random.normal(jax.random.fold_in(jax.random.key(0), i), p.shape), wide
        )
        return jax.tree.map(lambda g: (g * scale).astype(dtype), noise)

    def mixed_step(carry, i):
        params, state = carry
        grads = narrow_grads(i, mpopt.loss_scale(state))
        updates, new_state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        masters = new_state.inner_state.master_params
        return (params, new_state), (mpopt.loss_scale(state), params, masters)

    def plain_step(carry, xs):
        wide, state = carry
        i, scale = xs
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, narrow_grads(i, scale))
        updates, state = inner.update(grads, state, wide)
        wide = optax.apply_updates(wide, updates)
        return (wide, state), wide

    steps = jnp.arange(1000)
    carry = policy.cast_to_param(wide), tx.init(wide)
    (_, state), (scales, params, masters) = jax.jit(
        lambda carry: jax.lax.scan(mixed_step, carry, steps)
    )(carry)
    (_, inner_state), expected = jax.jit(
        lambda carry: jax.lax.scan(plain_step, carry, (steps, scales))
    )((wide, inner.init(wide)))

    assert_params_are_rounded_masters(params, masters, dtype)
    assert len(np.unique(scales)) == 5  # 2^8 to 2^12
    for name in wide:
        error = np.abs(masters[name] - expected[name]).max(axis=0)
        np.testing.assert_array_less(error, 1e-6 * np.abs(expected[name]).max(axis=0))
    states = jax.tree.leaves(state.inner_state.inner_state), jax.tree.leaves(inner_state)
    for a, b in zip(*states, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [2_781, pytest.param(278_011, marks=pytest.mark.slow)])
def test_a_thousand_adam_steps_on_bfloat16_keep_the_bits_of_float32(size):
    # Megatron-LM and Transformer Engine, with 278,011 values. Op by op: compiled, two programs
    # contract multiply-adds differently.
    inner = optax.adam(1e-3)
    tx = mpopt.with_master_params(inner)
    rng = np.random.RandomState(0)
    params = jnp.asarray(rng.randn(size), jnp.bfloat16)
    wide = params.astype(jnp.float32)
    state, inner_state = tx.init(params), inner.init(wide)
    all_grads = jnp.asarray(rng.randn(8, size), jnp.bfloat16)
    for i in range(1000):
        grads = all_grads[i % 8]
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        updates, inner_state = inner.update(grads.astype(jnp.float32), inner_state, wide)
        wide = optax.apply_updates(wide, updates)
    assert_same_bits(state.master_params, wide)
    assert_same_bits(state.inner_state, inner_state)
    assert_params_are_rounded_masters(params, wide, jnp.bfloat16)


@both_dtypes
def test_keras_sgd(dtype):
    scale = 2.0**15 if dtype == jnp.bfloat16 else 2.0**10
    tx = mpopt.mixed_precision(optax.sgd(0.5), loss_scale=mpopt.static_loss_scale(scale))
    params = jnp.array([1.0, 2.0, 3.0, 4.0], dtype)
    grads = jnp.array([1.0, 6.0, 7.0, 2.0], dtype) * jnp.array(scale, dtype)
    params, _ = jitted_step(tx)(params, tx.init(params), grads)
    assert params.tolist() == [0.5, -1.0, -0.5, 3.0]


def test_fairseq_adam():
    tx = mpopt.mixed_precision(optax.adam(0.1), loss_scale=mpopt.static_loss_scale(4.0))
    params = {"w": jnp.array([3.0], jnp.float16), "b": jnp.array([5.0], jnp.float16)}
    params, state = jitted_step(tx)(params, tx.init(params), fill(params, -8.0))
    masters = mpopt.master_params(state, params)
    # fairseq's masters are 3.1 and 5.1; optax's own float32 Adam ends two ulps below.
    wide = {"w": jnp.float32([3.0]), "b": jnp.float32([5.0])}
    expected, _ = jitted_step(optax.adam(0.1))(wide, optax.adam(0.1).init(wide), fill(wide, -2.0))
    assert_same_bits(masters, expected)
    np.testing.assert_allclose([masters["w"][0], masters["b"][0]], [3.1, 5.1], rtol=2e-7)
    assert_same_bits(params, {"w": jnp.float16([3.1]), "b": jnp.float16([5.1])})
    assert [round(float(params[name][0]), 4) for name in "wb"] == [3.0996, 5.1016]


@both_dtypes
@optimizers
def test_torch_three_finite_steps_and_a_skipped_one_equal_a_control_without_it(optimizer, dtype):
    rule = mpopt.dynamic_loss_scale(128.0, growth_interval=1)
    tx = mpopt.mixed_precision(optimizer(), loss_scale=rule)
    control = mpopt.with_master_params(optimizer())
    params = other = params_tree(dtype)
    state, other_state = tx.init(params), control.init(params)
    step, control_step = jitted_step(tx), jitted_step(control)
    for gradient, scale in [(1.0, 128), (-0.5, 256), (jnp.inf, 512), (0.25, 256)]:
        assert float(mpopt.loss_scale(state)) == scale
        params, state = step(params, state, fill(params, gradient * scale))
        if np.isfinite(gradient):
            other, other_state = control_step(other, other_state, fill(other, gradient))
    assert float(mpopt.loss_scale(state)) == 512
    assert_same_bits(params, other)
    # Two compiled programs: multiply-adds may contract differently, by an ulp.
    for a, b in zip(jax.tree.leaves(state.inner_state), jax.tree.leaves(other_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@both_dtypes
def test_steps_below_half_an_ulp_add_up(dtype):
    # optax#1444. 2^-15 is less than half an ulp of 1 in both formats.
    step, params, state = start(optax.sgd(2.0**-15), {"w": jnp.ones(3)}, dtype)
    for _ in range(512):
        params, state = step(params, state, fill(params, -1.0))
    np.testing.assert_array_equal(state.master_params["w"], np.float32(1 + 2.0**-6))
    assert_params_are_rounded_masters(params, state.master_params, dtype)


def test_float16_gradients_and_inner_state_are_float32():
    seen = {}

    def update(updates, state, params=None):
        seen.update(grads=updates, params=params)
        return updates, state

    tx = mpopt.with_master_params(
        optax.chain(optax.GradientTransformation(lambda p: (), update), optax.adam(1e-3))
    )
    params = {"half": jnp.ones(2, jnp.float16), "bf16": jnp.ones(2, jnp.bfloat16)}
    state = tx.init(params)
    _, new_state = jax.jit(tx.update)(fill(params, 1.0), state, params)
    for tree in (seen["grads"], seen["params"]):
        assert {x.dtype.name for x in jax.tree.leaves(tree)} == {"float32"}
    for leaf in jax.tree.leaves((state, new_state)):
        assert leaf.dtype in (jnp.float32, jnp.int32)


# The update that apply_updates can add.


def set_to(targets):
    """An optimizer that brings params to `targets`, up to the rounding of a float32 sum."""
    return optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda updates, state, params: (jax.tree.map(jnp.subtract, targets, params), state),
    )


def limit_of_additive_updates(param, target, dtype):
    """Where no float32 update gives the target (DESIGN, "Updates")."""
    param, target = np.abs(np.float32(param)), np.abs(np.float32(target))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        ratio = param / target
    if dtype == jnp.float16:
        return (ratio >= 8196) & (param >= 1)
    smallest = np.finfo(np.float32).smallest_normal
    subnormal = ((target < smallest) & (target > 0)) | ((param < smallest) & (param > 0))
    return (ratio >= 65793) | subnormal


@both_dtypes
def test_update_moves_params_to_the_rounded_master(dtype):
    name = NUMPY_DTYPE[jnp.dtype(dtype).name]
    old = random_bits(0, 100_000, name).astype(np.float32)
    targets = random_bits(1, 100_000).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.float32(old * np.random.RandomState(2).uniform(0.2, 3.0, old.size))
    targets = np.where(np.arange(old.size) % 2, targets, near)
    usable = np.isfinite(old) & np.isfinite(targets) & (np.abs(targets) < 1e38)
    usable &= np.abs(old) < 1e38
    old, targets = old[usable], targets[usable]
    step, params, state = start(set_to(jnp.asarray(targets)), jnp.asarray(old), dtype)
    new, state = step(params, state, jnp.zeros_like(params))
    expected = numpy_cast(state.master_params, dtype).astype(np.float32)
    limited = limit_of_additive_updates(params, expected, dtype)
    new = np.asarray(new, np.float32)
    np.testing.assert_array_equal(new[~limited], expected[~limited])
    assert np.count_nonzero(~limited) > 50_000
    error = np.abs(new - expected)[limited]
    bound = np.abs(np.float32(params))[limited] * 2.0**-24 + np.finfo(np.float32).smallest_normal
    np.testing.assert_array_less(error, bound * (1 + 2.0**-10))


@both_dtypes
def test_saturated_params_stay_finite_and_recover(dtype):
    largest = float(jnp.finfo(dtype).max)
    beyond = np.float32(largest) * np.float32(1.001)
    step, params, state = start(optax.sgd(1.0), jnp.array([beyond, -beyond, 0.0]), dtype)
    assert params.astype(jnp.float32).tolist() == [largest, -largest, 0.0]
    # Staying there is no edit: the master goes on beyond the range of params.
    zero = jnp.zeros(3, dtype)
    params, state = step(params, state, zero)
    assert params.astype(jnp.float32).tolist() == [largest, -largest, 0.0]
    np.testing.assert_array_equal(state.master_params, np.float32([beyond, -beyond, 0.0]))
    back = jnp.array([largest / 2, -largest / 2, 0.0], dtype)
    params, state = step(params, state, back)
    expected = np.float32([beyond, -beyond, 0]) - np.asarray(back, np.float32)
    np.testing.assert_array_equal(state.master_params, expected)
    np.testing.assert_array_equal(np.asarray(params), numpy_cast(expected, dtype))


def test_float32_params_keep_the_inner_update_untouched():
    inner = optax.adam(1e-3)
    params = params_tree()
    tx = mpopt.with_master_params(inner)
    state = tx.init(params)
    assert jax.tree.leaves(state.master_params) == []
    grads = fill(params, 0.3)
    updates, _ = jax.jit(tx.update)(grads, state, params)
    expected, _ = jax.jit(inner.update)(grads, inner.init(params), params)
    assert_same_bits(updates, expected)


@both_dtypes
def test_masters_are_exact_copies_of_float32_params_and_upcasts_of_narrow_ones(dtype):
    wide = params_tree()
    policy = mpopt.Policy(dtype)
    tx = mpopt.with_master_params(optax.sgd(0.1), policy=policy)
    assert_same_bits(tx.init(wide).master_params, wide)
    narrow = policy.cast_to_param(wide)
    upcast = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    assert_same_bits(tx.init(narrow).master_params, upcast)
    assert_same_bits(mpopt.with_master_params(optax.sgd(0.1)).init(narrow).master_params, upcast)


# Edited params.


@both_dtypes
def test_random_masters_are_never_taken_for_edited(dtype):
    wide = random_bits(5, 500_000)
    wide = wide[np.isfinite(wide) & (np.abs(wide) >= np.finfo(np.float32).smallest_normal)]
    step, params, state = start(optax.sgd(0.1), jnp.asarray(wide), dtype)
    params, state = step(params, state, jnp.zeros_like(params))
    np.testing.assert_array_equal(bits(state.master_params), bits(wide))


@both_dtypes
def test_edit_by_one_ulp_is_kept(dtype):
    values = np.arange(2**16, dtype=np.uint16).view(NUMPY_DTYPE[jnp.dtype(dtype).name])
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(values.astype(np.float32))
        smallest = 0 if dtype == jnp.float16 else 2.0**-117  # one ulp is a normal number
        values = values[finite & (np.abs(values.astype(np.float32)) >= smallest)]
    values = values[values != np.max(values)]
    edited = (values.view(np.uint16) + 1).view(values.dtype)  # one ulp further from zero
    keep = np.isfinite(edited.astype(np.float32))
    values, edited = values[keep], edited[keep]
    # Masters somewhere inside the interval that rounds to the param.
    wide = values.astype(np.float32)
    wide = np.where(np.arange(wide.size) % 2, wide, wide * np.float32(1 + 2.0**-14))
    step, params, state = start(optax.sgd(0.1), jnp.asarray(wide), dtype)
    np.testing.assert_array_equal(np.asarray(params, np.float32), values.astype(np.float32))
    new, state = step(jnp.asarray(edited), state, jnp.zeros_like(params))
    np.testing.assert_array_equal(np.asarray(new), edited)
    np.testing.assert_array_equal(state.master_params, edited.astype(np.float32))


@both_dtypes
def test_decay_by_hand_is_kept(dtype):
    step, params, state = start(optax.sgd(0.1), params_tree(), dtype)
    before = state.master_params
    for _ in range(20):
        decayed = jax.tree.map(lambda p: p * jnp.array(0.999, p.dtype), params)
        params, state = step(decayed, state, fill(params, 0.0))
        assert_same_bits(params, decayed)
        for name in params:
            p, m = np.float32(decayed[name]), np.float32(before[name])
            expected = np.where(p != np.float32(numpy_cast(m, dtype)), p, m)
            np.testing.assert_array_equal(state.master_params[name], expected)
        before = state.master_params


@both_dtypes
def test_pruned_params_start_from_zero(dtype):
    wide = params_tree()
    step, params, state = start(optax.sgd(0.1), wide, dtype)
    pruned = jax.tree.map(lambda p: p.at[::2].set(0), params)
    new, _ = step(pruned, state, fill(params, 0.0))
    assert_same_bits(new, pruned)
    new, state = step(pruned, state, fill(params, 1.0))
    for name in wide:
        np.testing.assert_array_equal(state.master_params[name][::2], -np.float32(0.1))
        np.testing.assert_allclose(state.master_params[name][1::2], wide[name][1::2] - 0.1, 1e-6)
    assert_params_are_rounded_masters(new, state.master_params, dtype)


@both_dtypes
def test_loaded_weights_survive_the_next_step(dtype):
    # DeepSpeed#4141: stale masters overwrite loaded weights.
    step, params, state = start(optax.sgd(0.5), params_tree(), dtype)
    params, state = step(params, state, fill(params, 0.25))
    loaded = params_tree(dtype, seed=9)
    new, state = step(loaded, state, fill(params, 0.25))
    expected = jax.tree.map(lambda p: np.float32(p) - np.float32(0.125), loaded)
    for name in loaded:
        np.testing.assert_array_equal(state.master_params[name], expected[name])
    assert_params_are_rounded_masters(new, expected, dtype)


@both_dtypes
def test_edit_before_a_skipped_step_survives_to_the_next_applied_one(dtype):
    tx = mpopt.mixed_precision(optax.sgd(0.5), loss_scale=mpopt.static_loss_scale(4.0))
    params = params_tree(dtype)
    state = tx.init(params)
    step = jitted_step(tx)
    edited = params_tree(dtype, seed=3)
    for _ in range(2):
        new, new_state = step(edited, state, fill(params, jnp.nan))
        assert_same_bits(new, edited)
        assert_same_bits(new_state.inner_state, state.inner_state)
        state = new_state
    new, state = step(edited, state, fill(params, 1.0))
    for name in edited:
        expected = np.float32(edited[name]) - np.float32(0.125)
        np.testing.assert_array_equal(state.inner_state.master_params[name], expected)
    assert_params_are_rounded_masters(new, state.inner_state.master_params, dtype)


def test_edit_of_one_element_leaves_the_other_masters():
    wide = params_tree()
    step, params, state = start(optax.sgd(0.1), wide, jnp.float16)
    edited = params | {"b": params["b"].at[2].set(7.0)}
    _, state = step(edited, state, fill(params, 0.0))
    assert_same_bits(state.master_params, wide | {"b": wide["b"].at[2].set(7.0)})


@both_dtypes
def test_param_that_is_not_finite_is_no_edit(dtype):
    wide = params_tree()
    step, params, state = start(optax.sgd(0.1), wide, dtype)
    broken = params | {"b": params["b"].at[0].set(jnp.nan).at[1].set(jnp.inf)}
    _, state = step(broken, state, fill(params, 0.0))
    assert_same_bits(state.master_params, wide)


# Derivatives through the update.


@both_dtypes
@pytest.mark.parametrize("scaled", [False, True], ids=["masters", "with loss scale"])
def test_meta_gradient_through_the_update(dtype, scaled):
    params = {"w": jnp.array([1.0, -2.0, 3.0], dtype)}
    grads = {"w": jnp.array([0.5, 0.25, -1.0], dtype)}

    def outer_loss(learning_rate, grads):
        inner = optax.sgd(learning_rate)
        if scaled:
            tx = mpopt.mixed_precision(inner, loss_scale=mpopt.static_loss_scale(1.0))
        else:
            tx = mpopt.with_master_params(inner)
        updates, _ = tx.update(grads, tx.init(params), params)
        new = optax.apply_updates(params, updates)["w"].astype(jnp.float32)
        return jnp.sum(new**2)

    by_rate, by_grads = jax.jit(jax.grad(outer_loss, argnums=(0, 1)))(0.125, grads)
    new = np.float32(params["w"]) - 0.125 * np.float32(grads["w"])  # exact in 16 bits
    np.testing.assert_allclose(by_rate, -np.sum(2 * new * np.float32(grads["w"])), rtol=1e-2)
    np.testing.assert_allclose(np.float32(by_grads["w"]), -0.25 * new, rtol=1e-2)


# Refusals.


def masters_of(params, policy=None, inner=None):
    tx = mpopt.with_master_params(optax.sgd(0.1) if inner is None else inner, policy=policy)
    return tx, tx.init(params)


def test_missing_params_are_refused():
    params = params_tree(jnp.float16)
    for make in (mpopt.with_master_params, mpopt.mixed_precision):
        tx = make(optax.sgd(0.1))
        with pytest.raises(ValueError, match=r"needs the params: call tx.update\(grads, opt_state"):
            tx.update(params, tx.init(params))


@both_dtypes
def test_cast_after_init_without_policy_is_refused(dtype):
    tx, state = masters_of({"net": {"w": jnp.ones(2)}})
    params = {"net": {"w": jnp.ones(2, dtype)}}
    message = (
        rf"params leaf 'net/w' is {jnp.dtype(dtype).name}, but has no float32 master: it was wide"
        r" when tx.init saw it. Pass policy= and call tx.init with float32 params"
    )
    with pytest.raises(ValueError, match=message):
        jax.jit(tx.update)(params, state, params)


@both_dtypes
@pytest.mark.parametrize("with_policy", [False, True])
def test_params_made_by_p_plus_u_are_refused(dtype, with_policy):
    params = {"net": [jnp.ones(2, dtype)]}
    tx, state = masters_of(params, mpopt.Policy(dtype) if with_policy else None)
    updates, state = tx.update(params, state, params)
    by_hand = jax.tree.map(lambda p, u: p + u, params, updates)
    expected = jnp.dtype(dtype).name if with_policy else "float16 or bfloat16"
    message = (
        rf"params leaf 'net/0' is float32, but it has a float32 master and must arrive in "
        rf"{expected}. .*policy.cast_to_param.*optax.apply_updates\(params, updates\), not with p"
    )
    with pytest.raises(ValueError, match=message):
        tx.update(params, state, by_hand)


def test_params_in_the_other_16_bit_dtype_are_refused_by_the_policy():
    tx, state = masters_of({"w": jnp.ones(2)}, mpopt.Policy(jnp.float16))
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    with pytest.raises(ValueError, match="'w' is bfloat16, .* must arrive in float16"):
        tx.update(params, state, params)
    tx, state = masters_of({"w": jnp.ones(2)}, mpopt.Policy(jnp.bfloat16))
    with pytest.raises(ValueError, match="'w' is float16, .* must arrive in bfloat16"):
        tx.update({"w": params["w"]}, state, {"w": jnp.ones(2, jnp.float16)})


def test_kept_leaf_given_narrow_is_refused_at_init():
    policy = mpopt.Policy(jnp.float16, keep_float32="norm")
    params = {"norm": {"scale": jnp.ones(2, jnp.float16)}, "w": jnp.ones(2, jnp.float16)}
    message = (
        "params leaf 'norm/scale' is float16, but the policy keeps it in float32. Call tx.init "
        r"with float32 params, and give the model policy.cast_to_param\(params\)"
    )
    for make in (mpopt.with_master_params, mpopt.mixed_precision):
        with pytest.raises(ValueError, match=message):
            make(optax.sgd(0.1), policy=policy).init(params)


def test_kept_leaf_given_narrow_is_refused_at_update():
    policy = mpopt.Policy(jnp.float16, keep_float32="norm")
    tx, state = masters_of({"norm": jnp.ones(2), "w": jnp.ones(2)}, policy)
    params = {"norm": jnp.ones(2, jnp.float16), "w": jnp.ones(2, jnp.float16)}
    with pytest.raises(ValueError, match="'norm' is float16, but has no float32 master"):
        tx.update(params, state, params)


def test_leaf_of_another_16_bit_dtype_than_the_policy_is_refused_at_init():
    with pytest.raises(ValueError, match="leaf 'w' is bfloat16, but the policy keeps it in float1"):
        masters_of({"w": jnp.ones(2, jnp.bfloat16)}, mpopt.Policy(jnp.float16))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_float8_leaf_is_refused(dtype):
    params = {"net": {"w": jnp.ones(2, dtype)}}
    message = (
        f"params leaf 'net/w' has dtype {jnp.dtype(dtype).name}: floats under 16 bits cannot be "
        "trained by adding updates. Keep it in float16, bfloat16 or float32 and quantise inside"
    )
    for make in (mpopt.with_master_params, mpopt.mixed_precision):
        with pytest.raises(ValueError, match=message):
            make(optax.sgd(0.1)).init(params)


def test_masters_of_another_shape_are_refused():
    tx, state = masters_of({"w": jnp.ones(2, jnp.float16)})
    params = {"w": jnp.ones(3, jnp.float16)}
    message = r"params leaf 'w' has shape \(3,\), its master in opt_state has \(2,\). Call tx.init"
    with pytest.raises(ValueError, match=message):
        tx.update(params, state, params)


def test_state_of_other_params_is_refused():
    tx, state = masters_of({"w": jnp.ones(2, jnp.float16)})
    params = {"w": jnp.ones(2, jnp.float16), "b": jnp.ones(1, jnp.float16)}
    message = "master params in opt_state do not match the params: leaf 'b' is missing from the"
    with pytest.raises(ValueError, match=message):
        tx.update(params, state, params)


def test_inner_that_drops_a_leaf_is_refused():
    def drop(updates, state, params=None):
        return {"w": updates["w"]}, state

    params = params_tree(jnp.float16)
    inner = optax.GradientTransformation(lambda params: optax.EmptyState(), drop)
    tx, state = masters_of(params, inner=inner)
    with pytest.raises(ValueError, match="updates of the inner optimizer do not match.*'b' is mis"):
        tx.update(params, state, params)


@pytest.mark.parametrize("inner", [None, 0.1, optax.adam, {"lr": 1}])
def test_inner_that_is_no_optimizer_is_refused(inner):
    for make in (mpopt.with_master_params, mpopt.mixed_precision):
        with pytest.raises(ValueError, match="inner must be an optax optimizer, got"):
            make(inner)


def widening(params):
    """An optimizer whose state turns from bfloat16 to float32 at the first update."""
    return optax.GradientTransformation(
        lambda params: {"trace": jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)},
        lambda updates, state, params=None: (updates, {"trace": updates}),
    )


@pytest.mark.parametrize(
    "make",
    [mpopt.with_master_params, lambda i: mpopt.with_loss_scale(i, mpopt.static_loss_scale(1))],
)
def test_inner_state_that_changes_its_dtype_is_refused(make):
    params = {"w": jnp.ones(2)}
    tx = make(widening(params))
    message = (
        r"turns its state leaf 'trace/w' from bfloat16\[2\] into float32\[2\]. Give the inner "
        "optimizer explicit dtypes"
    )
    with pytest.raises(ValueError, match=message):
        jax.jit(tx.update)(params, tx.init(params), params)


def test_inner_state_that_changes_its_structure_is_refused():
    inner = optax.GradientTransformation(
        lambda params: (), lambda updates, state, params=None: (updates, (jnp.ones(1),))
    )
    tx, state = masters_of({"w": jnp.ones(2)}, inner=inner)
    with pytest.raises(ValueError, match="changes the structure of its state from"):
        tx.update({"w": jnp.ones(2)}, state, {"w": jnp.ones(2)})


@pytest.mark.parametrize("policy", [jnp.float16, "float16", {"param_dtype": jnp.float16}])
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(ValueError, match=r"policy must be an mpopt\.Policy, got "):
        mpopt.mixed_precision(optax.sgd(0.1), policy=policy)
