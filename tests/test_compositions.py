"""Optax wrappers and links inside mixed_precision, outside it, and after it in a chain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import assert_same_bits, both_dtypes, fill, jitted_step

import mpopt

SCALE = 1024.0
PARAMS_F32 = {
    "w": jnp.array(np.random.RandomState(0).randn(3, 4), jnp.float32),
    "norm": jnp.array([0.5, 1.0, 1.5]),
}
MASK = {"w": True, "norm": False}


def wrapped(inner, policy=None, **rule):
    return mpopt.mixed_precision(
        inner, loss_scale=mpopt.dynamic_loss_scale(SCALE, **rule), policy=policy
    )


def every_other(step):
    return step % 2 == 0


INSIDE = {
    "clip": optax.chain(optax.clip(0.5), optax.sgd(0.1)),
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "clip_by_block_rms": optax.chain(optax.clip_by_block_rms(0.5), optax.sgd(0.1)),
    "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "named_chain": optax.named_chain(("clip", optax.clip(0.5)), ("sgd", optax.sgd(0.1))),
    "add_decayed_weights": optax.chain(optax.add_decayed_weights(0.1, MASK), optax.sgd(0.1)),
    "masked": optax.chain(optax.masked(optax.trace(0.9), MASK), optax.scale(-0.1)),
    "partition": optax.partition(
        {"a": optax.adamw(0.1), "b": optax.sgd(0.1, momentum=0.9)}, {"w": "a", "norm": "b"}
    ),
    "multi_transform": optax.multi_transform(
        {"a": optax.adamw(0.1), "b": optax.set_to_zero()}, {"w": "a", "norm": "b"}
    ),
    "chain": optax.chain(optax.chain(optax.trace(0.9), optax.scale(2.0)), optax.scale(-0.1)),
    "with_extra_args_support": optax.with_extra_args_support(optax.adam(0.1)),
    "split_real_and_imaginary": optax.contrib.split_real_and_imaginary(optax.adam(0.1)),
    "freeze": optax.chain(optax.sgd(0.1), optax.freeze({"w": False, "norm": True})),
    "selective_transform": optax.selective_transform(
        optax.adam(0.1), freeze_mask={"w": False, "norm": True}
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 10), weight_decay=0.01
    ),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 3),
    "apply_every": optax.chain(optax.sgd(0.1), optax.apply_every(2)),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 5),
    "conditionally_transform": optax.chain(
        optax.conditionally_transform(optax.trace(0.9), every_other), optax.scale(-0.1)
    ),
    "conditionally_mask": optax.conditionally_mask(optax.sgd(0.1), every_other),
    "add_noise": optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.sgd(0.1)),
    "zero_nans": optax.chain(optax.zero_nans(), optax.sgd(0.1)),
    "keep_params_nonnegative": optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
    "flatten": optax.flatten(optax.adam(0.1)),
    "centralize": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "normalize": optax.chain(optax.contrib.normalize(), optax.sgd(0.1)),
    "snapshot": optax.chain(optax.snapshot("norm", optax.tree.norm), optax.sgd(0.1)),
}


@both_dtypes
@pytest.mark.parametrize("name", INSIDE)
def test_inside_it_sees_what_it_would_see_in_float32(name, dtype):
    """Op by op, to the bit, with an overflow that the control run never saw."""
    inner, policy = INSIDE[name], mpopt.Policy(dtype, keep_float32="norm")
    tx = wrapped(inner, policy, growth_interval=2)
    opt_state, params = tx.init(PARAMS_F32), policy.cast_to_param(PARAMS_F32)
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    control_params, control_state = PARAMS_F32, inner.init(PARAMS_F32)
    random = np.random.RandomState(1)
    for step in range(6):
        unscaled = jax.tree.map(
            lambda p: jnp.asarray(random.randn(*p.shape), dtype).astype(jnp.float32), PARAMS_F32
        )
        scaled = optax.tree.scale(mpopt.loss_scale(opt_state), unscaled)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), scaled, params)
        if step == 3:
            grads["w"] = grads["w"].at[2, 3].set(jnp.nan)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        assert mpopt.grads_finite(opt_state) == (step != 3)
        if step != 3:
            updates, control_state = inner.update(unscaled, control_state, control_params)
            control_params = optax.apply_updates(control_params, updates)
    masters = mpopt.master_params(opt_state, params)
    assert_same_bits(masters, control_params)
    assert_same_bits(opt_state.inner_state.inner_state, control_state)
    assert_same_bits(params, policy.cast_to_param(masters))
    assert jnp.any(masters["w"] != PARAMS_F32["w"])


def test_norm_of_large_float16_gradients_clips_to_the_right_direction():
    # 300 squared is above float16's largest value.
    tx = mpopt.mixed_precision(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)),
        loss_scale=mpopt.static_loss_scale(1.0),
    )
    params = {"w": jnp.zeros(2, jnp.float16)}
    params, _ = jitted_step(tx)(params, tx.init(params), {"w": jnp.float16([300, 400])})
    assert_same_bits(params["w"], -jnp.float16([0.6, 0.8]))


@both_dtypes
def test_window_of_multisteps_leaves_the_overflowing_micro_batch_out(dtype):
    tx = wrapped(optax.MultiSteps(optax.sgd(1.0), 3))
    params = {"w": jnp.zeros(2, dtype)}
    step, state = jitted_step(tx), tx.init(params)
    for mean in (1.0, 2.0, jnp.inf, 6.0):
        params, state = step(params, state, fill(params, mean * mpopt.loss_scale(state)))
    assert params["w"].tolist() == [-3.0, -3.0]  # the mean of 1, 2 and 6
    accumulators = optax.tree.get(state, "acc_grads")
    assert {a.dtype for a in jax.tree.leaves(accumulators)} == {jnp.dtype(jnp.float32)}


def test_injected_rate_is_float32_and_changes_without_a_new_trace():
    tx = wrapped(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    params = {"w": jnp.zeros(2, jnp.float16)}
    step, state = jitted_step(tx), tx.init(params)
    for rate in (0.1, 1e-6, 0.3):  # 1e-6 has two digits as a float16
        state = optax.tree.set(state, learning_rate=jnp.float32(rate))
        before = mpopt.master_params(state, params)["w"]
        params, state = step(params, state, fill(params, SCALE))
        moved = before - mpopt.master_params(state, params)["w"]
        np.testing.assert_allclose(moved, rate, rtol=1e-6, atol=2e-8)
    assert optax.tree.get(state, "learning_rate").dtype == jnp.float32
    assert step._cache_size() == 1


@pytest.mark.parametrize("guard", ["apply_if_finite", "zero_nans"])
def test_guards_inside_never_meet_an_overflow(guard):
    tx = wrapped(INSIDE[guard])
    params = {"w": jnp.ones((3, 4), jnp.float16), "norm": jnp.ones(3)}
    step, state = jitted_step(tx), tx.init(params)
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        new_params, new_state = step(params, state, fill(params, bad))
        assert_same_bits(new_params, params)
        assert_same_bits(new_state.inner_state, state.inner_state)
        assert mpopt.loss_scale(new_state) == SCALE / 2


def test_sharpness_aware_minimisation_gets_unscaled_gradients_of_its_own_function():
    """SAM's opaque mode: `grad_fn` gets float32 masters and returns unscaled gradients."""

    def loss_fn(params):
        return jnp.sum((jnp.asarray(params["w"], jnp.float32) - 2.0) ** 2)

    inner = optax.contrib.sam(
        optax.sgd(0.1),
        optax.chain(optax.contrib.normalize(), optax.sgd(0.01)),
        opaque_mode=True,
    )
    tx = wrapped(inner)
    params = {"w": jnp.zeros(3, jnp.float16)}
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        _, grads = mpopt.value_and_grad(loss_fn)(params, opt_state=state)
        grad_fn = jax.grad(lambda p, _: loss_fn(p))
        updates, state = tx.update(grads, state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    for _ in range(5):
        params, state = step(params, state)
    control, control_state = {"w": jnp.zeros(3)}, inner.init({"w": jnp.zeros(3)})
    for _ in range(5):
        updates, control_state = inner.update(
            jax.grad(loss_fn)(control),
            control_state,
            control,
            grad_fn=jax.grad(lambda p, _: loss_fn(p)),
        )
        control = optax.apply_updates(control, updates)
    np.testing.assert_allclose(np.float32(params["w"]), control["w"], rtol=1e-3)
    assert mpopt.metrics(state)["total_skips"] == 0


def test_schedule_free_is_evaluated_on_its_masters():
    inner = optax.contrib.schedule_free_sgd(0.5)
    tx = wrapped(inner)
    params = {"w": jnp.array([1.0, -3.0], jnp.float16)}
    state, step = tx.init(params), jitted_step(tx)
    control = {"w": jnp.array([1.0, -3.0])}
    control_state = inner.init(control)
    for _ in range(5):
        grads = {"w": params["w"].astype(jnp.float32)}
        params, state = step(params, state, {"w": params["w"] * SCALE})
        updates, control_state = jax.jit(inner.update)(grads, control_state, control)
        control = optax.apply_updates(control, updates)
    averaged = optax.contrib.schedule_free_eval_params(
        state.inner_state.inner_state, mpopt.master_params(state, params)
    )
    expected = optax.contrib.schedule_free_eval_params(control_state, control)
    np.testing.assert_allclose(averaged["w"], expected["w"], rtol=1e-6)


# Outside, where README sends nobody: what happens is what it says


@pytest.mark.parametrize(
    ("link", "grads", "moved"),
    [
        pytest.param(optax.clip(1.0), [1024.0, 512.0], [1 / 1024, 1 / 1024], id="clip"),
        pytest.param(optax.clip(1.0), [jnp.inf, 0.0], [1 / 1024, 0], id="clip hides an overflow"),
        pytest.param(
            optax.zero_nans(), [jnp.nan, 1024.0], [0, 1], id="zero_nans hides an overflow"
        ),
        pytest.param(
            optax.clip_by_global_norm(1.0), [300.0, 400.0], [0, 0], id="the norm overflows float16"
        ),
    ],
)
def test_link_before_it_works_on_scaled_16_bit_gradients(link, grads, moved):
    tx = optax.chain(link, wrapped(optax.sgd(1.0)))
    params = {"w": jnp.zeros(2, jnp.float16)}
    params, state = jitted_step(tx)(params, tx.init(params), {"w": jnp.float16(grads)})
    np.testing.assert_array_equal(params["w"], -jnp.float16(moved))
    assert mpopt.grads_finite(state)  # counted as a step


AROUND = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "conditionally_transform": lambda tx: optax.conditionally_transform(tx, every_other),
    "contrib.mechanize": optax.contrib.mechanize,
    "contrib.sam": lambda tx: optax.contrib.sam(tx, optax.sgd(0.1)),
}


