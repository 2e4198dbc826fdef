"""Every optimizer and every link that optax exports, wrapped: against the same in float32."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_exports as exports
import pytest
from helpers import assert_same_bits, both_dtypes
from test_compositions import INSIDE

import mpopt

pytestmark = pytest.mark.filterwarnings("ignore:.optimistic_adam. is deprecated")

STEPS, SKIPPED = 20, (5, 12)
# Growth after 4 finite steps in a row, backoff after a skipped one: powers of two, so exact.
SCALES = [64.0] * 4 + [128.0] * 2 + [64.0] * 4 + [128.0] * 3 + [64.0] * 4 + [128.0] * 3
PARAMS_F32 = {
    "dense": {"kernel": jnp.array(np.random.RandomState(0).randn(4, 3), jnp.float32)},
    "bias": jnp.array(np.random.RandomState(1).randn(3), jnp.float32),
    "norm": {"scale": jnp.array(np.random.RandomState(2).rand(3) + 0.5, jnp.float32)},
}


# Nothing that optax exports is left out


def test_every_export_is_of_one_kind():
    for name, factory in exports.exported().items():
        assert len(exports.kinds(name, factory)) == 1, (
            f"optax exports {name!r}, which is of the kinds {exports.kinds(name, factory)}. "
            "Sort it into one table of tests/optax_exports.py: OPTIMIZERS or LINKS (with the call "
            "that makes it; tested here), WRAPPERS (with an entry in INSIDE of "
            "tests/test_compositions.py), OWN_TESTS (with the reason and a test) or HELPERS (no "
            "transformation)."
        )
    assert len(exports.names("optimizer")) >= 45 and len(exports.names("link")) >= 50


@pytest.mark.skipif(not hasattr(optax, "monitor"), reason="older than 0.2.8: lacks some names")
def test_tables_have_no_name_that_optax_lacks():
    tables = (
        exports.OPTIMIZERS,
        exports.LINKS,
        exports.WRAPPERS,
        exports.OWN_TESTS,
        exports.HELPERS,
        *(names for _, names in ULPS.values()),
    )
    assert set().union(*tables) <= set(exports.exported())


def test_wrappers_and_exceptions_have_the_tests_that_the_tables_name():
    assert set(INSIDE) >= exports.WRAPPERS
    for _, test in exports.OWN_TESTS.values():
        file, name = test.split("::")
        assert f"def {name}(" in (Path(__file__).parent / file).read_text()


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


def run(name, inner, dtype, compiled=False):
    """Runs the wrapped optimizer and its float32 control on the same unscaled gradients.

    Returns both pairs of float32 params and inner state. The control divides with NumPy.
    """
    policy = mpopt.Policy(dtype, keep_float32="norm")
    rule = mpopt.dynamic_loss_scale(SCALES[0], growth_interval=4)
    tx = mpopt.mixed_precision(inner, loss_scale=rule, policy=policy)
    control = optax.with_extra_args_support(inner)
    update, control_update = tx.update, control.update
    constant = exports.extra_args(name, PARAMS_F32, 0) if name in exports.OBJECTIVE else {}
    update, control_update = partial(update, **constant), partial(control_update, **constant)
    if compiled:
        update, control_update = jax.jit(update), jax.jit(control_update)

    opt_state, params = tx.init(PARAMS_F32), policy.cast_to_param(PARAMS_F32)
    control_params = jax.tree.map(jnp.copy, PARAMS_F32)
    control_state = control.init(control_params)
    for step, grads in enumerate(gradients(dtype)):
        assert mpopt.loss_scale(opt_state) == SCALES[step]
        extra = {} if constant else exports.extra_args(name, control_params, step)
        updates, opt_state = update(grads, opt_state, params, **extra)
        params = optax.apply_updates(params, updates)
        assert bool(mpopt.grads_finite(opt_state)) == (step not in SKIPPED)
        if step not in SKIPPED:
            scale = np.float32(SCALES[step])
            unscaled = jax.tree.map(lambda g, s=scale: jnp.asarray(np.float32(g) / s), grads)
            updates, control_state = control_update(
                unscaled, control_state, control_params, **extra
            )
            control_params = optax.apply_updates(control_params, updates)
    masters = mpopt.master_params(opt_state, params)
    assert_same_bits(params, policy.cast_to_param(masters))
    return (masters, opt_state.inner_state.inner_state), (control_params, control_state)


# Op by op


@both_dtypes
@pytest.mark.parametrize("name", exports.names("optimizer"))
def test_masters_and_state_equal_float32_to_the_bit_op_by_op(name, dtype):
    assert_same_bits(*run(name, exports.make_optimizer(name), dtype))


@both_dtypes
@pytest.mark.parametrize("name", exports.names("link"))
def test_link_equals_float32_to_the_bit_op_by_op(name, dtype):
    assert_same_bits(*run(name, exports.make_link(name), dtype))


# Compiled: XLA contracts multiply-adds differently in two programs

# The bound of a class, in float32 ulps of the largest element of a leaf, and what was measured at
# most over both dtypes, all masters and all leaves of the inner state: (optax 0.2.6 on jax 0.10.2,
# optax 0.2.8 on jax 0.12.0.1), AMD EPYC.
ULPS = {
    "products of matrices": (24, {"muon"}),  # (1.9, 7.0)
    "sums of several averages": (16, {"ademamix", "adan", "adopt", "dowg"}),  # (4.7, 4.7)
}
ULPS_OF_ALL_OTHERS = 8  # (2.6, 2.5)


def ulps(actual, expected):
    """The largest difference of two leaves, in float32 ulps of the largest element."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if not jnp.issubdtype(actual.dtype, jnp.floating):
        assert_same_bits(actual, expected)
        return 0.0
    actual, expected = np.float64(actual), np.float64(expected)
    difference = np.where(actual == expected, 0.0, np.abs(actual - expected)).max(initial=0.0)
    return difference / (2.0**-23 * np.abs(expected).max()) if difference else 0.0


@both_dtypes
@pytest.mark.parametrize("name", exports.names("optimizer"))
def test_masters_and_state_stay_within_ulps_of_float32_compiled(name, dtype):
    ours, theirs = run(name, exports.make_optimizer(name), dtype, compiled=True)
    differences = jax.tree.map(ulps, ours, theirs)
    bounds = [bound for bound, names in ULPS.values() if name in names]
    assert max(jax.tree.leaves(differences)) <= (bounds or [ULPS_OF_ALL_OTHERS])[0]


def test_lookahead_inside_is_refused_by_name():
    # Its params are two trees, its gradients one.
    inner = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
    tx = mpopt.mixed_precision(inner)
    params = optax.LookaheadParams.init_synced({"w": jnp.ones(2, jnp.float16)})
    with pytest.raises(ValueError, match="fast/w.*missing from the gradients"):
        tx.update({"w": jnp.ones(2, jnp.float16)}, tx.init(params), params)
