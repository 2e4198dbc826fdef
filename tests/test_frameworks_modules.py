"""Flax, Equinox and Haiku train in float16 through an overflow with mpopt as their optimizer."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpopt

INITIAL_SCALE = 1024.0
OVERFLOWING = 2
# A batch so large that its gradients exceed float16.
BATCHES = [
    np.random.RandomState(i).randn(4, 4).astype(np.float16) * (1e4 if i == OVERFLOWING else 1)
    for i in range(5)
]
POLICY = mpopt.Policy(jnp.float16, keep_float32=r"(?i)norm")


def optimizer():
    return mpopt.mixed_precision(
        optax.adamw(0.01),
        loss_scale=mpopt.dynamic_loss_scale(INITIAL_SCALE),
        policy=POLICY,
    )


def squared(out):
    return jnp.mean(jnp.square(out).astype(jnp.float32))


def snapshot(tree):
    return [np.asarray(leaf).copy() for leaf in jax.tree.leaves(tree)]


def assert_same_bits(tree, other):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def check_training(train_step, params, opt_state):
    """Trains through the overflow; `params()` and `opt_state()` read the current values."""
    for i, batch in enumerate(BATCHES):
        before = snapshot(params())
        inner_before = snapshot(opt_state().inner_state)
        train_step(batch)
        if i == OVERFLOWING:
            assert_same_bits(params(), before)
            assert_same_bits(opt_state().inner_state, inner_before)
        else:
            assert any((a != b).any() for a, b in zip(snapshot(params()), before, strict=True))
        assert bool(mpopt.grads_finite(opt_state())) == (i != OVERFLOWING)
    check_accessors(opt_state(), params())
    assert float(mpopt.loss_scale(opt_state())) == INITIAL_SCALE / 2
    assert int(mpopt.metrics(opt_state())["total_skips"]) == 1
    assert mpopt.nonfinite_params(opt_state(), params())
    mpopt.raise_if_stalled(opt_state(), params(), 1)


def check_accessors(opt_state, params):
    """The same plain arrays inside and outside jit, and masters that round to the params."""

    def read(opt_state, params):
        return {
            "scale": mpopt.loss_scale(opt_state),
            "finite": mpopt.grads_finite(opt_state),
            "metrics": mpopt.metrics(opt_state),
            "masters": jax.tree.leaves(mpopt.master_params(opt_state, params)),
            "kept": mpopt.where_applied(opt_state, jnp.ones(2), jnp.zeros(2)),
            "unscaled": mpopt.unscale(jnp.full(2, 1024.0, jnp.float16), opt_state),
            "loss": mpopt.scale_loss(jnp.float16(3.0), opt_state),
        }

    outside = read(opt_state, params)
    assert_same_bits(jax.jit(read)(opt_state, params), outside)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(outside))
    for param, master in zip(jax.tree.leaves(params), outside["masters"], strict=True):
        if jnp.issubdtype(param.dtype, jnp.floating):
            assert master.dtype == jnp.float32
            np.testing.assert_array_equal(master.astype(param.dtype), param)


def test_linen_train_state():
    nn = pytest.importorskip("flax.linen")
    train_state = pytest.importorskip("flax.training.train_state")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, dtype=jnp.float16)(x)
            return nn.Dense(4, dtype=jnp.float16)(nn.LayerNorm(dtype=jnp.float16)(x))

    model = Model()
    params_f32 = model.init(jax.random.key(0), BATCHES[0])["params"]
    tx = optimizer()
    state = train_state.TrainState(
        step=jnp.array(0),
        apply_fn=model.apply,
        params=POLICY.cast_to_param(params_f32),
        tx=tx,
        opt_state=tx.init(params_f32),
    )
    traces = []

    @partial(jax.jit, donate_argnums=0)
    def train_step(state, batch):
        traces.append(1)

        def loss_fn(params):
            out = state.apply_fn({"params": params}, batch)
            # A large batch leaves LayerNorm as it came: make the output overflow too.
            out = out * jnp.max(jnp.abs(batch))
            return mpopt.scale_loss(squared(out), state.opt_state)

        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))

    def step(batch):
        nonlocal state
        state = train_step(state, batch)

    check_training(step, lambda: state.params, lambda: state.opt_state)
    assert state.params["LayerNorm_0"]["scale"].dtype == jnp.float32
    assert state.params["Dense_0"]["kernel"].dtype == jnp.float16
    assert len(traces) == 1


def test_linen_train_state_created_from_float32_params_is_refused_until_cast():
    nn = pytest.importorskip("flax.linen")
    train_state = pytest.importorskip("flax.training.train_state")
    model = nn.Dense(1)
    params_f32 = model.init(jax.random.key(0), BATCHES[0])["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params_f32, tx=optimizer())
    with pytest.raises(ValueError, match="bias.*cast_to_param"):
        state.apply_gradients(grads=params_f32)
    state = state.replace(params=POLICY.cast_to_param(params_f32))
    state = state.apply_gradients(grads=state.params)
    assert state.params["kernel"].dtype == jnp.float16


@pytest.mark.parametrize("graph", [True, False])
def test_nnx_optimizer(graph):
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(4, 4, dtype=jnp.float16, rngs=rngs)
            self.norm = nnx.BatchNorm(
                4,
                dtype=jnp.float16,
                promote_dtype=lambda args, *, dtype: args,
                rngs=rngs,
            )
            self.heads = nnx.List([nnx.Linear(4, 4, dtype=jnp.float16, rngs=rngs)])

        def __call__(self, x):
            return self.heads[0](self.norm(self.dense(x)).astype(jnp.float16))

    model = Model(nnx.Rngs(0))
    optim = nnx.Optimizer(model, optimizer(), wrt=nnx.Param, graph=graph)
    nnx.update(model, POLICY.cast_to_param(nnx.state(model, nnx.Param)))
    traces = []

    # Graph mode carries updates of the model and of the optimizer out of jit; tree mode, which
    # treats modules as plain pytrees, returns them.
    @partial(nnx.jit, graph=graph)
    def train_step(model, optim, batch):
        traces.append(1)
        stats_before = jax.tree.map(lambda x: x, nnx.as_pure(nnx.state(model, nnx.BatchStat)))

        def loss_fn(model):
            out = model(batch) * jnp.max(jnp.abs(batch))
            return mpopt.scale_loss(squared(out), optim.opt_state)

        grads = nnx.grad(loss_fn, graph=graph)(model)
        optim.update(model, grads)
        stats = nnx.as_pure(nnx.state(model, nnx.BatchStat))
        nnx.update(model, mpopt.where_applied(optim.opt_state, stats, stats_before))

    check_training(
        lambda batch: train_step(model, optim, batch),
        lambda: nnx.state(model, nnx.Param),
        lambda: optim.opt_state,
    )
    assert len(traces) == 1
    assert all(np.isfinite(x).all() for x in snapshot(nnx.state(model, nnx.BatchStat)))
    assert model.dense.kernel.dtype == jnp.float16
    assert model.norm.scale.dtype == jnp.float32
    assert mpopt.nonfinite_params(optim.opt_state, nnx.state(model, nnx.Param))[-1] in (
        "heads/0/bias",
        "heads/0/kernel",
        "norm/scale",
    )
    # The same names, whether as nnx.State or as the tree of plain arrays that tx sees.
    pure = nnx.as_pure(nnx.state(model, nnx.Param))
    assert mpopt.nonfinite_params(optim.opt_state, pure) == mpopt.nonfinite_params(
        optim.opt_state, nnx.state(model, nnx.Param)
    )


def test_equinox_filter_grad():
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.LayerNorm
        last: eqx.nn.Linear
        calls: jax.Array
        name: str

        def __init__(self, key):
            keys = jax.random.split(key)
            self.first = eqx.nn.Linear(4, 4, use_bias=False, key=keys[0])  # bias is None
            self.norm = eqx.nn.LayerNorm(4)
            self.last = eqx.nn.Linear(4, 4, key=keys[1])
            self.calls = jnp.array(7)
            self.name = "model"

        def __call__(self, x):
            return self.last(self.norm(self.first(x)).astype(x.dtype))

    model_f32 = Model(jax.random.key(0))
    tx = optimizer()
    opt_state = tx.init(eqx.filter(model_f32, eqx.is_inexact_array))
    model = POLICY.cast_to_param(model_f32)
    traces = []

    @eqx.filter_jit(donate="all")
    def train_step(model, opt_state, batch):
        traces.append(1)

        @eqx.filter_grad
        def loss_fn(model):
            out = jax.vmap(model)(batch) * jnp.max(jnp.abs(batch))
            return mpopt.scale_loss(squared(out), opt_state)

        grads = loss_fn(model)
        # Not eqx.apply_updates: it adds without casting back, which gives float32 params.
        params, static = eqx.partition(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, opt_state, params)
        return eqx.combine(optax.apply_updates(params, updates), static), opt_state

    def step(batch):
        nonlocal model, opt_state
        model, opt_state = train_step(model, opt_state, jnp.asarray(batch))

    check_training(step, lambda: eqx.filter(model, eqx.is_inexact_array), lambda: opt_state)
    assert len(traces) == 1
    assert model.first.weight.dtype == model.last.bias.dtype == jnp.float16
    assert model.first.bias is None and model.norm.weight.dtype == jnp.float32
    assert int(model.calls) == 7 and model.name == "model"


def test_equinox_model_passed_whole_keeps_its_other_leaves():
    eqx = pytest.importorskip("equinox")
    model_f32 = eqx.nn.MLP(4, 4, 4, 1, key=jax.random.key(0))  # holds functions
    tx = optimizer()
    opt_state = tx.init(model_f32)
    model = POLICY.cast_to_param(model_f32)
    grads = eqx.filter_grad(lambda m: mpopt.scale_loss(squared(m(BATCHES[0][0])), opt_state))(model)
    updates, opt_state = tx.update(grads, opt_state, model)
    stepped = eqx.combine(
        optax.apply_updates(*eqx.filter((model, updates), eqx.is_inexact_array)), model
    )
    assert stepped.activation is model.activation
    assert stepped.layers[0].weight.dtype == jnp.float16
    exported = mpopt.master_params(opt_state, stepped)
    assert exported.activation is model.activation
    assert exported.layers[0].weight.dtype == jnp.float32


def test_equinox_apply_updates_is_refused_at_the_next_step():
    eqx = pytest.importorskip("equinox")
    params = POLICY.cast_to_param({"w": jnp.ones(4)})
    tx = optimizer()
    opt_state = tx.init({"w": jnp.ones(4)})
    updates, opt_state = tx.update(params, opt_state, params)
    with pytest.raises(ValueError, match="'w' is float32.*optax.apply_updates"):
        tx.update(params, opt_state, eqx.apply_updates(params, updates))


def test_haiku_transform():
    hk = pytest.importorskip("haiku")

    def forward(x):
        x = hk.Linear(4)(x)
        x = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        return hk.Linear(4)(x.astype(jnp.float16))

    model = hk.without_apply_rng(hk.transform(forward))
    params_f32 = jax.tree.map(
        lambda x: x.astype(jnp.float32), model.init(jax.random.key(0), BATCHES[0])
    )
    tx = optimizer()
    opt_state = tx.init(params_f32)
    params = POLICY.cast_to_param(params_f32)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, batch):
        def loss_fn(params):
            out = model.apply(params, batch) * jnp.max(jnp.abs(batch))
            return mpopt.scale_loss(squared(out), opt_state)

        updates, opt_state = tx.update(jax.grad(loss_fn)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def step(batch):
        nonlocal params, opt_state
        params, opt_state = train_step(params, opt_state, batch)

    check_training(step, lambda: params, lambda: opt_state)
    assert params["linear"]["w"].dtype == jnp.float16
    assert params["layer_norm"]["scale"].dtype == jnp.float32