@pytest.mark.parametrize("nested", [False, True], ids=["outermost", "in a chain"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("name", AROUND)
def test_wrapper_that_belongs_inside_is_refused_around_it(name, dtype, nested):
    params = {"w": jnp.zeros(2, dtype)}
    tx = AROUND[name](wrapped(optax.sgd(1.0)))
    state = (optax.chain(tx, optax.identity()) if nested else tx).init(params)
    reads = {
        "scale_loss": lambda: mpopt.scale_loss(jnp.float32(1.0), state),
        "value_and_grad": lambda: mpopt.value_and_grad(optax.tree.sum)(params, opt_state=state),
        "unscale": lambda: mpopt.unscale(params, state),
        "loss_scale": lambda: mpopt.loss_scale(state),
        "metrics": lambda: mpopt.metrics(state),
        "where_applied": lambda: mpopt.where_applied(state, params, params),
        "raise_if_stalled": lambda: mpopt.raise_if_stalled(state, params, 3),
    }
    inside = rf"optax\.{name} is around.*goes inside: mpopt.mixed_precision\(optax\.{name}\(inner"
    for read in reads.values():
        with pytest.raises(ValueError, match=inside):
            read()


def test_wrappers_inside_are_not_taken_for_wrappers_around():
    params = {"w": jnp.zeros(2)}
    for around in AROUND.values():
        state = wrapped(optax.chain(around(optax.sgd(1.0)), optax.identity())).init(params)
        assert mpopt.loss_scale(state) == SCALE


def test_the_state_inside_a_refused_wrapper_can_still_be_read():
    tx = optax.MultiSteps(wrapped(optax.sgd(1.0)), 2).gradient_transformation()
    state = tx.init({"w": jnp.zeros(2, jnp.float16)})
    assert mpopt.loss_scale(state.inner_opt_state) == SCALE


@pytest.mark.parametrize("link", [optax.apply_every(2), optax.ema(0.5)], ids=["apply_every", "ema"])
def test_accumulator_outside_is_poisoned_by_one_overflow(link):
    params = {"w": jnp.zeros(2, jnp.float16)}
    applied = {}
    for place in ("outside", "inside"):
        if place == "outside":
            tx = optax.chain(link, wrapped(optax.sgd(1.0)))
        else:
            tx = wrapped(optax.chain(link, optax.sgd(1.0)))
        p, state, step = params, tx.init(params), jitted_step(tx)
        for value in (SCALE, jnp.inf, SCALE / 2, SCALE / 2, SCALE / 2, SCALE / 2):
            p, state = step(p, state, fill(p, value))
        applied[place] = bool(mpopt.grads_finite(state)) and bool(jnp.all(p["w"] < 0))
    assert applied == {"outside": False, "inside": True}


def test_inject_hyperparams_around_it_rounds_the_rate_unless_told_its_dtype():
    def factory(learning_rate):
        return wrapped(optax.sgd(learning_rate))

    params = {"w": jnp.zeros(2, jnp.float16)}
    for dtype, expected in [(None, np.float16(0.1)), (jnp.float32, np.float32(0.1))]:
        tx = optax.inject_hyperparams(factory, hyperparam_dtype=dtype)(learning_rate=0.1)
        new, state = jitted_step(tx)(params, tx.init(params), fill(params, SCALE))
        np.testing.assert_array_equal(
            mpopt.master_params(state, new)["w"], -np.float32([expected] * 2)
        )


def test_schedule_injected_around_it_also_counts_skipped_steps():
    tx = optax.inject_hyperparams(
        lambda learning_rate: wrapped(optax.sgd(learning_rate)), hyperparam_dtype=jnp.float32
    )(learning_rate=optax.linear_schedule(1.0, 0.0, 10))
    params = {"w": jnp.zeros(1, jnp.float16)}
    step, state = jitted_step(tx), tx.init(params)
    for value in (SCALE, jnp.inf, SCALE / 2):
        params, state = step(params, state, fill(params, value))
    np.testing.assert_allclose(np.float32(params["w"]), -1.8, rtol=1e-3)  # inside: -1.9


def test_masked_around_it_passes_scaled_gradients_of_the_other_leaves_through():
    tx = optax.masked(wrapped(optax.sgd(1.0)), {"a": True, "b": False})
    params = {"a": jnp.zeros(1, jnp.float16), "b": jnp.zeros(1, jnp.float16)}
    params, state = jitted_step(tx)(params, tx.init(params), fill(params, SCALE))
    assert params["a"] == -1 and params["b"] == SCALE
    assert mpopt.loss_scale(state) == SCALE


def test_two_scales_of_a_partition_are_refused_by_the_loss():
    tx = optax.partition(
        {"x": wrapped(optax.sgd(1.0)), "y": wrapped(optax.adam(1.0))}, {"a": "x", "b": "y"}
    )
    state = tx.init({"a": jnp.zeros(1, jnp.float16), "b": jnp.zeros(1, jnp.float16)})
    with pytest.raises(ValueError, match="2 loss scales: use one, outermost"):
        mpopt.scale_loss(jnp.float32(1.0), state)


def test_conditional_mask_around_it_fails_at_the_first_trace():
    tx = optax.conditionally_mask(wrapped(optax.sgd(1.0)), every_other)
    params = {"w": jnp.zeros(2, jnp.float16)}
    with pytest.raises(TypeError, match="float16"):
        jax.jit(tx.update)(fill(params, SCALE), tx.init(params), params)


@pytest.mark.skipif(not hasattr(optax, "monitor"), reason="optax is older than 0.2.7")
def test_monitor_changes_its_state_and_is_refused_with_the_remedy():
    measures = {"norm": optax.measure_with_ema(optax.tree.norm, 0.9)}
    tx = mpopt.mixed_precision(optax.chain(optax.monitor(measures), optax.sgd(0.1)))
    params = {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match="changes the structure of its state.*optax.snapshot"):
        jax.jit(tx.update)(params, tx.init(params), params)


def test_lookahead_goes_around_it_with_slow_weights_in_float32():
    tx = optax.lookahead(wrapped(optax.sgd(0.1)), sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams(fast={"w": jnp.ones(2, jnp.float16)}, slow={"w": jnp.ones(2)})
    step, state = jitted_step(tx), tx.init(params)
    for value in (SCALE, SCALE, jnp.nan, SCALE / 2):
        params, state = step(params, state, fill(params.fast, value))
    # Two steps of 0.1, half of it kept; a skipped one and one of 0.1, half of it kept.
    np.testing.assert_allclose(params.slow["w"], 0.85, rtol=1e-3)
    np.testing.assert_allclose(np.float32(params.fast["w"]), 0.85, rtol=1e-3)
    assert mpopt.metrics(state)["total_skips"] == 1


@pytest.mark.parametrize("clip, scale", [(1.0, 64.0), (0.25, 2.0**12)])
def test_private_gradients_are_clipped_before_it_at_the_scaled_norm(clip, scale):
    """Gradients of single examples have an axis more than params; a static scale commutes."""

    def private(norm):
        return optax.contrib.differentially_private_aggregate(norm, 0.5, key=jax.random.key(0))

    rule = mpopt.static_loss_scale(scale)
    tx = optax.chain(private(clip * scale), mpopt.mixed_precision(optax.sgd(1.0), loss_scale=rule))
    control = optax.chain(private(clip), optax.sgd(1.0))
    params = {"w": jnp.zeros(3, jnp.float16)}
    examples = jnp.asarray(np.random.RandomState(0).randn(8, 3), jnp.float32)
    state = tx.init(params)
    updates, state = tx.update({"w": examples * scale}, state, params)
    expected, _ = control.update({"w": examples}, control.init({"w": jnp.zeros(3)}))
    masters = mpopt.master_params(state, optax.apply_updates(params, updates))
    np.testing.assert_allclose(masters["w"], expected["w"], rtol=1e-6)
    _, state = tx.update({"w": examples.at[5, 1].set(jnp.inf)}, state, params)
    assert not mpopt.grads_finite(state)


# After it in a chain


def test_link_after_it_loses_what_is_below_one_ulp():
    params = {"w": jnp.ones(1, jnp.float16)}
    halved = {
        "after": optax.chain(wrapped(optax.sgd(1e-3)), optax.scale(0.25)),
        "inside": wrapped(optax.chain(optax.sgd(1e-3), optax.scale(0.25))),
    }
    ends = {}
    for name, tx in halved.items():
        p, state, step = params, tx.init(params), jitted_step(tx)
        for _ in range(20):
            p, state = step(p, state, fill(p, -SCALE))
        ends[name] = float(p["w"][0])
    assert ends == {"after": 1.0, "inside": pytest.approx(1.005, abs=1e-3)}


def test_decay_after_it_acts_on_skipped_steps_too():
    tx = optax.chain(wrapped(optax.sgd(1.0)), optax.add_decayed_weights(-0.125))
    params = {"w": jnp.ones(1, jnp.float16)}
    params, state = jitted_step(tx)(params, tx.init(params), fill(params, jnp.inf))
    assert not mpopt.grads_finite(state)
    assert params["w"] == 0.875


# Edits between steps, and two players


@both_dtypes
@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda p: p + jnp.asarray([5, -7, 0.25], p.dtype), id="load"),
        pytest.param(lambda p: p * jnp.asarray([1, 0, 1], p.dtype), id="prune"),
        pytest.param(lambda p: p * 0.99, id="decay"),
        pytest.param(lambda p: jnp.clip(p, -0.5, 0.5), id="project"),
        pytest.param(lambda p: optax.incremental_update(jnp.ones_like(p), p, 0.1), id="average"),
        pytest.param(lambda p: jnp.nextafter(p, p + 1), id="one ulp"),
    ],
)
def test_edit_between_steps_is_the_start_of_the_next(edit, dtype):
    tx = wrapped(optax.sgd(2.0**-4), mpopt.Policy(dtype))
    wide = {"w": jnp.array([0.3, -1.7, 1 / 3])}
    params, state = mpopt.Policy(dtype).cast_to_param(wide), tx.init(wide)
    step = jitted_step(tx)
    for _ in range(3):
        params, state = step(params, state, fill(params, SCALE))
    before = mpopt.master_params(state, params)["w"]
    edited = jax.tree.map(lambda p: edit(p).astype(dtype), params)
    start = jnp.where(edited["w"] == params["w"], before, edited["w"].astype(jnp.float32))
    assert jnp.any(start != before)
    params, state = step(edited, state, fill(params, SCALE))
    assert_same_bits(mpopt.master_params(state, params)["w"], start - 2.0**-4)


def test_overflow_of_one_player_leaves_the_other_alone():
    tx = wrapped(optax.adam(0.1))
    nets = {name: {"w": jnp.ones(2, jnp.float16)} for name in ("generator", "discriminator")}
    states = {name: tx.init(net) for name, net in nets.items()}
    step = jitted_step(tx)
    for value in (SCALE, jnp.inf):
        for name, other in (("generator", SCALE), ("discriminator", value)):
            nets[name], states[name] = step(nets[name], states[name], fill(nets[name], other))
    assert mpopt.loss_scale(states["generator"]) == SCALE
    assert mpopt.loss_scale(states["discriminator"]) == SCALE / 2
    assert mpopt.grads_finite(states["generator"])
    assert jnp.all(nets["generator"]["w"] < nets["discriminator"]["w"])
