"""Loss scaling: scaled losses, unscaled gradients, skipped steps."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, both_dtypes, fill, jitted_step, params_tree

import mpopt


def scale_only(scale, inner=None):
    """A `with_loss_scale` of a fixed scale, and its state for one scalar param."""
    tx = mpopt.with_loss_scale(
        optax.sgd(0.5) if inner is None else inner, mpopt.static_loss_scale(scale)
    )
    return tx, tx.init(jnp.float32(0.0))


STATE = scale_only(1024.0)[1]


# scale_loss


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_loss_keeps_its_value_and_gets_a_scaled_gradient(dtype, run):
    x = jnp.array([0.1, 0.25, -3.0], dtype)

    def loss_fn(x, state):
        return mpopt.scale_loss(jnp.sum(x**2), state)

    value, grad = run(jax.value_and_grad(loss_fn))(x, STATE)
    plain_value, plain_grad = run(jax.value_and_grad(lambda x: jnp.sum(x**2)))(x)
    assert value.dtype == jnp.float32
    assert grad.dtype == dtype
    np.testing.assert_array_equal(value, plain_value.astype(jnp.float32))
    np.testing.assert_array_equal(grad, plain_grad * jnp.array(1024, dtype))


def test_scale_is_not_differentiated():
    def loss_fn(scale):
        state = STATE._replace(loss_scale_state=STATE.loss_scale_state._replace(loss_scale=scale))
        return mpopt.scale_loss(jnp.float32(3.0), state)

    assert float(jax.grad(loss_fn)(jnp.float32(8.0))) == 0.0


def test_scale_loss_in_forward_mode_and_second_order():
    def loss_fn(x):
        return mpopt.scale_loss(x**3, STATE)

    x = jnp.float32(2.0)
    value, tangent = jax.jvp(loss_fn, (x,), (jnp.float32(1.0),))
    assert (float(value), float(tangent)) == (8.0, 12 * 1024)
    # The gradient of a scaled loss is itself scaled once: d/dx (S 3 x^2) = S 6 x.
    assert float(jax.grad(jax.grad(loss_fn))(x)) == 12 * 1024
    assert float(jax.hessian(loss_fn)(x)) == 12 * 1024
    assert float(jax.jit(jax.jacrev(jax.jacfwd(loss_fn)))(x)) == 12 * 1024


def test_scale_loss_under_vmap():
    x = jnp.arange(4.0)
    batched = jax.jit(jax.vmap(jax.value_and_grad(lambda x: mpopt.scale_loss(x**2, STATE))))
    value, grad = batched(x)
    np.testing.assert_array_equal(value, x**2)
    np.testing.assert_array_equal(grad, 2048 * x)
    # An ensemble: one scale each.
    tx = mpopt.mixed_precision(optax.sgd(0.1), loss_scale=mpopt.static_loss_scale(2.0))
    states = jax.vmap(tx.init)(x)
    states = states._replace(
        loss_scale_state=states.loss_scale_state._replace(loss_scale=jnp.float32([1, 2, 4, 8]))
    )
    grad = jax.vmap(jax.grad(lambda x, s: mpopt.scale_loss(x, s)))(x, states)
    np.testing.assert_array_equal(grad, np.float32([1, 2, 4, 8]))


def test_scale_loss_of_a_batch_of_losses():
    losses = jnp.arange(3.0)
    out, vjp = jax.vjp(lambda x: mpopt.scale_loss(x, STATE), losses)
    np.testing.assert_array_equal(out, losses)
    np.testing.assert_array_equal(vjp(jnp.ones(3))[0], np.full(3, 1024.0))


def test_float16_loss_overflows_its_cotangent_from_two_to_the_16():
    state = scale_only(2.0**16)[1]
    x = jnp.float16(1.0)
    assert jax.grad(lambda x: mpopt.scale_loss(x, state))(x) == jnp.inf
    wide = jax.grad(lambda x: mpopt.scale_loss(x.astype(jnp.float32) / 4, state))(x)
    assert wide == 2.0**14


def test_float64_loss_stays():
    with jax.enable_x64(True):
        value, grad = jax.value_and_grad(lambda x: mpopt.scale_loss(x * x, STATE))(jnp.float64(0.1))
        assert value.dtype == grad.dtype == jnp.float64
        assert (float(value), float(grad)) == (0.1 * 0.1, 0.2 * 1024)


@pytest.mark.parametrize("loss", [1.5, np.float32(1.5), np.float16(1.5), jnp.float32(1.5)])
def test_loss_of_any_float_scalar(loss):
    scaled = mpopt.scale_loss(loss, STATE)
    assert (scaled.dtype, float(scaled)) == (jnp.float32, 1.5)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (jnp.int32(1), "int32"),
        (3, "int32"),
        (jnp.array(True), "bool"),
        (jnp.complex64(1), "complex64"),
        (None, "NoneType"),
        ((jnp.float32(1.0), {}), "tuple"),
    ],
)
def test_loss_that_is_no_real_float_is_refused(loss, kind):
    with pytest.raises(ValueError, match=f"^The loss must be a real float, got {kind}"):
        mpopt.scale_loss(loss, STATE)


@pytest.mark.parametrize("run", [jax.jit, lambda f: f])
def test_scale_set_by_hand_is_a_float(run):
    def gradient(state):
        return jax.grad(lambda x: mpopt.scale_loss(x, state))(jnp.float32(1.0))

    assert float(run(gradient)(optax.tree.set(STATE, loss_scale=64.0))) == 64
    for scale in (64, True):
        with pytest.raises(ValueError, match="'loss_scale' is .*set by hand"):
            run(gradient)(optax.tree.set(STATE, loss_scale=scale))


# value_and_grad


def test_value_and_grad_like_jax():
    @partial(jax.jit, static_argnames="power")
    def run(x, y, state, power):
        fun = mpopt.value_and_grad(lambda x, y, *, power: jnp.sum(x**power * y))
        return fun(x, y, power=power, opt_state=state)

    value, grad = run(jnp.float32(3.0), jnp.float32(2.0), STATE, power=2)
    assert (float(value), float(grad)) == (18.0, 12.0 * 1024)


def test_value_and_grad_with_aux():
    def fun(x):
        return x**2, {"seen": x, "n": 3}

    (value, aux), grad = mpopt.value_and_grad(fun, has_aux=True)(jnp.float32(3.0), opt_state=STATE)
    assert (float(value), float(grad)) == (9.0, 6.0 * 1024)
    assert float(aux["seen"]) == 3.0
    assert aux["n"] == 3


@pytest.mark.parametrize("argnums", [(0, 2), [0, 2], (2, 0), 1, -1])
def test_value_and_grad_argnums(argnums):
    def fun(a, b, c):
        return a * b * c["x"]

    args = jnp.float32(2.0), jnp.float32(3.0), {"x": jnp.float32(5.0)}
    value, grads = mpopt.value_and_grad(fun, argnums)(*args, opt_state=STATE)
    expected_value, expected = jax.value_and_grad(fun, argnums)(*args)
    assert value == expected_value
    assert_same_bits(grads, jax.tree.map(lambda g: g * 1024, expected))


def test_value_and_grad_passes_a_keyword_named_like_its_own_argument_names():
    def fun(x, *, fun, argnums):
        return x * fun * argnums

    value, _ = mpopt.value_and_grad(fun)(jnp.float32(2.0), fun=3.0, argnums=4.0, opt_state=STATE)
    assert float(value) == 24.0


def test_value_and_grad_needs_the_opt_state():
    with pytest.raises(TypeError, match="opt_state"):
        mpopt.value_and_grad(lambda x: x)(jnp.float32(1.0))
    with pytest.raises(ValueError, match="holds no loss scale"):
        mpopt.value_and_grad(lambda x: x)(jnp.float32(1.0), opt_state=())


# unscale


@both_dtypes
def test_unscale_gives_float32_gradients(dtype):
    grads = {"a": jnp.array([1024.0, 2.0**-10], dtype), "b": jnp.float32([512.0])}
    true = jax.jit(mpopt.unscale)(grads, STATE)
    assert_same_bits(true, {"a": jnp.float32([1.0, 2.0**-20]), "b": jnp.float32([0.5])})


def test_unscale_leaves_what_is_no_float():
    grads = {"int": jnp.arange(3), "float0": np.zeros(2, jax.dtypes.float0), "none": None}
    result = mpopt.unscale(grads, STATE)
    np.testing.assert_array_equal(result["int"], np.arange(3))
    assert result["float0"].dtype == jax.dtypes.float0
    assert result["none"] is None


def test_unscale_keeps_float64_and_complex():
    with jax.enable_x64(True):
        true = mpopt.unscale(
            (jnp.float64(0.1), jnp.complex64(1024 + 512j), jnp.complex128(1j)), STATE
        )
        assert [x.dtype.name for x in true] == ["float64", "complex64", "complex128"]
        assert float(true[0]) == 0.1 / 1024
        assert complex(true[1]) == 1 + 0.5j
        assert complex(true[2]) == 1j / 1024


@pytest.mark.parametrize("scale", [2.0**127, 2.0**-126, 3.0, 1e30])
def test_extreme_scales_divide_right(scale):
    # On XLA:CPU the reciprocal of 2^127 is flushed to 0.
    _, state = scale_only(scale)
    g = jnp.asarray(np.float32(scale) * np.float32([1.0, 1.5]))
    unscaled = jax.jit(mpopt.unscale)({"real": g, "complex": g.astype(jnp.complex64)}, state)
    np.testing.assert_allclose(unscaled["real"], [1.0, 1.5], rtol=2e-7)
    np.testing.assert_allclose(unscaled["complex"], [1.0, 1.5], rtol=2e-7)


def test_gradients_are_exact_on_growth_steps():
    # The scale that grows in this update is not the one that these gradients were made with.
    rule = mpopt.dynamic_loss_scale(4.0, growth_interval=1)
    tx = mpopt.mixed_precision(optax.sgd(1.0), loss_scale=rule)
    params = {"w": jnp.zeros(1, jnp.float16)}
    state, step = tx.init(params), jitted_step(tx)
    for i in range(4):
        scale = mpopt.loss_scale(state)
        assert scale == 4.0 * 2**i
        grads = fill(params, -scale)
        assert mpopt.unscale(grads, state)["w"] == -1.0
        params, state = step(params, state, grads)
        assert params["w"] == i + 1


# The transformation


def test_alone_it_trains_float32_params_exactly():
    inner = optax.adam(1e-2)
    tx, params = mpopt.with_loss_scale(inner, mpopt.dynamic_loss_scale(8.0)), params_tree()
    state, inner_state, wide = tx.init(params), inner.init(params), params
    for i in range(5):
        grads = params_tree(seed=10 + i)
        updates, state = tx.update(jax.tree.map(lambda g: g * 8, grads), state, params)
        params = optax.apply_updates(params, updates)
        updates, inner_state = inner.update(grads, inner_state, wide)
        wide = optax.apply_updates(wide, updates)
    assert_same_bits(params, wide)
    assert_same_bits(state.inner_state, inner_state)


def test_alone_it_takes_float16_gradients_of_float32_params():
    tx, _ = scale_only(256.0)
    params = {"w": jnp.float32([0.1])}
    updates, _ = jax.jit(tx.update)({"w": jnp.float16([1.0])}, tx.init(params), params)
    assert_same_bits(updates, {"w": jnp.float32([-0.5 / 256])})


def test_params_are_optional_where_the_inner_optimizer_needs_none():
    tx, _ = scale_only(4.0)
    updates, state = tx.update(jnp.float32(4.0), tx.init(jnp.float32(1.0)))
    assert float(updates) == -0.5
    updates, _ = tx.update(jnp.float32(jnp.nan), state)
    assert float(updates) == 0.0


@both_dtypes
@pytest.mark.parametrize(
    "inner",
    [
        lambda: optax.sgd(optax.linear_schedule(1.0, 0.0, 10), momentum=0.9),
        lambda: optax.adamw(1e-2, weight_decay=0.1),
        lambda: optax.MultiSteps(optax.adam(1e-2), 3),
    ],
    ids=["momentum, schedule", "adamw", "MultiSteps"],
)
def test_overflow_keeps_every_bit_and_halves_the_scale(inner, dtype):
    rule = mpopt.dynamic_loss_scale(1024.0)
    tx = mpopt.mixed_precision(
        inner(), loss_scale=rule, policy=mpopt.Policy(dtype, keep_float32="b")
    )
    params = {
        "w": jnp.array([1.0, -0.0, 0.0, -2.5, 1e-7], dtype),
        "b": jnp.array([-0.0, 1e-30, 3.0], jnp.float32),
    }
    state = tx.init({"w": params["w"].astype(jnp.float32) + 1e-9, "b": params["b"]})
    step = jitted_step(tx)
    _, state = step(params, state, fill(params, 512.0))  # fills momenta and accumulators
    update = jax.jit(tx.update)
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        grads = fill(params, 512.0) | {"b": jnp.array([1.0, bad, 1.0])}
        updates, new_state = update(grads, state, params)
        new_params, _ = step(params, state, grads)
        assert_same_bits(new_params, params)
        assert all(np.all(np.asarray(u) == 0) for u in jax.tree.leaves(updates))
        assert_same_bits(new_state.inner_state, state.inner_state)
        assert float(mpopt.loss_scale(new_state)) == 512.0
        assert not mpopt.grads_finite(new_state)


def test_a_thousand_nan_steps_change_nothing():
    tx = mpopt.mixed_precision(optax.adamw(0.1), policy=mpopt.Policy(jnp.float16))
    wide = params_tree()
    params, state = mpopt.Policy(jnp.float16).cast_to_param(wide), tx.init(wide)
    grads = fill(params, jnp.nan)

    @jax.jit
    def run(carry):
        def body(carry, _):
            updates, state = tx.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(body, carry, None, 1000)[0]

    new_params, new_state = run((params, state))
    assert_same_bits(new_params, params)
    assert_same_bits(new_state.inner_state, state.inner_state)
    assert float(mpopt.loss_scale(new_state)) == 2.0**-14
    counts = mpopt.metrics(new_state)
    assert int(counts["total_skips"]) == int(counts["consecutive_skips"]) == 1000
    # And it goes on as if nothing had happened, but for the scale.
    good = fill(params, 2.0**-14)
    step = jitted_step(tx)
    after, after_state = step(new_params, new_state, good)
    expected, expected_state = step(params, state, fill(params, 2.0**15))
    assert_same_bits(after, expected)
    assert_same_bits(after_state.inner_state, expected_state.inner_state)


def test_schedule_does_not_advance_on_a_skipped_step():
    # pytorch#44511: sgd with a rate from 1 to 0 over 10 steps; G, B, G.
    tx = mpopt.mixed_precision(
        optax.sgd(optax.linear_schedule(1.0, 0.0, 10)), loss_scale=mpopt.static_loss_scale(1.0)
    )
    params = jnp.zeros(1)
    state, steps = tx.init(params), []
    for g in (1.0, jnp.inf, 1.0):
        updates, state = jax.jit(tx.update)(jnp.float32([g]), state, params)
        steps.append(float(updates[0]))
    np.testing.assert_allclose(steps, [-1.0, 0.0, -0.9], rtol=1e-6)


@both_dtypes
def test_overflow_inside_multisteps_never_poisons_the_accumulator(dtype):
    tx = mpopt.mixed_precision(
        optax.MultiSteps(optax.sgd(1.0), 2), loss_scale=mpopt.static_loss_scale(1.0)
    )
    params = {"w": jnp.zeros(2, dtype)}
    state, step = tx.init(params), jitted_step(tx)
    for g, expected in [(1.0, 0.0), (jnp.inf, 0.0), (1.0, -1.0), (1.0, -1.0), (3.0, -3.0)]:
        params, state = step(params, state, fill(params, g))
        assert params["w"].tolist() == [expected] * 2


def test_large_norm_with_finite_elements_is_finite():
    tx, _ = scale_only(1.0)
    params = jnp.zeros(100)
    _, state = jax.jit(tx.update)(jnp.full(100, 3e38), tx.init(params), params)
    assert mpopt.grads_finite(state)


@pytest.mark.parametrize("position", [0, 511, 999])
def test_one_bad_element_is_found(position):
    tx = mpopt.mixed_precision(optax.sgd(0.1))
    params = {"a": jnp.zeros(4, jnp.float16), "b": jnp.zeros(1000, jnp.float16)}
    grads = fill(params, 1.0)
    grads["b"] = grads["b"].at[position].set(-jnp.inf)
    _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert not mpopt.grads_finite(state)


@pytest.mark.parametrize("bad", [0, 7, 8, 19])
def test_each_of_many_leaves_of_one_shape_is_told_apart(bad):
    # One reduction goes over several of them.
    params = {f"layer_{i:02d}": jnp.zeros((3, 2), jnp.float16) for i in range(20)}
    params["other"] = jnp.zeros(5, jnp.float16)
    tx = mpopt.mixed_precision(optax.sgd(0.1))
    grads = jax.tree.map(jnp.ones_like, params)
    name = f"layer_{bad:02d}"
    grads[name] = grads[name].at[2, 1].set(-jnp.inf)
    _, state = jitted_step(tx)(params, tx.init(params), grads)
    assert mpopt.nonfinite_params(state, params) == [name]
    program = str(jax.make_jaxpr(tx.update)(grads, state, params))
    assert len(re.findall(r"= reduce\[", program)) == 4  # 8 + 8 + 4 of them, and the other


def test_gradient_that_overflows_when_unscaled_is_skipped():
    # A scale below 1: the scaled gradient is finite, the true one is not.
    tx, _ = scale_only(2.0**-10)
    params = jnp.zeros(1)
    updates, state = jax.jit(tx.update)(jnp.float32([1e38]), tx.init(params), params)
    assert not mpopt.grads_finite(state)
    assert float(updates[0]) == 0.0


def test_empty_trees_are_finite_and_grow_the_scale():
    tx = mpopt.mixed_precision(
        optax.adam(0.1), loss_scale=mpopt.dynamic_loss_scale(8.0, growth_interval=1)
    )
    for params in ({}, [], None, {"a": {}, "b": None}):
        updates, state = jax.jit(tx.update)(params, tx.init(params), params)
        assert updates == params
        assert float(mpopt.loss_scale(state)) == 16.0
        assert mpopt.nonfinite_params(state, params) == []


# Extra args


def record_extra():
    seen = {}

    def update(updates, state, params=None, **extra):
        seen.update(extra)
        return updates, state

    return seen, optax.GradientTransformationExtraArgs(lambda params: (), update)


@both_dtypes
def test_extra_arg_grad_is_unscaled_and_the_others_pass(dtype):
    seen, inner = record_extra()
    tx = mpopt.mixed_precision(inner, loss_scale=mpopt.static_loss_scale(256.0))
    params = {"w": jnp.ones(2, dtype)}
    grads, other = fill(params, 512.0), fill(params, 128.0)
    tx.update(grads, tx.init(params), params, grad=other, value=512.0, value_fn=len)
    assert_same_bits(seen["grad"], {"w": jnp.float32([0.5, 0.5])})
    assert seen["value"] == 512.0
    assert seen["value_fn"] is len


def test_extra_arg_grad_of_another_structure_is_refused():
    _, inner = record_extra()
    params = {"w": jnp.ones(2)}
    for make in (mpopt.with_master_params, mpopt.mixed_precision):
        tx = make(inner)
        with pytest.raises(ValueError, match="gradients do not match the params: leaf 'w' is miss"):
            tx.update(params, tx.init(params), params, grad={})


def test_extra_args_pass_through_multisteps():
    seen, inner = record_extra()
    tx = mpopt.mixed_precision(
        optax.MultiSteps(inner, 1), loss_scale=mpopt.static_loss_scale(256.0)
    )
    params = {"w": jnp.ones(2, jnp.float16)}
    tx.update(fill(params, 512.0), tx.init(params), params, value=3.0, grad=fill(params, 512.0))
    assert seen["value"] == 3.0
    assert_same_bits(seen["grad"], {"w": jnp.float32([2.0, 2.0])})


def test_optimizer_without_extra_args_ignores_them():
    tx = mpopt.mixed_precision(optax.sgd(0.1))
    params = {"w": jnp.ones(2, jnp.float16)}
    tx.update(fill(params, 1.0), tx.init(params), params, value=1.0, anything=None)


# Refusals


@pytest.mark.parametrize("rule", [1024.0, None, "dynamic", mpopt.dynamic_loss_scale, (1, 2)])
def test_loss_scale_that_is_no_rule_is_refused(rule):
    message = r"loss_scale must be a LossScale, got .* Use mpopt.static_loss_scale\(s\)"
    with pytest.raises(ValueError, match=message):
        mpopt.with_loss_scale(optax.sgd(0.1), rule)
    if rule is not None:
        with pytest.raises(ValueError, match=message):
            mpopt.mixed_precision(optax.sgd(0.1), loss_scale=rule)


def test_two_loss_scales_are_refused_at_init():
    inner = optax.chain(optax.clip(1.0), mpopt.mixed_precision(optax.sgd(0.1)))
    tx = mpopt.mixed_precision(inner)
    with pytest.raises(ValueError, match="unscaled twice. Wrap the optimizer once, outermost"):
        tx.init(jnp.ones(2))


@pytest.mark.parametrize(
    ("grad", "kind"),
    [
        (None, "None"),
        (jnp.ones(2, jnp.int32), "int32"),
        (np.zeros(2, jax.dtypes.float0), r"\[?\(?.*float0.*"),
        (jnp.ones(2, bool), "bool"),
        ([jnp.ones(2)], "list"),
    ],
    ids=["None", "int32", "float0", "bool", "list"],
)
@pytest.mark.parametrize("make", [mpopt.with_master_params, mpopt.mixed_precision])
def test_gradient_that_is_no_float_is_refused(make, grad, kind):
    tx = make(optax.sgd(0.1))
    params = {"net": {"w": jnp.ones(2, jnp.float16), "n": jnp.arange(2)}}
    grads = {"net": {"w": grad, "n": None}}
    message = (
        f"^The gradient of params leaf 'net/w' is {kind}, but the leaf is float16: differentiate"
        " with respect to it, or leave it out of params"
    )
    with pytest.raises(ValueError, match=message):
        tx.update(grads, tx.init(params), params)


@pytest.mark.parametrize("make", [mpopt.with_master_params, mpopt.mixed_precision])
def test_gradient_of_another_shape_is_refused(make):
    tx = make(optax.sgd(0.1))
    params = {"net": [jnp.ones(2), jnp.ones((2, 3))]}
    grads = {"net": [jnp.ones(2), jnp.ones(3)]}
    message = r"gradient of params leaf 'net/1' has shape \(3,\), the leaf has \(2, 3\)"
    with pytest.raises(ValueError, match=message):
        tx.update(grads, tx.init(params), params)


@pytest.mark.parametrize(
    ("grads", "detail"),
    [
        ({"a": 1.0}, "leaf 'b/c' is missing from the gradients"),
        ({"a": 1.0, "b": {"c": 1.0}, "d": 1.0}, "leaf 'd' is only in the gradients"),
        ({"a": 1.0, "b": {"e": 1.0}}, "leaf 'b/c' is missing from the gradients"),
        ({"a": 1.0, "b": 1.0}, "leaf 'b/c' is missing from the gradients"),
    ],
)
@pytest.mark.parametrize("make", [mpopt.with_master_params, mpopt.mixed_precision])
def test_gradients_of_another_structure_are_refused(make, grads, detail):
    tx = make(optax.sgd(0.1))
    params = {"a": jnp.float32(1.0), "b": {"c": jnp.float32(1.0)}}
    with pytest.raises(ValueError, match=f"^The gradients do not match the params: {detail}"):
        tx.update(grads, tx.init(params), params)


def test_gradients_in_another_container_are_refused():
    tx = mpopt.mixed_precision(optax.sgd(0.1))
    params = [jnp.float32(1.0), jnp.float32(1.0)]
    with pytest.raises(ValueError, match="the same leaves, in other containers"):
        tx.update(tuple(params), tx.init(params), params)
