"""Pytree plumbing that the public functions rest on."""

import enum

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits

from mpopt import _tree


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        (1.0, [""]),
        ({"a": {"b": [1.0, (2.0,)]}}, ["a/b/0", "a/b/1/0"]),
        ({1: 1.0, 2: [3.0]}, ["1", "2/0"]),
        ({(0, "x"): 1.0}, ["(0, 'x')"]),
        (optax.EmptyState(), []),
        (optax.TraceState(trace={"w": 1.0}), ["trace/w"]),
        ({"a": None, "b": 1.0}, ["b"]),
    ],
)
def test_key_paths(tree, paths):
    assert [path for path, _ in _tree.leaves_with_paths(tree)] == paths


def test_key_paths_of_variables_leave_out_their_own_key():
    state = nnx.State({"layer": {"kernel": nnx.Param(jnp.ones(2)), "table": nnx.Param({"x": 1.0})}})
    paths = [path for path, _ in _tree.leaves_with_paths(state)]
    assert paths[0] == "layer/kernel"
    assert len(paths) == len(jax.tree.leaves(state))


def test_map_keeps_structure_and_order():
    tree = {"b": [1, 2], "a": optax.TraceState((3,))}
    assert _tree.map_with_paths(lambda path, leaf: (path, leaf), tree) == {
        "a": optax.TraceState((("a/trace/0", 3),)),
        "b": [("b/0", 1), ("b/1", 2)],
    }


def test_variables_are_recognised_without_flax():
    assert _tree.is_variable(nnx.Param(jnp.ones(1)))
    assert not _tree.is_variable(jnp.ones(1))
    assert not _tree.is_variable(type("Variable", (), {})())
    assert _tree.unwrap(nnx.Param(jnp.float32(3.0))) == 3.0
    assert _tree.unwrap("x") == "x"


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (jnp.ones(1, jnp.bfloat16), "bfloat16"),
        (np.ones(1), "float32"),
        (1.5, "float32"),
        (2, "int32"),
        (True, "bool"),
        (1j, "complex64"),
        (np.float16(1), "float16"),
    ],
)
def test_dtype_that_jax_gives_a_leaf(leaf, expected):
    assert _tree.leaf_dtype(leaf) == jnp.dtype(expected)
    assert _tree.is_inexact(leaf) == (expected not in ("int32", "bool"))


@pytest.mark.parametrize("leaf", [None, "x", jax.nn.relu, Color.RED, object()])
def test_leaf_that_is_no_array_has_no_dtype(leaf):
    assert _tree.leaf_dtype(leaf) is None
    assert not _tree.is_inexact(leaf)
    assert not _tree.is_narrow(leaf)


def test_own_buffers_copies_what_is_shared_and_nothing_else():
    shared, own = jnp.ones(4), jnp.zeros(4)
    other = {"p": jnp.ones(2)}
    tree = {
        "a": shared,
        "b": shared,
        "c": own,
        "d": other["p"],
        "e": 2.0,
        "f": np.ones(3),
        "g": len,
    }
    result = _tree.own_buffers(tree, other)
    assert result["a"] is shared
    assert result["c"] is own
    assert result["g"] is len
    leaves = [result[name] for name in "abcdef"] + [other["p"]]
    pointers = [leaf.unsafe_buffer_pointer() for leaf in leaves]
    assert len(set(pointers)) == len(pointers)
    assert not any(leaf.weak_type for leaf in leaves)
    assert_same_bits(result["d"], other["p"])


def test_own_buffers_under_jit():
    tree = jax.jit(lambda x: _tree.own_buffers({"a": x, "b": x, "c": 1.0}))(jnp.ones(2))
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(tree))
