"""Recipes for people who come from torch.amp or apex. Each is the code that the README shows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpopt

POLICY = mpopt.Policy(jnp.float16)
PARAMS_F32 = {
    "w": jnp.array(np.random.RandomState(0).randn(4, 4), jnp.float32),
    "b": jnp.array(np.random.RandomState(1).randn(4), jnp.float32),
}
X = np.random.RandomState(2).randn(4).astype(np.float16)
HUGE = (X * 1e4).astype(np.float16)


def model_loss(params, x):
    out = jnp.tanh(x @ params["w"].astype(x.dtype)) + params["b"].astype(x.dtype)
    return jnp.sum(jnp.square(out * jnp.max(jnp.abs(x))).astype(jnp.float32))


def start(inner, policy=POLICY, loss_scale=None):
    rule = mpopt.dynamic_loss_scale(1024.0) if loss_scale is None else loss_scale
    tx = mpopt.mixed_precision(inner, loss_scale=rule, policy=policy)
    return tx, policy.cast_to_param(PARAMS_F32), tx.init(PARAMS_F32)


def assert_same_bits(tree, other):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def assert_close(tree, other, rtol):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=rtol, atol=rtol)


def plain_step(inner):
    """A step of the float32 optimizer on the float32 gradients of the same model."""

    def step(params, state, x):
        grads = jax.grad(model_loss)(params, jnp.asarray(x, jnp.float32))
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def test_log_the_unscaled_gradient_norm():
    # torch: scaler.unscale_(optimizer); clip_grad_norm_ returns the norm.
    tx, params, opt_state = start(
        optax.sgd(0.1), loss_scale=mpopt.dynamic_loss_scale(1024.0, growth_interval=1)
    )

    @jax.jit
    def train_step(params, opt_state, x):
        loss, grads = mpopt.value_and_grad(model_loss)(params, x, opt_state=opt_state)
        grad_norm = optax.tree.norm(mpopt.unscale(grads, opt_state))  # before the update
        updates, opt_state = tx.update(grads, opt_state, params)  # takes the scaled ones
        return optax.apply_updates(params, updates), opt_state, loss, grad_norm

    true_norm = optax.tree.norm(jax.grad(model_loss)(PARAMS_F32, jnp.asarray(X, jnp.float32)))
    for _ in range(2):  # the scale doubles after the first step; the norm follows the params only
        old_params = params
        params, opt_state, _, grad_norm = train_step(params, opt_state, X)
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), old_params)
        true_norm = optax.tree.norm(jax.grad(model_loss)(wide, jnp.asarray(X, jnp.float32)))
        np.testing.assert_allclose(grad_norm, true_norm, rtol=1e-2)
    assert float(mpopt.loss_scale(opt_state)) == 4096
    *_, grad_norm = train_step(params, opt_state, HUGE)
    assert not np.isfinite(grad_norm)  # a skipped step shows


@pytest.mark.parametrize(
    "clip", [optax.clip(0.5), optax.clip_by_global_norm(1.0)], ids=["by value", "by norm"]
)
def test_clip_inside(clip):
    # torch: scaler.unscale_(optimizer); clip_grad_value_(...).
    inner = optax.chain(clip, optax.sgd(0.1, momentum=0.9))
    tx, params, opt_state = start(inner)

    grads = jax.grad(lambda p: mpopt.scale_loss(model_loss(p, X), opt_state))(params)
    updates, opt_state = jax.jit(tx.update)(grads, opt_state, params)
    params = optax.apply_updates(params, updates)

    expected, _ = plain_step(inner)(PARAMS_F32, inner.init(PARAMS_F32), X)
    assert_close(mpopt.master_params(opt_state, params), expected, 1e-2)
    unclipped, _ = plain_step(optax.sgd(0.1))(PARAMS_F32, optax.sgd(0.1).init(PARAMS_F32), X)
    assert np.abs(np.asarray(unclipped["b"] - expected["b"])).max() > 0.05


def test_gradient_penalty():
    # torch: autograd.grad(scaler.scale(loss), inputs, create_graph=True), divide by the scale,
    # add the penalty, scaler.scale(...).backward(). Here the inner gradient needs no scale of its
    # own where it stays in range; the whole objective is scaled once.
    tx, params, opt_state = start(optax.sgd(0.1))

    def objective(params, x):
        loss, input_grad = jax.value_and_grad(model_loss, argnums=1)(params, x)
        penalty = jnp.square(optax.tree.norm(input_grad.astype(jnp.float32)) - 1.0)
        return loss + 1e-3 * penalty

    @jax.jit
    def train_step(params, opt_state, x):
        loss, grads = mpopt.value_and_grad(objective)(params, x, opt_state=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, grads

    x32 = jnp.asarray(X, jnp.float32)
    expected_loss, expected = jax.value_and_grad(objective)(PARAMS_F32, x32)
    _, new_state, loss, grads = train_step(params, opt_state, X)
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-2)
    unscaled = mpopt.unscale(grads, opt_state)
    error = optax.tree.norm(optax.tree.sub(unscaled, expected)) / optax.tree.norm(expected)
    assert error < 0.02
    assert bool(mpopt.grads_finite(new_state))
    _, new_state, _, _ = train_step(params, opt_state, HUGE)
    assert float(mpopt.loss_scale(new_state)) == 512


def test_gradient_penalty_with_small_input_gradients_scales_the_inner_gradient_too():
    # Input gradients below float16's smallest value would vanish: scale the inner loss, then
    # divide in float32, as in the torch recipe.
    _, _, opt_state = start(optax.sgd(0.1))

    def small_loss(x):
        return jnp.sum(x * jnp.float16(1e-4)) * jnp.float16(1e-4)

    def penalty(x, scaled):
        if scaled:
            grad = jax.grad(lambda x: mpopt.scale_loss(small_loss(x), opt_state))(x)
            return optax.tree.norm(mpopt.unscale(grad, opt_state))
        return optax.tree.norm(jax.grad(small_loss)(x).astype(jnp.float32))

    assert float(penalty(jnp.ones(4, jnp.float16), scaled=False)) == 0
    np.testing.assert_allclose(penalty(jnp.ones(4, jnp.float16), scaled=True), 2e-8, rtol=1e-2)


def test_two_backward_passes_a_step():
    # torch: scaler.scale(loss0).backward(); scaler.scale(loss1).backward(); scaler.step().
    # Same opt_state, so same scale: the scaled gradients add up. Sum them in float32.
    tx, params, opt_state = start(optax.sgd(0.1))

    @jax.jit
    def train_step(params, opt_state, x0, x1):
        _, grads0 = mpopt.value_and_grad(model_loss)(params, x0, opt_state=opt_state)
        _, grads1 = mpopt.value_and_grad(model_loss)(params, x1, opt_state=opt_state)
        grads = jax.tree.map(lambda a, b: a.astype(jnp.float32) + b, grads0, grads1)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    new_params, new_state = train_step(params, opt_state, X, -X)
    total = jax.grad(lambda p: model_loss(p, jnp.asarray(X, jnp.float32)))(PARAMS_F32)
    other = jax.grad(lambda p: model_loss(p, jnp.asarray(-X, jnp.float32)))(PARAMS_F32)
    expected = jax.tree.map(lambda p, a, b: p - 0.1 * (a + b), PARAMS_F32, total, other)
    assert_close(mpopt.master_params(new_state, new_params), expected, 1e-2)

    skipped, new_state = train_step(params, opt_state, X, HUGE)  # one overflow skips the pair
    assert_same_bits(skipped, params)
    assert float(mpopt.loss_scale(new_state)) == 512


def test_accumulate_micro_batches_in_a_scan():
    # torch: k backward passes, then one scaler.step. An overflow in one skips the whole step.
    tx, params, opt_state = start(optax.adam(0.1))

    @jax.jit
    def train_step(params, opt_state, micro_batches):
        def add(total, x):
            _, grads = mpopt.value_and_grad(model_loss)(params, x, opt_state=opt_state)
            return jax.tree.map(lambda t, g: t + g / len(micro_batches), total, grads), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        grads, _ = jax.lax.scan(add, zeros, micro_batches)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    new_params, new_state = train_step(params, opt_state, np.stack([X, X, X, X]))
    expected, _ = plain_step(optax.adam(0.1))(PARAMS_F32, optax.adam(0.1).init(PARAMS_F32), X)
    assert_close(mpopt.master_params(new_state, new_params), expected, 1e-2)
    skipped, new_state = train_step(params, opt_state, np.stack([X, HUGE, X, X]))
    assert_same_bits(skipped, params)
    assert int(mpopt.metrics(new_state)["total_skips"]) == 1


def test_accumulate_over_calls_with_multisteps_inside():
    # An overflowing micro-batch is left out of its window instead of spoiling it.
    tx, params, opt_state = start(optax.MultiSteps(optax.sgd(0.1), 2))

    @jax.jit
    def train_step(params, opt_state, x):
        _, grads = mpopt.value_and_grad(model_loss)(params, x, opt_state=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    start_params = params
    for x in (X, HUGE):
        params, opt_state = train_step(params, opt_state, x)
        assert_same_bits(params, start_params)
    params, opt_state = train_step(params, opt_state, X)
    expected, _ = plain_step(optax.sgd(0.1))(PARAMS_F32, optax.sgd(0.1).init(PARAMS_F32), X)
    assert_close(mpopt.master_params(opt_state, params), expected, 1e-2)


def test_set_the_scale_by_hand():
    # torch: scaler.update(new_scale). A dynamic rule goes on from the value that is set, inside
    # its bounds.
    tx, params, opt_state = start(optax.sgd(0.1))
    step = jax.jit(tx.update)
    grads = jax.tree.map(jnp.ones_like, params)
    _, opt_state = step(grads, opt_state, params)

    opt_state = optax.tree.set(opt_state, loss_scale=jnp.float32(64.0))

    assert float(mpopt.loss_scale(opt_state)) == 64
    updates, opt_state = step(grads, opt_state, params)
    assert float(mpopt.loss_scale(opt_state)) == 64
    assert_close(updates["b"], -0.1 / 64 * np.ones(4), 2e-3)  # unscaled by the value that was set
    overflow = jax.tree.map(lambda p: p * jnp.inf, params)
    _, opt_state = step(overflow, opt_state, params)
    assert float(mpopt.loss_scale(opt_state)) == 32
    assert step._cache_size() == 1


def test_set_a_static_scale_by_hand_needs_a_new_rule():
    # A static rule says what the scale is, so a value set by hand lasts one step. Make the
    # transformation anew with another rule: the state stays.
    inner = optax.sgd(0.1, momentum=0.9)
    tx, params, opt_state = start(inner, loss_scale=mpopt.static_loss_scale(128.0))
    grads = jax.tree.map(jnp.ones_like, params)
    by_hand = optax.tree.set(opt_state, loss_scale=jnp.float32(64.0))
    _, by_hand = tx.update(grads, by_hand, params)
    assert float(mpopt.loss_scale(by_hand)) == 128

    tx = mpopt.mixed_precision(inner, loss_scale=mpopt.static_loss_scale(64.0), policy=POLICY)
    opt_state = optax.tree.set(opt_state, loss_scale=jnp.float32(64.0))

    for _ in range(2):
        _, opt_state = tx.update(grads, opt_state, params)
        assert float(mpopt.loss_scale(opt_state)) == 64


def test_set_the_scale_of_an_nnx_optimizer_by_hand():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    tx = mpopt.mixed_precision(optax.sgd(0.1), policy=POLICY)
    optim = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optim.opt_state.loss_scale_state.loss_scale[...] = 64.0
    assert float(mpopt.loss_scale(optim.opt_state)) == 64
    assert mpopt.loss_scale(optim.opt_state).dtype == jnp.float32


def test_drive_the_scale_from_outside_with_a_rule_that_leaves_it_alone():
    def init():
        return mpopt.LossScaleState(jnp.float32(128.0), 0, 1)

    tx, params, opt_state = start(
        optax.sgd(0.1), loss_scale=mpopt.LossScale(init, lambda state, grads_finite: state)
    )
    grads = jax.tree.map(jnp.ones_like, params)
    for scale in (64.0, 256.0):
        opt_state = optax.tree.set(opt_state, loss_scale=jnp.float32(scale))
        _, opt_state = tx.update(grads, opt_state, params)
        assert float(mpopt.loss_scale(opt_state)) == scale


def test_load_a_float32_checkpoint_in_the_middle_of_a_run():
    tx, params, opt_state = start(optax.sgd(0.1, momentum=0.9))
    step = jax.jit(tx.update)
    grads = jax.tree.map(jnp.ones_like, params)
    for _ in range(3):
        updates, opt_state = step(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    loaded_f32 = jax.tree.map(lambda p: p * 1.7 + 0.123456, PARAMS_F32)

    # Anew: exact float32 masters, fresh momentum; the loss scale carries over.
    fresh = tx.init(loaded_f32)
    fresh = fresh._replace(loss_scale_state=opt_state.loss_scale_state)
    loaded = POLICY.cast_to_param(loaded_f32)

    assert_same_bits(mpopt.master_params(fresh, loaded), loaded_f32)
    assert float(mpopt.loss_scale(fresh)) == float(mpopt.loss_scale(opt_state))
    updates, fresh = step(grads, fresh, loaded)
    assert step._cache_size() == 1
    expected = jax.tree.map(lambda p: p - 0.1 / 1024, loaded_f32)
    stepped = optax.apply_updates(loaded, updates)
    assert_close(mpopt.master_params(fresh, stepped), expected, 1e-6)

    # Or into params alone: the momentum stays, the masters become float32(params).
    updates, opt_state = step(grads, opt_state, loaded)
    stepped = optax.apply_updates(loaded, updates)
    assert_close(mpopt.master_params(opt_state, stepped), loaded_f32, 2e-3)


def test_load_float32_weights_and_keep_momentum_and_exact_masters():
    tx, params, opt_state = start(optax.sgd(0.1, momentum=0.9))
    grads = jax.tree.map(lambda p: jnp.full_like(p, 1024.0), params)
    updates, opt_state = tx.update(grads, opt_state, params)
    loaded_f32 = jax.tree.map(lambda p: p * 1.7 + 0.123456, PARAMS_F32)

    opt_state = optax.tree.set(opt_state, master_params=loaded_f32)
    params = POLICY.cast_to_param(loaded_f32)

    assert_same_bits(mpopt.master_params(opt_state, params), loaded_f32)
    zero_grads = jax.tree.map(jnp.zeros_like, params)
    updates, opt_state = tx.update(zero_grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    expected = jax.tree.map(lambda p: p - 0.1 * 0.9, loaded_f32)
    assert_close(mpopt.master_params(opt_state, params), expected, 1e-6)


def test_export_float32_weights():
    tx, params, opt_state = start(optax.adamw(1e-4))
    step = jax.jit(tx.update)
    for _ in range(5):
        updates, opt_state = step(jax.tree.map(jnp.ones_like, params), opt_state, params)
        params = optax.apply_updates(params, updates)

    weights = mpopt.master_params(opt_state, params)

    assert all(w.dtype == jnp.float32 for w in jax.tree.leaves(weights))
    assert_same_bits(POLICY.cast_to_param(weights), params)
    # What upcasting the float16 params would lose.
    assert (np.asarray(weights["w"]) != np.float32(params["w"])).mean() > 0.9
    outlives = jax.jit(tx.update, donate_argnums=1)
    outlives(jax.tree.map(jnp.ones_like, params), opt_state, params)
    assert np.isfinite(np.asarray(weights["w"])).all()


@pytest.mark.parametrize("inner", [optax.adamw(0.1), optax.MultiSteps(optax.sgd(0.1), 2)])
def test_the_same_code_trains_in_float32(inner):
    # torch: GradScaler(enabled=False).
    off = mpopt.Policy(jnp.float32)
    tx, params, opt_state = start(inner, policy=off, loss_scale=mpopt.static_loss_scale(1.0))
    plain = inner.gradient_transformation() if hasattr(inner, "has_updated") else inner

    def train_step(params, opt_state, x):
        loss, grads = mpopt.value_and_grad(model_loss)(
            params, off.cast_to_compute(x), opt_state=opt_state
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    expected, state = PARAMS_F32, plain.init(PARAMS_F32)
    for _ in range(4):
        params, opt_state, loss = train_step(params, opt_state, X)
        expected, state = plain_step(plain)(expected, state, X)
    assert loss.dtype == jnp.float32
    assert_same_bits(params, expected)
    assert_same_bits(opt_state.inner_state.inner_state, state)
    assert_same_bits(mpopt.master_params(opt_state, params), params)
    assert not jax.tree.leaves(opt_state.inner_state.master_params)


def test_repeat_the_batch_after_an_overflow():
    # apex#114: try the same batch again at the lower scale instead of leaving it out.
    tx, params, opt_state = start(optax.sgd(0.1), loss_scale=mpopt.dynamic_loss_scale(2.0**24))

    @jax.jit
    def train_step(params, opt_state, x):
        def attempt(carry):
            params, opt_state, tries = carry
            _, grads = mpopt.value_and_grad(model_loss)(params, x, opt_state=opt_state)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, tries + 1

        def again(carry):
            return ~mpopt.grads_finite(carry[1]) & (carry[2] < 20)

        return jax.lax.while_loop(again, attempt, attempt((params, opt_state, 0)))

    new_params, opt_state, tries = train_step(params, opt_state, X)
    assert 1 < int(tries) < 20 and bool(mpopt.grads_finite(opt_state))
    expected, _ = plain_step(optax.sgd(0.1))(PARAMS_F32, optax.sgd(0.1).init(PARAMS_F32), X)
    assert_close(mpopt.master_params(opt_state, new_params), expected, 1e-2)


def test_average_the_weights_in_float32():
    tx, params, opt_state = start(optax.sgd(1e-3))
    average = mpopt.master_params(opt_state, params)

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def train_step(params, opt_state, average, x):
        _, grads = mpopt.value_and_grad(model_loss)(params, x, opt_state=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        masters = mpopt.master_params(opt_state, params)
        moved = optax.incremental_update(masters, average, step_size=1e-2)
        return params, opt_state, mpopt.where_applied(opt_state, moved, average)

    for x in (X, X, HUGE, X):
        params, opt_state, average = train_step(params, opt_state, average, x)
    change = np.abs(np.asarray(average["b"] - PARAMS_F32["b"]))
    assert (change > 0).all() and (change < 5e-3).all()
    assert int(mpopt.metrics(opt_state)["total_skips"]) == 1
