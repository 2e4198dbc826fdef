"""The composition: loss scaling around master params around any optimizer."""

from collections.abc import Sequence
from typing import Any

import optax

from mpopt._casting import Policy
from mpopt._loss_scale import LossScale, dynamic_loss_scale
from mpopt._masters import with_master_params
from mpopt._scaling import with_loss_scale


def mixed_precision(
    inner: Any,
    *,
    loss_scale: LossScale | None = None,
    policy: Policy | None = None,
    axis_name: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Mixed-precision training as one optax transformation.

    It is `with_loss_scale(with_master_params(inner, policy=policy), loss_scale,
    axis_name=axis_name)`: unscale, decide whether the step is finite, let `inner` work on float32
    gradients and float32 master params, skip the step or emit updates for the 16-bit params, and
    adjust the scale.

    It goes outermost. Clipping, weight decay, accumulation (`optax.MultiSteps`), masks,
    partitions and injected hyperparameters go *inside*, where gradients are unscaled and params
    are float32. Outside, a clip would clip scaled gradients. `MultiSteps` outside would accumulate
    an overflow: `scale_loss` and the accessors refuse it, and `apply_if_finite`,
    `conditionally_transform`, `contrib.mechanize` and `contrib.sam` too.

    Args:
        inner: any optax optimizer, also one with extra args, or an object with
            `.gradient_transformation()` such as `optax.MultiSteps`.
        loss_scale: the rule; None means :func:`dynamic_loss_scale()`. For bfloat16 use
            `static_loss_scale(1.0)`: guarded, not scaled.
        policy: says which leaves of float32 params will be narrow; None goes by the dtypes of
            the params that `init` gets. With a float32 policy the same code trains in float32.
        axis_name: under `jax.shard_map` and `jax.pmap`, the axes over which all devices must
            agree to skip; without it each decides alone. See :func:`with_loss_scale`.

    Returns:
        A transformation. Call `init` with float32 params for exact masters, and give the model
        `policy.cast_to_param(params)`. Apply updates with `optax.apply_updates`.

    Raises:
        ValueError: as :func:`with_loss_scale` and :func:`with_master_params`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import mpopt
        >>> policy = mpopt.Policy(param_dtype=jnp.float16)
        >>> rule = mpopt.dynamic_loss_scale(initial=1024.0)
        >>> tx = mpopt.mixed_precision(optax.sgd(0.5), loss_scale=rule, policy=policy)
        >>> params_f32 = {"w": jnp.array([1.0, -2.0])}
        >>> opt_state = tx.init(params_f32)
        >>> params = policy.cast_to_param(params_f32)
        >>> def loss_fn(p):
        ...     return mpopt.scale_loss(jnp.sum(p["w"].astype(jnp.float32) ** 2) / 2, opt_state)
        >>> grads = jax.grad(loss_fn)(params)
        >>> updates, opt_state = tx.update(grads, opt_state, params)
        >>> optax.apply_updates(params, updates)["w"]
        Array([ 0.5, -1. ], dtype=float16)

    References:
        Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018.
    """
    return with_loss_scale(
        with_master_params(inner, policy=policy),
        dynamic_loss_scale() if loss_scale is None else loss_scale,
        axis_name=axis_name,
    )
