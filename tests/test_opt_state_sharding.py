"""Which dimension of which leaf is split over the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, needs_eight_devices

import mpopt
from mpopt import _tree

pytestmark = needs_eight_devices


def specs(tree, mesh, *args, **kwargs):
    """Specs by key path; those of rank 0 and the trailing Nones left out."""
    sharding = mpopt.opt_state_sharding(tree, mesh, *args, **kwargs)
    assert jax.tree.structure(sharding) == jax.tree.structure(tree)
    return {path: tuple(s.spec) for path, s in _tree.leaves_with_paths(sharding) if any(s.spec)}


def arrays(*shapes, dtype=jnp.float32):
    return {str(i): jax.ShapeDtypeStruct(shape, dtype) for i, shape in enumerate(shapes)}


def test_largest_divisible_dimension_is_split_and_the_first_of_equal_ones():
    tree = arrays((16, 32), (32, 16), (16, 16), (100, 8), (9, 7), (), (24,), (8, 0))
    assert specs(tree, make_mesh(), "data", min_size=1) == {
        "0": (None, "data"),
        "1": ("data", None),
        "2": ("data", None),
        "3": (None, "data"),
        "6": ("data",),
    }


def test_small_leaves_and_integer_vectors_stay_replicated():
    tree = arrays((128, 128), (128, 127), (16384,))
    assert set(specs(tree, make_mesh(), "data")) == {"0", "2"}
    assert set(specs(arrays((4, 4), (16,)), make_mesh((2,)), "data", min_size=17)) == set()
    integers = arrays((64, 64), (64,), dtype=jnp.int32)
    assert set(specs(integers, make_mesh(), "data", min_size=1)) == {"0"}


def test_several_axes_split_one_dimension():
    mesh = make_mesh((2, 2, 2), ("data", "replica", "model"))
    assert specs(arrays((6, 8)), mesh, ("data", "replica"), min_size=1) == {
        "0": (None, ("data", "replica"))
    }


def test_without_an_axis_the_state_follows_the_params():
    mesh = make_mesh((4, 2), ("data", "model"))
    params = {
        "kernel": jax.ShapeDtypeStruct(
            (8, 4), jnp.float32, sharding=NamedSharding(mesh, P("data", "model"))
        ),
        "bias": jax.ShapeDtypeStruct((4,), jnp.float32),
    }
    tx = mpopt.mixed_precision(optax.adafactor(0.1, min_dim_size_to_factor=2), policy=half())
    state = jax.eval_shape(tx.init, params)
    found = specs(state, mesh, params=params)
    # Adafactor's rows and columns have the kernel's key and another shape: they stay whole.
    assert found == {"inner_state/master_params/kernel": ("data", "model")}


def half(keep_float32=None):
    return mpopt.Policy(jnp.float16, keep_float32=keep_float32)


@pytest.mark.parametrize("source", ["params", "state"])
def test_split_params_keep_their_axes_and_take_the_data_axis_on_a_free_dimension(source):
    mesh = make_mesh((4, 2), ("data", "model"))
    layout = {"wide": P(None, "model"), "tall": P("model"), "full": P("data", "model")}
    params = {
        name: jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, spec))
        for name, spec in layout.items()
    }
    tx = mpopt.mixed_precision(optax.sgd(0.1, momentum=0.9), policy=half())
    # An eager init copies the layout; shapes do not have it.
    state = tx.init(params) if source == "state" else jax.eval_shape(tx.init, params)
    given = {} if source == "state" else {"params": params}
    found = specs(state, mesh, "data", min_size=1, **given)
    expected = {"wide": ("data", "model"), "tall": ("model", "data"), "full": ("data", "model")}
    assert found == {
        f"inner_state/{part}/{name}": spec
        for part in ("master_params", "inner_state/0/trace")
        for name, spec in expected.items()
    }


def test_rule_by_key_path_goes_first():
    def rule(path, leaf):
        if path.endswith("embedding"):
            return P("data")
        return P() if "/nu/" in path else None

    params = {"embedding": jnp.ones((8, 512)), "kernel": jnp.ones((8, 512))}
    tx = mpopt.mixed_precision(optax.adam(0.1), policy=half())
    found = specs(jax.eval_shape(tx.init, params), make_mesh(), "data", min_size=1, rule=rule)
    assert found == {
        "inner_state/master_params/embedding": ("data",),
        "inner_state/master_params/kernel": (None, "data"),
        "inner_state/inner_state/0/mu/embedding": ("data",),
        "inner_state/inner_state/0/mu/kernel": (None, "data"),
        "inner_state/inner_state/0/nu/embedding": ("data",),
    }


NESTED = {
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "masked": optax.masked(optax.adam(0.1), {"norm": False, "kernel": True}),
    "partition": optax.partition(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.9)}, {"norm": "b", "kernel": "a"}
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(0.1),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "add_noise": optax.add_noise(0.1, 0.5, key=jax.random.key(0)),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_states_are_split_and_train(name):
    mesh = make_mesh()
    params_f32 = {"norm": jnp.ones(8), "kernel": jnp.ones((16, 8))}
    policy = half("norm")
    tx = mpopt.mixed_precision(NESTED[name], policy=policy)
    sharding = mpopt.opt_state_sharding(
        jax.eval_shape(tx.init, params_f32), mesh, "data", min_size=1
    )
    state = jax.jit(tx.init, out_shardings=sharding)(params_f32)
    params = jax.device_put(policy.cast_to_param(params_f32), NamedSharding(mesh, P()))
    _, new = jax.jit(tx.update, out_shardings=(None, sharding))(params, state, params)
    for leaf in jax.tree.leaves(new):
        per_device = leaf.addressable_shards[0].data.shape
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        assert np.prod(per_device) == leaf.size / (8 if leaf.ndim and floating else 1)
    again = jax.device_put(new, sharding)
    assert jax.tree.structure(again) == jax.tree.structure(new)


def test_nnx_optimizer_state_is_split_and_trains():
    mesh = make_mesh()
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    tx = mpopt.mixed_precision(optax.adam(0.1), policy=half())
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    nnx.update(model, half().cast_to_param(nnx.state(model, nnx.Param)))
    found = specs(optimizer.opt_state, mesh, "data", min_size=1)
    assert found["inner_state/master_params/kernel"] == ("data", None)
    assert found["inner_state/inner_state/0/nu/bias"] == ("data",)
    sharding = mpopt.opt_state_sharding(optimizer.opt_state, mesh, "data", min_size=1)
    optimizer.opt_state = jax.device_put(optimizer.opt_state, sharding)
    params = jax.device_put(nnx.state(model, nnx.Param), NamedSharding(mesh, P()))
    nnx.update(model, params)

    @nnx.jit
    def step(model, optimizer, x):
        def loss(model):
            return mpopt.scale_loss(jnp.mean(model(x) ** 2), optimizer.opt_state)

        optimizer.update(model, nnx.grad(loss)(model))

    step(model, optimizer, jnp.ones((8, 16), jnp.float16))
    masters = optimizer.opt_state.inner_state.master_params["kernel"][...]
    assert masters.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
    assert mpopt.grads_finite(optimizer.opt_state)


BAD = {
    "mesh": ({"mesh": jax.devices()}, "mesh must be a jax.sharding.Mesh"),
    "axis_name": ({"axis_name": "model"}, r"axis_name='model' is no axis .* \{'data': 8\}"),
    "min_size": ({"min_size": -1}, "min_size must be a number of elements, 0 or more, got -1"),
    "min_size_type": ({"min_size": 0.5}, "min_size must be a number of elements"),
    "rule": ({"rule": r"kernel"}, r"rule must be rule\(key_path, leaf\)"),
    "returned": (
        {"rule": lambda path, leaf: "data"},
        "rule returned 'data' for opt_state leaf 'a'",
    ),
    "rank": (
        {"rule": lambda path, leaf: P(None, None, "data")},
        r"does not fit opt_state leaf 'a' of shape \(8, 12\) .* 3 entries for 2 dimensions",
    ),
    "divisible": (
        {"rule": lambda path, leaf: P(None, "data")},
        r"does not fit opt_state leaf 'a' of shape \(8, 12\) on a mesh with axes \{'data': 8\}",
    ),
    "unknown": ({"rule": lambda path, leaf: P("x")}, "does not fit opt_state leaf 'a'.*x"),
    "twice": ({"rule": lambda path, leaf: P("data", "data")}, "does not fit opt_state leaf 'a'"),
    "function": ({"opt_state": {"a": jnp.tanh}}, "opt_state leaf 'a' is .*, which is no array"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_with_its_remedy(case):
    arguments, message = BAD[case]
    good = {"opt_state": {"a": jnp.ones((8, 12))}, "mesh": make_mesh(), "axis_name": "data"}
    with pytest.raises(ValueError, match=message):
        mpopt.opt_state_sharding(**{**good, **arguments})


def test_params_on_another_mesh_are_refused():
    other = NamedSharding(make_mesh((4,), ("batch",)), P("batch"))
    params = {"a": jax.device_put(jnp.ones(8), other)}
    for given in ({"opt_state": params}, {"opt_state": {"mu": params}, "params": params}):
        with pytest.raises(ValueError, match="leaf 'a' is on a mesh with axes .*'batch': 4"):
            mpopt.opt_state_sharding(mesh=make_mesh(), **given)
