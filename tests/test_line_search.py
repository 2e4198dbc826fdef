"""Line searches inside: they get true values, unscaled gradients and float32 masters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import both_dtypes

import mpopt

TARGET = {"w": jnp.array([1.5, -0.75, 3.0]), "b": jnp.array(0.25)}
WEIGHTS = {"w": jnp.array([1.0, 10.0, 3.0]), "b": jnp.array(5.0)}
SEARCHES = {
    "lbfgs": lambda: optax.lbfgs(),
    "scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(20)
    ),
    "scale_by_backtracking_linesearch, gradient kept": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(20, store_grad=True)
    ),
    "scale_by_zoom_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_zoom_linesearch(20, initial_guess_strategy="one")
    ),
}


def loss_fn(params):
    errors = jax.tree.map(lambda p, t: jnp.asarray(p, jnp.float32) - t, params, TARGET)
    return sum(jnp.sum(WEIGHTS[name] * errors[name] ** 2) for name in WEIGHTS)


@both_dtypes
@pytest.mark.parametrize("name", SEARCHES)
def test_line_search_converges_on_narrow_params_in_one_trace(name, dtype):
    policy = mpopt.Policy(dtype)
    rule = mpopt.dynamic_loss_scale(1024.0)
    tx = mpopt.mixed_precision(SEARCHES[name](), loss_scale=rule, policy=policy)
    params_f32 = jax.tree.map(jnp.zeros_like, TARGET)
    params, opt_state = policy.cast_to_param(params_f32), tx.init(params_f32)

    @jax.jit
    def step(params, opt_state, overflow):
        value, grads = mpopt.value_and_grad(loss_fn)(params, opt_state=opt_state)
        grads["w"] = jnp.where(overflow, jnp.inf, grads["w"])
        updates, opt_state = tx.update(
            grads, opt_state, params, value=value, grad=grads, value_fn=loss_fn
        )
        return optax.apply_updates(params, updates), opt_state

    for count in range(40):
        params, opt_state = step(params, opt_state, count == 3)
    one_ulp = float(jnp.finfo(dtype).eps)
    for leaf, target in zip(jax.tree.leaves(params), jax.tree.leaves(TARGET), strict=True):
        np.testing.assert_allclose(np.float32(leaf), target, rtol=one_ulp)
    assert mpopt.metrics(opt_state)["total_skips"] == 1
    assert step._cache_size() == 1


def test_polyak_sgd_gets_the_true_value_and_converges():
    params_f32 = {"w": jnp.array(np.random.RandomState(0).randn(4, 3), jnp.float32)}

    def squared_norm(params):
        return 0.5 * jnp.sum(jnp.asarray(params["w"], jnp.float32) ** 2)

    policy = mpopt.Policy(jnp.float16)
    tx = mpopt.mixed_precision(optax.polyak_sgd(), policy=policy)
    params, opt_state = policy.cast_to_param(params_f32), tx.init(params_f32)
    for _ in range(20):
        value, grads = mpopt.value_and_grad(squared_norm)(params, opt_state=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params, value=value)
        params = optax.apply_updates(params, updates)
    assert float(squared_norm(params)) < 1e-3 * float(squared_norm(params_f32))
