"""What several test files share: bits, NumPy's rounding as the oracle, a jitted step."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

both_dtypes = pytest.mark.parametrize(
    "dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"]
)
NUMPY_DTYPE = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def bits(x):
    """The bits of an array (or of a PRNG key), as unsigned integers."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    if x.dtype.kind == "c":
        x = np.stack([x.real, x.imag])
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def assert_same_bits(actual, expected):
    """Both trees have the same structure, dtypes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))


def numpy_cast(x, dtype):
    """NumPy's rounding to a 16-bit dtype, with overflow at the largest finite value."""
    dtype = NUMPY_DTYPE[jnp.dtype(dtype).name]
    largest = ml_dtypes.finfo(dtype).max
    with np.errstate(over="ignore", invalid="ignore"):
        cast = np.asarray(x, np.float32).astype(dtype)
    return np.where(np.isinf(cast), np.copysign(largest, cast), cast).astype(dtype)


def random_bits(seed, size, dtype=np.float32):
    """Values of all magnitudes: random bits, NaN and inf among them."""
    dtype = np.dtype(dtype)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    bits = np.random.RandomState(seed).randint(0, 2 ** (8 * dtype.itemsize), size, np.uint64)
    return bits.astype(unsigned).view(dtype)


def params_tree(dtype=jnp.float32, seed=0):
    """A small tree with a matrix and a vector."""
    rng = np.random.RandomState(seed)
    return {"w": jnp.array(rng.randn(3, 5), dtype), "b": jnp.array(rng.randn(4), dtype)}


def jitted_step(tx):
    """A compiled `(params, opt_state, scaled_grads) -> (params, opt_state)`."""

    @jax.jit
    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def fill(params, value):
    """Gradients like `params`, all of one value."""
    return jax.tree.map(lambda p: jnp.full_like(p, value), params)
