"""The ResNet step, end to end at tiny shapes, in the three precisions."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpopt
from experiments.augment import Augmentation
from experiments.resnet import NORM_PARAMS, init_resnet
from experiments.train_state import init_train_state, start_epoch
from experiments.train_step import make_train_step

PRECISIONS = ("float16", "bfloat16", "float32")
AUGMENTATION = Augmentation(mean=(0.5,), std=(0.25,), crop_padding=1)
KEY = jax.random.key(1)
ALL = np.arange(16, dtype=np.int32)


class Run(NamedTuple):
    policy: mpopt.Policy
    train_step: Any
    initial: Any
    traces: list


@functools.cache
def make_run(precision: str) -> Run:
    """Compiling takes seconds, so the tests of one precision share a step."""
    policy = mpopt.Policy(jnp.dtype(precision), keep_float32=NORM_PARAMS)
    graphdef, params_f32, batch_stats = init_resnet(
        jax.random.key(0),
        num_classes=4,
        in_channels=1,
        width=4,
        stage_sizes=(1,),
        stem="cifar",
        dtype=policy.compute_dtype,
    )
    is_half = precision == "float16"
    loss_scale = mpopt.dynamic_loss_scale(2.0**10) if is_half else mpopt.static_loss_scale(1.0)
    tx = mpopt.mixed_precision(optax.sgd(0.1, momentum=0.9), policy=policy, loss_scale=loss_scale)
    traces = []

    def update(*args, **kwargs):
        traces.append(1)
        return tx.update(*args, **kwargs)

    initial = jax.jit(lambda *model: init_train_state(*model, tx, policy))(params_f32, batch_stats)
    train_step = make_train_step(graphdef, tx._replace(update=update), policy, AUGMENTATION)
    return Run(policy, train_step, jax.device_get(initial), traces)


def fresh_state(run, loss_scale=None):
    state = jax.device_put(run.initial)
    if loss_scale is not None:
        rule_state = state.opt_state.loss_scale_state._replace(loss_scale=jnp.float32(loss_scale))
        opt_state = state.opt_state._replace(loss_scale_state=rule_state)
        state = state._replace(opt_state=opt_state)
    return state


@pytest.fixture(scope="module")
def examples():
    """Stripes across, stripes down, a chequerboard, and plain images, with noise."""
    rng = np.random.default_rng(0)
    labels = np.arange(16, dtype=np.int32) % 4
    rows, columns = np.indices((8, 8))
    patterns = np.stack([rows % 2, columns % 2, (rows + columns) % 2, 0 * rows])
    noise = rng.integers(0, 60, (16, 8, 8))
    images = (noise + 150 * patterns[labels]).astype(np.uint8)[..., None]
    return jnp.asarray(images), jnp.asarray(labels)


def to_numpy(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same_bits(actual, expected):
    for a, b in zip(to_numpy(actual), to_numpy(expected), strict=True):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_step_learns_and_keeps_dtypes(precision, examples):
    run = make_run(precision)
    state = fresh_state(run)
    dtypes = jax.tree.map(lambda x: x.dtype, state)
    losses = []
    for step in range(15):
        state = run.train_step(start_epoch(state), KEY, *examples, ALL)
        losses.append(float(state.loss_sum))
        assert int(state.step) == step + 1
    assert int(mpopt.metrics(state.opt_state)["total_skips"]) == 0
    assert losses[-1] < 0.5 * losses[0]
    assert jax.tree.map(lambda x: x.dtype, state) == dtypes
    for path, leaf in nnx.to_flat_state(state.params):
        is_norm = any("norm" in str(part) for part in path)
        assert leaf[...].dtype == ("float32" if is_norm else precision), path
    assert all(leaf.dtype == np.float32 for leaf in to_numpy(state.batch_stats))
    masters = mpopt.master_params(state.opt_state, state.params)
    assert_same_bits(run.policy.cast_to_param(masters), state.params)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_first_loss_is_that_of_float32(precision, examples):
    losses = []
    for dtype in (precision, "float32"):
        run = make_run(dtype)
        losses.append(float(run.train_step(fresh_state(run), KEY, *examples, ALL).loss_sum))
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.03)


def test_overflow_keeps_params_statistics_and_masters_to_the_bit(examples):
    run = make_run("float16")
    state = run.train_step(fresh_state(run, loss_scale=2.0**30), KEY, *examples, ALL)
    assert not mpopt.grads_finite(state.opt_state)
    assert_same_bits(state.params, run.initial.params)
    assert_same_bits(state.batch_stats, run.initial.batch_stats)
    assert_same_bits(state.opt_state.inner_state, run.initial.opt_state.inner_state)
    # Above the rule's largest scale, 2**24, it backs off to that at once.
    assert float(mpopt.loss_scale(state.opt_state)) == 2.0**24
    assert int(state.step) == 1
    assert int(state.applied_steps) == 0
    assert float(state.loss_sum) == 0.0

    for _ in range(24):
        state = run.train_step(state, KEY, *examples, ALL)
    skips = int(mpopt.metrics(state.opt_state)["total_skips"])
    assert 0 < int(state.applied_steps) == 25 - skips
    assert all(np.isfinite(leaf).all() for leaf in to_numpy((state.params, state.batch_stats)))
    assert np.isfinite(state.loss_sum)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nan_is_skipped_in_every_precision(precision, examples):
    run = make_run(precision)
    state = fresh_state(run)
    state.params["head"]["bias"][...] = jnp.full_like(state.params["head"]["bias"][...], np.nan)
    before = jax.device_get(state)
    state = run.train_step(state, KEY, *examples, ALL)
    assert_same_bits(state.params, before.params)
    assert_same_bits(state.batch_stats, before.batch_stats)
    assert int(mpopt.metrics(state.opt_state)["total_skips"]) == 1


def test_step_is_traced_once(examples):
    run = make_run("float16")
    state = fresh_state(run, loss_scale=2.0**30)
    rng = np.random.default_rng(0)
    for step in range(20):
        state = start_epoch(state) if step % 5 == 0 else state
        state = run.train_step(state, KEY, *examples, rng.integers(0, 16, 16).astype(np.int32))
    assert 0 < int(mpopt.metrics(state.opt_state)["total_skips"]) < 20
    assert len(run.traces) == 1


def test_same_key_gives_the_same_bits_and_each_step_its_own_augmentation(examples):
    run = make_run("float16")
    results = []
    for _ in range(2):
        state = fresh_state(run)
        for _ in range(3):
            state = run.train_step(state, KEY, *examples, ALL)
        results.append(jax.device_get(state))
    assert_same_bits(*results)

    losses = []
    for step in (0, 1):
        state = fresh_state(run)._replace(step=jnp.array(step, jnp.int32))
        losses.append(float(run.train_step(state, KEY, *examples, ALL).loss_sum))
    assert losses[0] != losses[1]
