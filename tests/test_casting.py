"""Policies: which leaves are cast, to what, and by which key path."""

import re
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits, both_dtypes, numpy_cast, random_bits

import mpopt

Block = namedtuple("Block", "kernel norm")


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Linear(2, 3, rngs=rngs)
        self.layers = nnx.List([nnx.LayerNorm(3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])


NET_PATHS = [
    "layers/0/bias",
    "layers/0/scale",
    "layers/1/bias",
    "layers/1/kernel",
    "stem/bias",
    "stem/kernel",
]


def nested_params():
    return {
        "encoder": {
            "layers": [{"norm": {"scale": jnp.ones(2)}}, {"kernel": jnp.full((2, 2), 0.1)}],
            "bn": (jnp.ones(1), jnp.zeros(1)),
        },
        "head": Block(kernel=jnp.full(2, 3.0), norm=jnp.ones(2)),
    }


def paths_seen(tree):
    """The path of each leaf that `keep_float32` is asked about."""
    seen = []
    mpopt.Policy(jnp.float16, keep_float32=lambda path, leaf: seen.append(path)).cast_to_param(tree)
    return seen


@pytest.mark.parametrize("make", [lambda x: x, jnp.dtype, lambda x: jnp.dtype(x).name])
def test_dtypes_in_any_spelling(make):
    policy = mpopt.Policy(make(jnp.bfloat16))
    assert policy.param_dtype == policy.compute_dtype == jnp.bfloat16
    assert policy.output_dtype == jnp.float32
    assert policy == mpopt.Policy(jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert hash(policy) == hash(mpopt.Policy(jnp.bfloat16))


def test_policy_is_frozen():
    with pytest.raises(AttributeError):
        mpopt.Policy(jnp.float16).param_dtype = jnp.float32


@pytest.mark.parametrize(
    "dtype", [jnp.int32, "int8", bool, jnp.complex64, jnp.float8_e4m3fn, jnp.float8_e5m2]
)
@pytest.mark.parametrize("name", ["param_dtype", "compute_dtype", "output_dtype"])
def test_dtype_that_is_no_float_of_16_bits_or_more_is_refused(name, dtype):
    with pytest.raises(ValueError, match=f"^{name} must be float16, bfloat16, float32 or float64"):
        mpopt.Policy(**{"param_dtype": jnp.float16, name: dtype})


@pytest.mark.parametrize("dtype", ["half precision", 16.5, object()])
def test_dtype_that_is_none_is_refused(dtype):
    with pytest.raises(ValueError, match=f"^param_dtype must be.*got {re.escape(repr(dtype))}"):
        mpopt.Policy(dtype)


def test_missing_param_dtype_is_refused():
    with pytest.raises(ValueError, match="^param_dtype must be float16, .* got None"):
        mpopt.Policy(None)


def test_bad_keep_float32_is_refused():
    with pytest.raises(ValueError, match=r"keep_float32='\(norm' is no valid regular expression"):
        mpopt.Policy(jnp.float16, keep_float32="(norm")
    with pytest.raises(ValueError, match="keep_float32 must be a regular expression, callable"):
        mpopt.Policy(jnp.float16, keep_float32=["norm"])


@both_dtypes
@pytest.mark.parametrize(
    "keep",
    [
        r"norm|bn",
        r"(?i)NORM|BN",
        lambda path, leaf: "norm" in path or "bn" in path,
        lambda path, leaf: np.bool_("norm" in path or "bn" in path),
    ],
    ids=["regex", "flags", "callable", "NumPy bool"],
)
def test_keep_float32_by_key_path(dtype, keep):
    policy = mpopt.Policy(dtype, keep_float32=keep)
    cast = policy.cast_to_param(nested_params())
    dtypes = jax.tree.map(lambda x: x.dtype, cast)
    assert dtypes["encoder"]["layers"][0]["norm"]["scale"] == jnp.float32
    assert dtypes["encoder"]["layers"][1]["kernel"] == dtype
    assert dtypes["encoder"]["bn"] == (jnp.float32, jnp.float32)
    assert dtypes["head"] == Block(kernel=dtype, norm=jnp.float32)


def test_keep_float32_by_leaf():
    policy = mpopt.Policy(jnp.float16, keep_float32=lambda path, leaf: leaf.ndim < 2)
    cast = policy.cast_to_param({"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)})
    assert {k: v.dtype.name for k, v in cast.items()} == {"kernel": "float16", "bias": "float32"}


def test_key_paths_are_written_with_slashes():
    assert paths_seen(nested_params()) == [
        "encoder/bn/0",
        "encoder/bn/1",
        "encoder/layers/0/norm/scale",
        "encoder/layers/1/kernel",
        "head/kernel",
        "head/norm",
    ]
    assert paths_seen(jnp.ones(1)) == [""]


def test_nnx_state_and_plain_tree_have_the_same_paths():
    state = nnx.state(Net(), nnx.Param)
    assert paths_seen(state) == NET_PATHS
    assert paths_seen(nnx.to_pure_dict(state)) == NET_PATHS
    policy = mpopt.Policy(jnp.float16, keep_float32=r"^layers/0/\w+$")
    cast = policy.cast_to_param(state)
    assert jax.tree.structure(cast) == jax.tree.structure(state)
    expected = ["float32"] * 2 + ["float16"] * 4
    assert [x.dtype.name for x in jax.tree.leaves(cast)] == expected
    pure = policy.cast_to_param(nnx.to_pure_dict(state))
    assert_same_bits(nnx.to_pure_dict(cast), pure)


def test_rule_for_params_and_for_masters_is_the_same():
    params = nested_params()
    policy = mpopt.Policy(jnp.float16, keep_float32="norm")
    masters = mpopt.with_master_params(optax.sgd(0.1), policy=policy).init(params).master_params
    has_master = [isinstance(x, jax.Array) for x in jax.tree.leaves(masters, is_leaf=_is_masked)]
    narrow = [x.dtype == jnp.float16 for x in jax.tree.leaves(policy.cast_to_param(params))]
    assert has_master == narrow == [True, True, False, True, True, False]


def _is_masked(x):
    return isinstance(x, optax.MaskedNode)


CASTS = ["cast_to_param", "cast_to_compute", "cast_to_output"]


@pytest.mark.parametrize("cast", CASTS)
def test_only_floating_arrays_are_cast(cast):
    policy = mpopt.Policy(jnp.bfloat16, output_dtype=jnp.bfloat16)
    key = jax.random.key(0)
    tree = {
        "int": jnp.arange(3),
        "uint8": np.arange(3, dtype=np.uint8),
        "bool": jnp.array([True]),
        "complex": jnp.ones(2, jnp.complex64),
        "key": key,
        "none": None,
        "function": jax.nn.relu,
        "float": 0.1,
        "number": 3,
        "name": "net",
        "array": jnp.ones(2),
        "numpy": np.ones(2),
        "half": jnp.ones(2, jnp.float16),
        "scalar": np.float32(1.0),
    }
    result = getattr(policy, cast)(tree)
    for name in ("none", "function", "float", "number", "name"):
        assert result[name] is tree[name]
    for name in ("int", "uint8", "bool", "complex", "key"):
        assert result[name].dtype == tree[name].dtype
        assert_same_bits(result[name], tree[name])
    for name in ("array", "numpy", "half", "scalar"):
        assert isinstance(result[name], jax.Array)
        assert result[name].dtype == jnp.bfloat16
        assert not result[name].weak_type


def test_cast_to_param_gives_new_buffers():
    params = {
        "narrow": jnp.ones(8),
        "kept": jnp.ones(8),
        "half": jnp.ones(8, jnp.float16),
        "int": jnp.arange(8),
        "key": jax.random.key(0),
    }
    cast = mpopt.Policy(jnp.float16, keep_float32="kept").cast_to_param(params)
    jax.jit(lambda x: x, donate_argnums=0)(cast)
    for leaf in jax.tree.leaves(params):
        assert not leaf.is_deleted()
    assert float(params["kept"].sum()) == 8


@both_dtypes
@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_cast_to_param_saturates(dtype, run):
    largest = float(jnp.finfo(dtype).max)
    x = jnp.array([3.4e38, -3.4e38, jnp.inf, 0.1, jnp.nan])
    cast = run(mpopt.Policy(dtype).cast_to_param)(x)
    expected = [largest, -largest, largest, float(numpy_cast(0.1, dtype)), np.nan]
    np.testing.assert_array_equal(cast.astype(jnp.float32), np.float32(expected))


def test_cast_between_the_16_bit_formats_rounds_and_saturates():
    x = jnp.array([1e6, -1e6, 1.0078125, 1e-7], jnp.bfloat16)
    cast = mpopt.Policy(jnp.float16).cast_to_param(x)
    assert_same_bits(cast, jnp.asarray(numpy_cast(np.asarray(x), jnp.float16)))


@both_dtypes
def test_params_are_the_rounded_masters_from_the_start(dtype):
    params = {"w": jnp.asarray(np.nan_to_num(random_bits(0, 20_000)))}
    policy = mpopt.Policy(dtype)
    masters = mpopt.with_master_params(optax.sgd(0.1), policy=policy).init(params).master_params
    expected = numpy_cast(masters["w"], dtype).astype(np.float32)
    normal = (np.abs(expected) >= np.finfo(np.float32).smallest_normal) | (expected == 0)
    cast = np.asarray(policy.cast_to_param(params)["w"], np.float32)
    np.testing.assert_array_equal(cast[normal], expected[normal])


def test_cast_to_compute_keeps_gradients_in_the_params_dtype():
    policy = mpopt.Policy(jnp.float32, jnp.bfloat16, keep_float32="w")

    @jax.jit
    @jax.grad
    def grad(params):
        compute = policy.cast_to_compute(params)
        assert compute["w"].dtype == jnp.bfloat16  # keep_float32 is about params
        return policy.cast_to_output(compute["w"].sum())

    assert grad({"w": jnp.ones(3)})["w"].dtype == jnp.float32


def test_float32_policy_changes_nothing():
    params = nested_params()
    policy = mpopt.Policy(jnp.float32)
    assert_same_bits(policy.cast_to_param(params), params)
    assert_same_bits(policy.cast_to_compute(params), params)


def test_float64_policy():
    with jax.enable_x64(True):
        policy = mpopt.Policy(jnp.float64, keep_float32="norm")
        cast = policy.cast_to_param({"w": jnp.float32([0.1]), "norm": np.array([0.1])})
        assert cast["w"].dtype == jnp.float64
        assert cast["norm"].dtype == jnp.float32
        assert float(cast["w"][0]) == float(np.float32(0.1))


def test_float64_is_rounded_once_to_float32_and_then_to_float16():
    with jax.enable_x64(True):
        cast = mpopt.Policy(jnp.float16).cast_to_param(jnp.array([0.1, 1e300, -1e-300]))
    assert_same_bits(cast, jnp.array([0.1, 65504.0, -0.0], jnp.float16))


@pytest.mark.parametrize("tree", [{}, [], (), None, {"a": {}}])
def test_empty_trees(tree):
    policy = mpopt.Policy(jnp.float16)
    for cast in CASTS:
        assert getattr(policy, cast)(tree) == tree
