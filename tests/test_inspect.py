"""Accessors: from any depth of a state, inside and outside jit, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits, fill, jitted_step, params_tree

import mpopt

ACCESSORS = {
    "loss_scale": mpopt.loss_scale,
    "grads_finite": mpopt.grads_finite,
    "metrics": mpopt.metrics,
    "where_applied": lambda state: mpopt.where_applied(state, 1.0, 2.0),
    "scale_loss": lambda state: mpopt.scale_loss(jnp.float32(1.0), state),
    "unscale": lambda state: mpopt.unscale(jnp.float32(1.0), state),
    "nonfinite_params": lambda state: mpopt.nonfinite_params(state, {}),
    "raise_if_stalled": lambda state: mpopt.raise_if_stalled(state, {}, 1),
}
accessors = pytest.mark.parametrize("accessor", ACCESSORS.values(), ids=ACCESSORS)
RULE = mpopt.dynamic_loss_scale(64.0)


def updated(tx, params, *gradients):
    """The state after updates with gradients that are all of one value."""
    state = tx.init(params)
    for g in gradients:
        _, state = jax.jit(tx.update)(g if isinstance(g, dict) else fill(params, g), state, params)
    return state


NESTED = {
    "bare": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.identity(), tx, optax.identity()),
    "partition": lambda tx: optax.partition({"x": tx, "y": optax.sgd(0.1)}, {"w": "x", "b": "y"}),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": False}),
    "deep": lambda tx: optax.chain(optax.masked(optax.chain(tx), {"w": True, "b": False})),
}


@pytest.mark.parametrize("nest", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_accessors_find_their_state_at_any_depth(nest, run):
    tx = nest(mpopt.mixed_precision(optax.adam(0.1), loss_scale=RULE))
    params = params_tree(jnp.float16)
    state = updated(tx, params, 1.0, jnp.inf, jnp.nan)

    @run
    def read(state, params):
        return (
            mpopt.loss_scale(state),
            mpopt.grads_finite(state),
            mpopt.metrics(state),
            mpopt.where_applied(state, {"n": jnp.int32(1)}, {"n": jnp.int32(0)}),
            mpopt.master_params(state, params),
            mpopt.unscale(jnp.float16(32.0), state),
        )

    scale, finite, metrics, chosen, masters, gradient = read(state, params)
    assert (scale.dtype, scale.shape, float(scale)) == (jnp.float32, (), 16.0)
    assert (finite.dtype, finite.shape, bool(finite)) == (jnp.bool_, (), False)
    assert {name: (x.dtype.name, x.item()) for name, x in metrics.items()} == {
        "loss_scale": ("float32", 16.0),
        "grads_finite": ("bool", False),
        "consecutive_skips": ("int32", 2),
        "total_skips": ("int32", 2),
    }
    assert chosen["n"].item() == 0
    assert {x.dtype.name for x in jax.tree.leaves(masters)} == {"float32"}
    assert gradient == 2.0


def test_metrics_count_skips():
    tx = mpopt.mixed_precision(optax.sgd(0.1), loss_scale=RULE)
    params = params_tree(jnp.float16)
    seen = []
    for n in range(6):
        state = updated(tx, params, *[jnp.nan, jnp.nan, 1.0, jnp.inf, 1.0][:n])
        metrics = mpopt.metrics(state)
        seen.append((int(metrics["consecutive_skips"]), int(metrics["total_skips"])))
        assert mpopt.grads_finite(state) == (n in (0, 3, 5))
    assert seen == [(0, 0), (1, 1), (2, 2), (0, 2), (1, 3), (0, 3)]


def test_skip_counters_saturate():
    tx = mpopt.mixed_precision(optax.sgd(0.1))
    params = params_tree(jnp.float16)
    full = jnp.int32(2**31 - 1)
    state = tx.init(params)._replace(consecutive_skips=full, total_skips=full)
    _, state = jax.jit(tx.update)(fill(params, jnp.nan), state, params)
    assert state.consecutive_skips == state.total_skips == full


def test_nnx_optimizer_state():
    model = nnx.Linear(2, 3, param_dtype=jnp.float16, dtype=jnp.float16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, mpopt.mixed_precision(optax.adam(0.1)), wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    grads = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params)
    optimizer.update(model, grads)
    state = optimizer.opt_state
    assert type(mpopt.loss_scale(state)) is type(jnp.ones(1))
    assert mpopt.loss_scale(state) == 2.0**14
    assert not mpopt.grads_finite(state)
    assert mpopt.nonfinite_params(state, params) == ["bias", "kernel"]
    assert mpopt.nonfinite_params(state, nnx.to_pure_dict(params)) == ["bias", "kernel"]
    masters = nnx.to_pure_dict(mpopt.master_params(state, params))
    expected = jax.tree.map(lambda p: p.astype(jnp.float32), nnx.to_pure_dict(params))
    assert_same_bits(masters, expected)
    old = jnp.ones(2)
    assert_same_bits(mpopt.where_applied(state, jnp.full(2, jnp.nan), old), old)


@accessors
def test_state_without_loss_scale_is_refused(accessor):
    message = "state holds no loss scale: make the optimizer with mpopt.mixed_precision or"
    for state in ((), None, optax.adam(0.1).init(jnp.ones(2)), params_tree()):
        with pytest.raises(ValueError, match=message):
            accessor(state)


@accessors
def test_state_with_two_loss_scales_is_refused(accessor):
    state = mpopt.mixed_precision(optax.sgd(0.1)).init(params_tree())
    with pytest.raises(ValueError, match="state holds 2 loss scales: use one, outermost, or pass"):
        accessor((state, {"other": state}))


@pytest.mark.parametrize("name", ["nonfinite_params", "raise_if_stalled"])
def test_host_side_functions_are_refused_inside_jit(name):
    state = mpopt.mixed_precision(optax.sgd(0.1)).init(params_tree())
    with pytest.raises(ValueError, match=rf"mpopt.{name} reads values: call it outside jit"):
        jax.jit(ACCESSORS[name])(state)


# where_applied


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("applied", [True, False])
def test_where_applied_chooses_bits(run, applied):
    tx = mpopt.mixed_precision(optax.sgd(0.1))
    params = params_tree(jnp.float16)
    state = updated(tx, params, 1.0 if applied else jnp.nan)
    new = {"mean": jnp.array([jnp.nan, 1.0]), "count": jnp.int32(2), "half": jnp.float16(-0.0)}
    old = {"mean": jnp.array([0.5, -0.0]), "count": jnp.int32(1), "half": jnp.float16(3.0)}
    assert_same_bits(run(mpopt.where_applied)(state, new, old), new if applied else old)


def test_where_applied_of_python_numbers():
    state = updated(mpopt.mixed_precision(optax.sgd(0.1)), params_tree(), jnp.nan)
    assert mpopt.where_applied(state, 2, 1) == 1
    assert mpopt.where_applied(state, {"a": 2.5}, {"a": 1.5})["a"] == 1.5


def test_where_applied_for_an_ensemble():
    tx = mpopt.mixed_precision(optax.sgd(0.1))
    params = jnp.ones((3, 2), jnp.float16)
    states = jax.vmap(tx.init)(params)
    _, states = jax.vmap(tx.update)(params.at[1, 0].set(jnp.inf), states, params)
    chosen = mpopt.where_applied(states, jnp.ones((3, 3)), jnp.zeros((3, 3)))
    np.testing.assert_array_equal(chosen, [[1] * 3, [0] * 3, [1] * 3])


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (
            {},
            "The new values of where_applied do not match the old ones: leaf 'bn/mean' is missing",
        ),
        (
            {"bn": {"mean": jnp.ones(2), "var": 1.0}},
            "do not match the old ones: leaf 'bn/var' is only in the new values",
        ),
        (
            {"bn": {"mean": jnp.ones(2, jnp.float16)}},
            r"leaf 'bn/mean' is float16\[2\] in new and float32\[2\] in old. Cast the new value",
        ),
        (
            {"bn": {"mean": jnp.ones(3)}},
            r"leaf 'bn/mean' is float32\[3\] in new and float32\[2\] in old",
        ),
        ({"bn": {"mean": 1.0}}, r"leaf 'bn/mean' is float32\[\] in new and float32\[2\] in old"),
        ({"bn": {"mean": None}}, "leaf 'bn/mean'"),
    ],
)
def test_where_applied_refuses_trees_that_differ(new, message):
    state = mpopt.mixed_precision(optax.sgd(0.1)).init(params_tree())
    with pytest.raises(ValueError, match=message):
        mpopt.where_applied(state, new, {"bn": {"mean": jnp.ones(2)}})


# master_params


def test_master_params_gives_the_full_float32_tree():
    policy = mpopt.Policy(jnp.float16, keep_float32="norm")
    wide = {"w": jnp.float32([0.1, 1e5, -3.0]), "norm": jnp.float32([0.1])}
    tx = mpopt.mixed_precision(optax.adam(0.1), policy=policy)
    state, params = tx.init(wide), policy.cast_to_param(wide)
    assert_same_bits(mpopt.master_params(state, params), wide)
    # Edited params count here as they do in an update.
    edited = params | {"w": params["w"].at[0].set(2.0)}
    expected = wide | {"w": wide["w"].at[0].set(2.0)}
    assert_same_bits(mpopt.master_params(state, edited), expected)
    assert_same_bits(jax.jit(mpopt.master_params)(state, edited), expected)


def test_master_params_passes_what_is_not_trained_and_keeps_wide_dtypes():
    params = {
        "w": jnp.ones(2, jnp.bfloat16),
        "n": jnp.arange(2),
        "key": jax.random.key(0),
        "c": jnp.ones(1, jnp.complex64),
        "f": jax.nn.relu,
        "none": None,
    }
    state = mpopt.mixed_precision(optax.sgd(0.1)).init(params)
    masters = mpopt.master_params(state, params)
    assert masters["w"].dtype == jnp.float32
    assert masters["f"] is params["f"]
    assert masters["none"] is None
    names = ("n", "key", "c")
    assert_same_bits([masters[n] for n in names], [params[n] for n in names])


def test_master_params_after_an_update_round_to_the_params():
    tx = mpopt.mixed_precision(optax.adam(0.01), loss_scale=RULE)
    params = params_tree(jnp.bfloat16)
    params, state = jitted_step(tx)(params, tx.init(params), fill(params, 1.0))
    masters = mpopt.master_params(state, params)
    assert_same_bits(mpopt.Policy(jnp.bfloat16).cast_to_param(masters), params)
    assert_same_bits(masters, state.inner_state.master_params)


def test_master_params_of_a_partition_are_merged():
    tx = optax.partition(
        {
            "x": mpopt.with_master_params(optax.sgd(0.1)),
            "y": mpopt.with_master_params(optax.adam(0.1)),
            "frozen": optax.set_to_zero(),
        },
        {"w": "x", "b": "y", "head": "frozen"},
    )
    params = params_tree(jnp.float16) | {"head": jnp.ones(2, jnp.float16)}
    params, state = jitted_step(tx)(params, tx.init(params), fill(params, 1e-4))
    masters = mpopt.master_params(state, params)
    assert {x.dtype.name for x in jax.tree.leaves(masters)} == {"float32"}
    assert_same_bits(masters["head"], jnp.ones(2))
    original = params_tree(jnp.float16)["w"].astype(jnp.float32)
    np.testing.assert_allclose(masters["w"], original - np.float32(1e-5), atol=1e-6)
    assert np.any(np.asarray(masters["w"]) != np.asarray(params["w"], np.float32))


def test_master_params_mismatches_are_refused():
    params = {"net": {"w": jnp.ones(2, jnp.float16)}}
    state = mpopt.with_master_params(optax.sgd(0.1)).init(params)
    with pytest.raises(ValueError, match="holds no master params: make the optimizer with mpopt"):
        mpopt.master_params(optax.sgd(0.1).init(params), params)
    with pytest.raises(ValueError, match="holds two masters for params leaf 'net/w'"):
        mpopt.master_params((state, state), params)
    with pytest.raises(ValueError, match=r"leaf 'net/w' has shape \(3,\), its master has \(2,\)"):
        mpopt.master_params(state, {"net": {"w": jnp.ones(3, jnp.float16)}})
    message = "has a master for 'net/w', params have no such leaf. Pass the tree that tx.init"
    with pytest.raises(ValueError, match=message):
        mpopt.master_params(state, params["net"])


# nonfinite_params and raise_if_stalled


def test_nonfinite_params_names_the_leaves_of_the_last_skipped_step():
    tx = mpopt.mixed_precision(optax.sgd(0.1))
    params = {
        "encoder": [{"kernel": jnp.ones(2, jnp.float16)}, {"kernel": jnp.ones(2)}],
        "n": jnp.arange(2),
        "head": {"bias": jnp.ones(1, jnp.bfloat16)},
    }
    clean = jax.tree.map(jnp.ones_like, params)
    first = jax.tree.map(jnp.copy, clean)
    first["encoder"][1]["kernel"] = jnp.array([1.0, jnp.nan])
    second = jax.tree.map(jnp.copy, clean)
    second["encoder"][0]["kernel"] = jnp.array([jnp.inf, 1.0], jnp.float16)
    second["head"]["bias"] = jnp.array([-jnp.inf], jnp.bfloat16)
    state = tx.init(params)
    assert mpopt.nonfinite_params(state, params) == []
    for grads, expected in [
        (clean, []),
        (first, ["encoder/1/kernel"]),
        (clean, ["encoder/1/kernel"]),
        (second, ["encoder/0/kernel", "head/bias"]),
    ]:
        _, state = jax.jit(tx.update)(grads, state, params)
        assert mpopt.nonfinite_params(state, params) == expected


@pytest.mark.parametrize("nest", ["partition", "masked", "deep"])
def test_nonfinite_params_names_leaves_of_the_full_tree(nest):
    # Inside, the transformation sees "w" alone, or in other positions.
    tx = NESTED[nest](mpopt.mixed_precision(optax.sgd(0.1)))
    params = params_tree(jnp.float16)
    state = updated(tx, params, fill(params, 1.0) | {"w": jnp.full((3, 5), jnp.nan, jnp.float16)})
    assert mpopt.nonfinite_params(state, params) == ["w"]
    with pytest.raises(FloatingPointError, match="Non-finite gradients: w$"):
        mpopt.raise_if_stalled(state, params, 0)


def test_nonfinite_params_of_an_ensemble_counts_any_member():
    tx = mpopt.mixed_precision(optax.sgd(0.1))
    params = {"a": jnp.ones((3, 2), jnp.float16), "b": jnp.ones((3, 2), jnp.float16)}
    states = jax.vmap(tx.init)(params)
    grads = params | {"b": params["b"].at[2].set(jnp.inf)}
    _, states = jax.jit(jax.vmap(tx.update))(grads, states, params)
    assert mpopt.nonfinite_params(states, params) == ["b"]
    with pytest.raises(FloatingPointError, match="^1 steps in a row.*gradients: b$"):
        mpopt.raise_if_stalled(states, params, 0)


def test_nonfinite_params_of_another_tree_still_counts_the_leaves():
    params = params_tree(jnp.float16)
    state = updated(mpopt.mixed_precision(optax.sgd(0.1)), params, jnp.nan)
    names = mpopt.nonfinite_params(state, {"other": jnp.ones(1), "w": params["w"]})
    assert names == ["leaf 0 of the 2 that the optimizer sees", "w"]


def test_nonfinite_params_of_an_empty_tree():
    state = mpopt.mixed_precision(optax.sgd(0.1)).init({})
    assert mpopt.nonfinite_params(state, {}) == []


@pytest.mark.parametrize("skips", [0, 1, 3])
def test_raise_if_stalled_raises_above_the_tolerated_number(skips):
    params = params_tree(jnp.float16)
    state = updated(
        mpopt.mixed_precision(optax.sgd(0.1), loss_scale=RULE), params, *[jnp.nan] * skips
    )
    for tolerated in range(skips, skips + 2):
        mpopt.raise_if_stalled(state, params, tolerated)
    if skips:
        message = (
            f"^{skips} steps in a row were skipped, loss scale {64 / 2**skips:g}. "
            "Non-finite gradients: b, w$"
        )
        with pytest.raises(FloatingPointError, match=message):
            mpopt.raise_if_stalled(state, params, skips - 1)


def test_raise_if_stalled_forgets_after_an_applied_step():
    params = params_tree(jnp.float16)
    tx = mpopt.mixed_precision(optax.sgd(0.1))
    mpopt.raise_if_stalled(updated(tx, params, jnp.nan, jnp.nan, 1.0), params, 0)


def test_raise_if_stalled_lists_ten_leaves():
    params = {f"layer{i:02}": jnp.ones(1, jnp.float16) for i in range(13)}
    state = updated(mpopt.mixed_precision(optax.sgd(0.1)), params, jnp.nan)
    with pytest.raises(FloatingPointError, match="layer00, .*, layer09 and 3 more$"):
        mpopt.raise_if_stalled(state, params, 0)


@pytest.mark.parametrize("params", [params_tree(jnp.float16), {}], ids=["params", "empty"])
def test_raise_if_stalled_names_a_broken_scale(params):
    broken = mpopt.LossScaleState(float("inf"), 0, 1)
    rule = mpopt.LossScale(lambda: broken, lambda state, finite: broken)
    state = updated(mpopt.mixed_precision(optax.sgd(0.1), loss_scale=rule), params, params)
    with pytest.raises(FloatingPointError, match="none; the loss scale itself is not finite"):
        mpopt.raise_if_stalled(state, params, 0)
