"""Checkpoints: the whole state comes back to the bit, and a template of other dtypes shows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpopt

POLICY = mpopt.Policy(jnp.float16, keep_float32="norm")
PARAMS_F32 = {
    "dense": jnp.array(np.random.RandomState(0).randn(4, 4), jnp.float32),
    "norm": jnp.array(np.random.RandomState(1).randn(4), jnp.float32),
    "step": jnp.array(5, jnp.int32),
}
TX = mpopt.mixed_precision(
    optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0.0, 100)),
    ),
    loss_scale=mpopt.dynamic_loss_scale(1024.0, growth_interval=4, hysteresis=2),
    policy=POLICY,
)
# The fourth and the fifth overflow: the first uses up hysteresis, the second halves the scale.
INPUTS = [np.float16(1e4 if i in (3, 4) else 0.1 + 0.05 * i) for i in range(8)]
TRACES = []


def init():
    return {"params": POLICY.cast_to_param(PARAMS_F32), "opt_state": TX.init(PARAMS_F32)}


@partial(jax.jit, donate_argnums=0)
def train_step(state, x):
    TRACES.append(1)

    def loss_fn(params):
        out = (params["norm"].astype(jnp.float16) * x) @ (params["dense"] * x)
        return mpopt.scale_loss(jnp.sum(jnp.square(out).astype(jnp.float32)), state["opt_state"])

    params = state["params"]
    grads = jax.grad(loss_fn, allow_int=True)(params)
    updates, opt_state = TX.update(grads, state["opt_state"], params)
    return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}


def train(state, inputs):
    for x in inputs:
        state = train_step(state, x)
    return state


def assert_identical(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert (a.dtype, a.shape, a.weak_type) == (b.dtype, b.shape, b.weak_type)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def check_resume(restored):
    """Restored in the middle (hysteresis half used, a count running), it goes on to the bit."""
    whole = train(init(), INPUTS)
    assert_identical(restored, train(init(), INPUTS[:4]))
    assert_identical(train(restored, INPUTS[4:]), whole)
    assert len(TRACES) == 1
    assert float(mpopt.loss_scale(whole["opt_state"])) == 512
    assert int(mpopt.metrics(whole["opt_state"])["total_skips"]) == 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    ocp = pytest.importorskip("orbax.checkpoint")
    path = tmp_path_factory.mktemp("checkpoint") / "step_4"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, train(init(), INPUTS[:4]))
    return path


# The recipe of the README: Orbax casts to the template's dtypes without a word.
def restore_exactly(checkpointer, path, template):
    saved = jax.tree.leaves(checkpointer.metadata(path).item_metadata.tree)
    saved = {leaf.name: leaf.dtype for leaf in saved}
    for key_path, leaf in jax.tree.leaves_with_path(template):
        name = jax.tree_util.keystr(key_path, simple=True, separator=".")
        if saved[name] != leaf.dtype:
            raise ValueError(f"{name} was saved as {saved[name]}, not {leaf.dtype}")
    return checkpointer.restore(path, template)


def test_orbax_restores_the_state_into_an_abstract_template(checkpoint):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        restored = restore_exactly(checkpointer, checkpoint, jax.eval_shape(init))
    check_resume(restored)


def test_orbax_checkpoint_manager(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions()) as manager:
        manager.save(4, args=ocp.args.StandardSave(train(init(), INPUTS[:4])))
        manager.wait_until_finished()
        restored = manager.restore(4, args=ocp.args.StandardRestore(jax.eval_shape(init)))
    check_resume(restored)


def test_orbax_casts_silently_and_the_metadata_check_says_where(checkpoint):
    ocp = pytest.importorskip("orbax.checkpoint")
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) if x.dtype == jnp.float32 else x,
        jax.eval_shape(init),
    )
    with ocp.StandardCheckpointer() as checkpointer:
        cast = checkpointer.restore(checkpoint, template)
        assert cast["opt_state"].inner_state.master_params["dense"].dtype == jnp.bfloat16
        with pytest.raises(ValueError, match="opt_state.* was saved as float32, not bfloat16"):
            restore_exactly(checkpointer, checkpoint, template)
    with pytest.raises(ValueError, match="bfloat16"):
        TX.update(cast["params"], cast["opt_state"], cast["params"])


def bfloat16(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tree)


@pytest.mark.parametrize(
    ("leaf", "spoil"),
    [
        ("master_params/dense", lambda s: s._replace(inner_state=bfloat16(s.inner_state))),
        ("loss_scale", lambda s: s._replace(loss_scale_state=bfloat16(s.loss_scale_state))),
        ("total_skips", lambda s: s._replace(total_skips=jnp.float32(0))),
        ("finite_steps", lambda s: optax.tree.set(s, finite_steps=jnp.float32(0))),
    ],
)
def test_state_restored_into_the_wrong_dtype_is_refused_by_update(leaf, spoil):
    # pytorch#43706: the optimizer state silently takes the dtype of the params.
    state = init()
    with pytest.raises(ValueError, match=leaf):
        TX.update(state["params"], spoil(state["opt_state"]), state["params"])


def test_masters_restored_as_bfloat16_are_refused_without_a_loss_scale_too():
    tx = mpopt.with_master_params(optax.sgd(0.1))
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    with pytest.raises(ValueError, match="w.*bfloat16"):
        tx.update(params, bfloat16(tx.init(params)), params)


def test_flax_msgpack_round_trip_of_a_train_state():
    serialization = pytest.importorskip("flax.serialization")
    train_state = pytest.importorskip("flax.training.train_state")

    def wrapped(state):
        return train_state.TrainState(
            step=jnp.array(4),
            apply_fn=None,
            tx=TX,
            params=state["params"],
            opt_state=state["opt_state"],
        )

    blob = serialization.to_bytes(wrapped(train(init(), INPUTS[:4])))
    restored = jax.tree.map(jnp.asarray, serialization.from_bytes(wrapped(init()), blob))
    check_resume({"params": restored.params, "opt_state": restored.opt_state})


def test_nnx_optimizer_state_survives_split_and_merge(tmp_path):
    nnx = pytest.importorskip("flax.nnx")
    ocp = pytest.importorskip("orbax.checkpoint")

    def make():
        model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        tx = mpopt.mixed_precision(optax.adam(0.1), policy=POLICY)
        optim = nnx.Optimizer(model, tx, wrt=nnx.Param)
        nnx.update(model, POLICY.cast_to_param(nnx.state(model)))
        return model, optim

    @nnx.jit
    def step(model, optim):
        def loss_fn(model):
            out = jnp.sum(model(jnp.ones(4, jnp.float16)).astype(jnp.float32) ** 2)
            return mpopt.scale_loss(out, optim.opt_state)

        optim.update(model, nnx.grad(loss_fn)(model))

    model, optim = make()
    step(model, optim)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "nnx", nnx.to_pure_dict(nnx.state((model, optim))))
    step(model, optim)

    resumed = make()
    with ocp.StandardCheckpointer() as checkpointer:
        template = nnx.to_pure_dict(nnx.state(resumed))
        pure = checkpointer.restore(tmp_path / "nnx", jax.eval_shape(lambda: template))
    state = nnx.state(resumed)
    nnx.replace_by_pure_dict(state, pure)
    nnx.update(resumed, state)
    step(*resumed)
    assert_identical(
        nnx.to_pure_dict(nnx.state(resumed)), nnx.to_pure_dict(nnx.state((model, optim)))
    )


def test_numpy_round_trip_keeps_the_state_and_the_trace():
    state = train(init(), INPUTS[:4])
    on_disk = jax.tree.map(np.asarray, state)  # np.savez, pickle, ...
    check_resume(jax.tree.map(jnp.asarray, on_disk))


def test_resume_without_masters_starts_from_the_rounded_params():
    # apex#180, #480: masters rebuilt from half are not the masters that were left.
    state = train(init(), INPUTS[:4])
    rebuilt = TX.init(state["params"])
    np.testing.assert_array_equal(
        rebuilt.inner_state.master_params["dense"], np.float32(state["params"]["dense"])
    )
    kept = state["opt_state"].inner_state.master_params["dense"]
    assert (np.asarray(kept) != np.float32(state["params"]["dense"])).any()


def test_resume_with_another_rule_clamps_the_restored_scale():
    state = train(init(), INPUTS[:4])
    tx = mpopt.mixed_precision(
        optax.adamw(0.1), loss_scale=mpopt.dynamic_loss_scale(64.0, max_scale=128.0), policy=POLICY
    )
    opt_state = tx.init(PARAMS_F32)._replace(loss_scale_state=state["opt_state"].loss_scale_state)
    grads = jax.tree.map(jnp.ones_like, state["params"])
    _, opt_state = tx.update(grads, opt_state, state["params"])
    assert float(mpopt.loss_scale(opt_state)) == 128
