"""Every optimizer that optax exports, wrapped: against the same optimizer in float32."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import mpopt

pytestmark = pytest.mark.filterwarnings("ignore:.optimistic_adam. is deprecated")

DTYPES = [jnp.float16, jnp.bfloat16]
SKIPPED = (5, 12)
STEPS = 20
PARAMS_F32 = {
    "dense": {"kernel": jnp.array(np.random.RandomState(0).randn(4, 3), jnp.float32)},
    "bias": jnp.array(np.random.RandomState(1).randn(3), jnp.float32),
    "norm": {"scale": jnp.array(np.random.RandomState(2).rand(3) + 0.5, jnp.float32)},
}


def squared_norm(params):
    return 0.5 * sum(jnp.sum(jnp.asarray(p, jnp.float32) ** 2) for p in jax.tree.leaves(params))


# What an optimizer needs beside its defaults; a learning rate is given to all that require one.
ARGUMENTS = {
    "cocob": {"learning_rate": 1.0},
    "noisy_sgd": {"key": jax.random.key(0)},
}
OTHERS = {  # without a learning_rate, or around another optimizer
    "polyak_sgd": lambda: optax.polyak_sgd(),
    "mechanize": lambda: optax.contrib.mechanize(optax.sgd(0.1)),
    "sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    "reduce_on_plateau": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
}
# The arguments that update gets, made from the float32 params; gradients come in unscaled.
VALUE = {"polyak_sgd", "momo", "momo_adam", "reduce_on_plateau"}
EXCEPTIONS = {
    "lbfgs": "its line search needs true values and gradients: its own test below",
    "dpsgd": "takes gradients of single examples, with another shape than the params",
    "lookahead": "its gradients have another structure than its params: refused, tested below",
}


def exported():
    """Finds the optimizers: public factories with a learning rate, and those named in OTHERS."""
    found = {}
    for module in (optax, optax.contrib):
        for name, factory in vars(module).items():
            if not inspect.isfunction(factory) or name.startswith(("_", "scale_by_", "inject_")):
                continue
            signature = inspect.signature(factory)
            makes_one = "GradientTransformation" in str(signature.return_annotation)
            if makes_one and "learning_rate" in signature.parameters:
                found[name] = factory
    return found


def make(name):
    if name in OTHERS:
        return OTHERS[name]()
    factory = exported()[name]
    parameter = inspect.signature(factory).parameters["learning_rate"]
    arguments = dict(ARGUMENTS.get(name, {}))
    if parameter.default is inspect.Parameter.empty or parameter.default is None:
        arguments.setdefault("learning_rate", 0.05)
    return factory(**arguments)


NAMES = sorted((set(exported()) | set(OTHERS)) - set(EXCEPTIONS))


def extra_args(name, params_f32, step):
    if name in VALUE:
        return {"value": squared_norm(params_f32) + 0.1 * step}
    return {}


def gradients(dtype):
    """Random gradients times the scale, in the dtypes of the params; two steps overflow."""
    random = np.random.RandomState(7)
    result = []
    for step in range(STEPS):
        grads = jax.tree.map(
            lambda p: jnp.asarray(random.randn(*p.shape) * 2.0**6, jnp.float32), PARAMS_F32
        )
        narrow = {**jax.tree.map(lambda g: g.astype(dtype), grads), "norm": grads["norm"]}
        if step in SKIPPED:
            narrow["bias"] = narrow["bias"].at[1].set(jnp.nan if step % 2 else jnp.inf)
        result.append(narrow)
    return result


def run(name, dtype, compiled):
    """Runs the wrapped optimizer and its float32 control on the same unscaled gradients."""
    inner = make(name)
    policy = mpopt.Policy(dtype, keep_float32="norm")
    rule = mpopt.dynamic_loss_scale(2.0**6, growth_interval=4)
    tx = mpopt.mixed_precision(inner, loss_scale=rule, policy=policy)
    control = optax.with_extra_args_support(inner)
    update, control_update = tx.update, control.update
    if name == "sophia":  # estimates curvature from the loss itself
        update = partial(update, obj_fn=squared_norm)
        control_update = partial(control_update, obj_fn=squared_norm)
    if compiled:
        update, control_update = jax.jit(update), jax.jit(control_update)

    opt_state, params = tx.init(PARAMS_F32), policy.cast_to_param(PARAMS_F32)
    control_params = jax.tree.map(jnp.copy, PARAMS_F32)
    control_state = control.init(control_params)
    for step, grads in enumerate(gradients(dtype)):
        extra = extra_args(name, control_params, step)
        unscaled = mpopt.unscale(grads, opt_state)
        updates, opt_state = update(grads, opt_state, params, **extra)
        params = optax.apply_updates(params, updates)
        assert bool(mpopt.grads_finite(opt_state)) == (step not in SKIPPED)
        if step not in SKIPPED:
            updates, control_state = control_update(
                unscaled, control_state, control_params, **extra
            )
            control_params = optax.apply_updates(control_params, updates)
    return params, opt_state, control_params, control_state


def compare(name, dtype, compiled, rtol):
    params, opt_state, control_params, control_state = run(name, dtype, compiled)
    masters = mpopt.master_params(opt_state, params)
    inner_state = opt_state.inner_state.inner_state
    ours = jax.tree.leaves((masters, inner_state))
    theirs = jax.tree.leaves((control_params, control_state))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if rtol == 0 or not jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_array_equal(as_bits(a), as_bits(b))
        else:
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max(initial=1e-6))
    expected = mpopt.Policy(dtype, keep_float32="norm").cast_to_param(masters)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(as_bits(a), as_bits(b))


def as_bits(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}") if x.dtype.kind != "b" else x


def test_every_exported_optimizer_is_in_the_table():
    assert len(exported()) >= 40
    assert set(EXCEPTIONS) <= set(exported()) | {"lookahead"}


@pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_masters_and_state_equal_float32_to_the_bit_op_by_op(name, dtype):
    compare(name, dtype, compiled=False, rtol=0)


# Compiled, XLA contracts multiply-adds differently in two programs. Relative to the largest
# element of the leaf; methods that divide by norms or by small second moments carry it further.
RTOL = 2e-6
WIDER_RTOL = {}


@pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_masters_and_state_stay_within_ulps_of_float32_compiled(name, dtype):
    compare(name, dtype, compiled=True, rtol=WIDER_RTOL.get(name, RTOL))


@pytest.mark.parametrize("dtype", DTYPES, ids=["float16", "bfloat16"])
def test_lbfgs_with_a_line_search_converges_on_narrow_params(dtype):
    target = {"w": jnp.array([1.5, -0.75, 3.0]), "b": jnp.array(0.25)}
    weights = {"w": jnp.array([1.0, 10.0, 3.0]), "b": jnp.array(5.0)}

    def loss_fn(params):
        errors = jax.tree.map(lambda p, t: jnp.asarray(p, jnp.float32) - t, params, target)
        return sum(jnp.sum(w * errors[k] ** 2) for k, w in weights.items())

    policy = mpopt.Policy(dtype)
    tx = mpopt.mixed_precision(
        optax.lbfgs(), loss_scale=mpopt.static_loss_scale(8.0), policy=policy
    )
    params_f32 = jax.tree.map(jnp.zeros_like, target)
    params, opt_state = policy.cast_to_param(params_f32), tx.init(params_f32)

    @jax.jit
    def step(params, opt_state):
        value, grads = mpopt.value_and_grad(loss_fn)(params, opt_state=opt_state)
        # The line search works on the float32 masters, with true values.
        updates, opt_state = tx.update(
            grads, opt_state, params, value=value, grad=grads, value_fn=loss_fn
        )
        return optax.apply_updates(params, updates), opt_state

    for _ in range(15):
        params, opt_state = step(params, opt_state)
    for name, leaf in params.items():
        one_ulp = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(jnp.asarray(leaf, jnp.float32), target[name], rtol=one_ulp)
    assert step._cache_size() == 1


def test_polyak_sgd_gets_the_true_value_and_converges():
    policy = mpopt.Policy(jnp.float16)
    tx = mpopt.mixed_precision(optax.polyak_sgd(), policy=policy)
    params, opt_state = policy.cast_to_param(PARAMS_F32), tx.init(PARAMS_F32)
    for _ in range(20):
        value, grads = mpopt.value_and_grad(squared_norm)(params, opt_state=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params, value=value)
        params = optax.apply_updates(params, updates)
    assert float(squared_norm(params)) < 1e-3 * float(squared_norm(PARAMS_F32))


def test_lookahead_inside_is_refused_by_name():
    # Its params are two trees, its gradients one.
    inner = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
    tx = mpopt.mixed_precision(inner)
    params = optax.LookaheadParams.init_synced({"w": jnp.ones(2, jnp.float16)})
    with pytest.raises(ValueError, match="fast/w.*missing from the gradients"):
        tx.update({"w": jnp.ones(2, jnp.float16)}, tx.init(params), params)
