"""Which layer overflows, by name: planted faults in the real model and in small functions."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpopt
from experiments.diagnosis import backward_order, find_overflow, order_names
from experiments.resnet import NORM_PARAMS, init_resnet
from experiments.train_step import make_loss_fn


def dense(params, x):
    x = jax.nn.relu(x @ params["first"]["kernel"])
    return jnp.sum(jnp.tanh(x @ params["second"]["kernel"]).astype(jnp.float32))


def dense_params(first=1.0, second=1.0):
    return {
        "first": {"kernel": jnp.full((4, 4), first, jnp.float16)},
        "second": {"kernel": jnp.full((4, 4), second, jnp.float16)},
    }


X = jnp.ones((2, 4), jnp.float16)


@pytest.mark.parametrize(
    ("params", "layer"),
    [(dense_params(first=6e4), "first"), (dense_params(first=1e3, second=1e2), "second")],
)
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda f: f, id="plain"),
        pytest.param(jax.jit, id="jit"),
        pytest.param(jax.checkpoint, id="checkpoint"),
    ],
)
def test_layer_whose_product_overflows_is_named(params, layer, wrap):
    overflow = find_overflow(wrap(dense), params, X)
    assert (overflow.layer, overflow.operation) == (layer, "dot_general")
    assert overflow.dtype == "float16"
    assert str(overflow).startswith(f"at {layer}: dot_general makes float16 infinity or NaN")


def test_nothing_is_found_where_everything_is_finite():
    assert find_overflow(dense, dense_params(), X) is None


def test_overflow_before_the_first_layer_is_told():
    overflow = find_overflow(lambda params, x: dense(params, x * x), dense_params(), X * 300)
    assert (overflow.layer, overflow.operation) == ("", "mul")
    assert "before the first layer" in str(overflow)
    assert overflow.largest_input == 300


def test_cast_to_16_bits_that_overflows_belongs_to_the_layer_before_it():
    def function(params, x):
        return (x.astype(jnp.float32) * params["scale"]).astype(jnp.float16)

    overflow = find_overflow(function, {"scale": jnp.float32(1e6)}, X)
    assert overflow.operation == "convert_element_type"
    assert overflow.largest_input == 1e6


def test_input_that_is_not_finite_is_not_blamed_on_a_layer():
    assert find_overflow(dense, dense_params(), X * jnp.inf) is None


def test_backward_order_is_that_of_the_computation_not_of_the_names():
    def function(params, x):
        for name in ("z", "a", "m"):
            x = x @ params[name].astype(jnp.float32).T
        return x.sum()

    params = {name: jnp.ones((4, 4), jnp.float16) for name in "amz"}
    assert backward_order(function, params, X) == ["m", "a", "z"]
    assert order_names(["z", "unknown", "m"], ["m", "a", "z"]) == ["m", "z", "unknown"]


@pytest.mark.parametrize("planted", ["stages/0/0/conv2", "stages/1/0/shortcut_conv", "head"])
def test_planted_layer_of_the_resnet_is_found_by_name(planted):
    graphdef, params, batch_stats = init_resnet(
        jax.random.key(0, impl="rbg"),
        num_classes=4,
        in_channels=1,
        width=2,
        stage_sizes=(1, 1),
        dtype=jnp.float16,
    )
    policy = mpopt.Policy(jnp.float16, keep_float32=NORM_PARAMS)
    params = policy.cast_to_param(params)
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        for path, _ in jax.tree.flatten_with_path(params)[0]
    ]
    leaves, treedef = jax.tree.flatten(params)
    index = paths.index(f"{planted}/kernel")
    leaves[index] = jnp.full_like(leaves[index], 6e4)
    params = jax.tree.unflatten(treedef, leaves)
    images = jax.random.uniform(jax.random.key(1), (4, 16, 16, 1), jnp.float16)
    batch = (batch_stats, images, jnp.arange(4))
    loss_fn = make_loss_fn(graphdef, policy)
    assert find_overflow(loss_fn, params, *batch).layer == planted
    order = backward_order(loss_fn, params, *batch)
    assert set(order[:2]) == {"head/bias", "head/kernel"}
    assert order[-1] == "stem_conv/kernel"
    # The names are the ones that the optimizer's state gives.
    state = mpopt.mixed_precision(optax.sgd(0.1)).init(params)
    everything = optax.tree.set(state, nonfinite_leaves=~optax.tree.get(state, "nonfinite_leaves"))
    assert sorted(order) == sorted(mpopt.nonfinite_params(everything, params))
    assert isinstance(params, nnx.State)
