"""The loss side of a step: scale the derivative, leave the value."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpopt import _tree
from mpopt._scaling import find_loss_scale_state

PyTree = Any


def scale_loss(loss: jax.Array, opt_state: PyTree) -> jax.Array:
    """Returns the loss unchanged, with a derivative multiplied by the loss scale.

    Call it on the loss inside the function that is differentiated. It works in forward and
    reverse mode and in higher derivatives.

    Args:
        loss: the loss, any real float array, best float32: the cotangent of a float16 loss
            overflows from a scale of 2^16 on.
        opt_state: optimizer state that holds a loss scale, at any depth.

    Returns:
        The loss in float32 (float64 stays), same value.

    Raises:
        ValueError: where `opt_state` holds no loss scale, or several, or one inside a wrapper
            that belongs inside it (`optax.MultiSteps`, `optax.apply_if_finite`); the scale is no
            float32; or the loss is no float.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import mpopt
        >>> tx = mpopt.mixed_precision(optax.sgd(0.1), loss_scale=mpopt.static_loss_scale(1024.0))
        >>> params = jnp.array(3.0)
        >>> state = tx.init(params)
        >>> value, grad = jax.value_and_grad(lambda p: mpopt.scale_loss(p * p, state))(params)
        >>> float(value), float(grad)
        (9.0, 6144.0)
    """
    dtype = _tree.leaf_dtype(loss)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"The loss must be a real float, got {dtype or type(loss).__name__}. Where a function "
            "returns (loss, aux), scale the loss alone: mpopt.value_and_grad(fun, has_aux=True)."
        )
    scale = find_loss_scale_state(opt_state).loss_scale_state.loss_scale
    _tree.check_state_dtype("loss_scale", scale, jnp.float32)
    # A float that was set by hand has no dtype to convert from outside jit.
    scale = jnp.asarray(scale, jnp.float32)
    return _scale_derivative(jnp.asarray(loss, jnp.promote_types(dtype, jnp.float32)), scale)


@jax.custom_jvp
def _scale_derivative(loss: jax.Array, scale: jax.Array) -> jax.Array:
    del scale
    return loss


@_scale_derivative.defjvp
def _scale_derivative_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    loss, scale = primals
    return loss, tangents[0] * scale.astype(loss.dtype)


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, with a loss scale.

    Args:
        fun: the loss function; returns a scalar loss, or `(loss, aux)` with `has_aux`.
        argnums: the positional arguments to differentiate.
        has_aux: whether `fun` returns `(loss, aux)`.

    Returns:
        A function with the arguments of `fun` and a keyword `opt_state=`. It returns the true
        loss (or `(loss, aux)`) and the *scaled* gradients, which `tx.update` expects.

    Raises:
        ValueError: as :func:`scale_loss`, when called.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import mpopt
        >>> tx = mpopt.mixed_precision(optax.sgd(0.1), loss_scale=mpopt.static_loss_scale(16.0))
        >>> params = jnp.array(3.0)
        >>> state = tx.init(params)
        >>> loss, grads = mpopt.value_and_grad(lambda p: p * p)(params, opt_state=state)
        >>> float(loss), float(grads)
        (9.0, 96.0)
    """

    def wrapped(*args: Any, opt_state: PyTree, **kwargs: Any) -> Any:
        def scaled(*args: Any, **kwargs: Any) -> Any:
            out = fun(*args, **kwargs)
            if has_aux:
                loss, aux = out
                return scale_loss(loss, opt_state), aux
            return scale_loss(out, opt_state)

        return jax.value_and_grad(scaled, argnums=argnums, has_aux=has_aux)(*args, **kwargs)

    return wrapped
