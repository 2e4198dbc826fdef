"""What optax exports, sorted into kinds: every name has one, and a test that covers it."""

import functools
import inspect

import jax
import jax.numpy as jnp
import optax
import optax.contrib

# Optimizers: factories with a learning rate, found by introspection, and these.
OPTIMIZERS = {
    "cocob": lambda: optax.contrib.cocob(1.0),
    "mechanize": lambda: optax.contrib.mechanize(optax.sgd(0.1)),
    "noisy_sgd": lambda: optax.noisy_sgd(0.05, key=jax.random.key(0)),
    "polyak_sgd": lambda: optax.polyak_sgd(),
    "sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
}

# Links of a chain, with arguments where the defaults do not do.
LINKS = {
    "add_decayed_weights": lambda: optax.add_decayed_weights(0.1),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, key=jax.random.key(3)),
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "apply_every": lambda: optax.apply_every(2),
    "centralize": None,
    "clip": lambda: optax.clip(0.5),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.5),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
    "ema": lambda: optax.ema(0.9),
    "hutchinson_estimator_diag_hessian": None,
    "identity": None,
    "keep_params_nonnegative": None,
    "normalize": None,
    "normalize_by_update_norm": None,
    "reduce_on_plateau": lambda: optax.contrib.reduce_on_plateau(patience=2),
    "scale": lambda: optax.scale(-0.5),
    "scale_by_acprop": None,
    "scale_by_adadelta": None,
    "scale_by_adam": None,
    "scale_by_adamax": None,
    "scale_by_adan": None,
    "scale_by_ademamix": None,
    "scale_by_adopt": None,
    "scale_by_amsgrad": None,
    "scale_by_belief": None,
    "scale_by_cocob": None,
    "scale_by_distance_over_gradients": None,
    "scale_by_factored_rms": lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    "scale_by_galore": lambda: optax.contrib.scale_by_galore(rank=2, update_proj_gap=4),
    "scale_by_lbfgs": None,
    "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(0.05, flip_sign=False),
    "scale_by_lion": None,
    "scale_by_madgrad": lambda: optax.contrib.scale_by_madgrad(0.05),
    # On matrices, with their axes: its default takes one array, and no tree.
    "scale_by_muon": lambda: optax.masked(
        optax.contrib.scale_by_muon(
            weight_dimension_numbers=lambda updates: jax.tree.map(
                lambda _: optax.contrib.MuonDimensionNumbers(), updates
            )
        ),
        lambda params: jax.tree.map(lambda p: p.ndim == 2, params),
    ),
    "scale_by_novograd": None,
    "scale_by_optimistic_gradient": None,
    "scale_by_param_block_norm": None,
    "scale_by_param_block_rms": None,
    "scale_by_polyak": None,
    "scale_by_radam": None,
    "scale_by_rms": None,
    "scale_by_rprop": lambda: optax.scale_by_rprop(0.05),
    "scale_by_rss": None,
    "scale_by_schedule": lambda: optax.scale_by_schedule(optax.linear_schedule(1.0, 0.0, 20)),
    "scale_by_sign": None,
    "scale_by_simplified_ademamix": None,
    "scale_by_sm3": None,
    "scale_by_stddev": None,
    "scale_by_trust_ratio": None,
    "scale_by_yogi": None,
    "set_to_zero": None,
    "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
    "stateless": lambda: optax.stateless(
        lambda updates, params: jax.tree.map(lambda u, p: u + 0.1 * p, updates, params)
    ),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda u, p: u + 0.1 * p),
    "trace": lambda: optax.trace(0.9),
    "zero_nans": None,
}

# Around other transformations: each is a name in INSIDE of tests/test_compositions.py.
WRAPPERS = {
    "MultiSteps",
    "apply_if_finite",
    "chain",
    "conditionally_mask",
    "conditionally_transform",
    "flatten",
    "freeze",
    "inject_hyperparams",
    "masked",
    "multi_transform",
    "named_chain",
    "partition",
    "selective_transform",
    "split_real_and_imaginary",
    "with_extra_args_support",
}

# What cannot run beside a float32 control on random gradients: why not, and the test it has.
OWN_TESTS = {
    "differentially_private_aggregate": (
        "takes gradients of single examples, with an axis more than params",
        "test_compositions.py::test_private_gradients_are_clipped_before_it_at_the_scaled_norm",
    ),
    "dpsgd": (
        "takes gradients of single examples, with an axis more than params",
        "test_compositions.py::test_private_gradients_are_clipped_before_it_at_the_scaled_norm",
    ),
    "inject_stateful_hyperparams": (
        "deprecated name of inject_hyperparams",
        "test_compositions.py::test_inside_it_sees_what_it_would_see_in_float32",
    ),
    "lbfgs": (
        "its line search needs true values and gradients",
        "test_line_search.py::test_line_search_converges_on_narrow_params_in_one_trace",
    ),
    "scale_by_backtracking_linesearch": (
        "needs true values and gradients",
        "test_line_search.py::test_line_search_converges_on_narrow_params_in_one_trace",
    ),
    "scale_by_zoom_linesearch": (
        "needs true values and gradients",
        "test_line_search.py::test_line_search_converges_on_narrow_params_in_one_trace",
    ),
    "measure_with_ema": (
        "a measure of monitor",
        "test_compositions.py::test_monitor_changes_its_state_and_is_refused_with_the_remedy",
    ),
    "monitor": (
        "its state has no measurements before its first update: lax.scan cannot carry it either",
        "test_compositions.py::test_monitor_changes_its_state_and_is_refused_with_the_remedy",
    ),
    "lookahead": (
        "its gradients have another structure than its params: refused inside, goes outside",
        "test_compositions.py::test_lookahead_goes_around_it_with_slow_weights_in_float32",
    ),
}

# Exported without an annotation; they make no transformation.
HELPERS = {
    "bias_correction",
    "matrix_inverse_pth_root",
    "schedule_free_eval_params",
    "sigmoid_binary_cross_entropy",
    "update_infinity_moment",
    "update_moment",
    "update_moment_per_elem_norm",
}


def exported():
    """Finds what optax exports that makes a transformation, or has no annotation and might."""
    found = {}
    for module in (optax, optax.contrib):
        for name, value in vars(module).items():
            if not name.startswith("_") and makes_a_transformation(value):
                found[name] = value
    return found


def makes_a_transformation(value):
    if inspect.isclass(value):
        return hasattr(value, "gradient_transformation")
    if not (
        inspect.isroutine(value)
        or isinstance(value, functools.partial)  # nadam
        or hasattr(value, "__wrapped__")  # a jitted function
    ):
        return False
    result = inspect.signature(value).return_annotation
    return result is inspect.Signature.empty or "GradientTransformation" in str(result)


def kinds(name, factory):
    """The kinds that a name has; it must be one."""
    tables = {
        "link": LINKS,
        "wrapper": WRAPPERS,
        "own test": OWN_TESTS,
        "helper": HELPERS,
    }
    result = [kind for kind, table in tables.items() if name in table]
    if name in OPTIMIZERS or (not result and "learning_rate" in parameters(factory)):
        result.append("optimizer")
    return result


def parameters(factory):
    return inspect.signature(factory).parameters


def names(kind):
    """The names of one kind that this version of optax exports."""
    return sorted(name for name, factory in exported().items() if kinds(name, factory) == [kind])


def make_optimizer(name):
    """An optimizer by its name, with a learning rate of 0.05 where it requires one."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]()
    factory = exported()[name]
    default = parameters(factory)["learning_rate"].default
    return factory(0.05) if default in (inspect.Parameter.empty, None) else factory()


def make_link(name):
    """A link by its name, and a small step in its direction."""
    make = LINKS[name] or exported()[name]
    return optax.chain(make(), optax.scale(-0.05))


def squared_norm(params):
    """A loss for the optimizers that ask for one."""
    return 0.5 * sum(jnp.sum(jnp.asarray(p, jnp.float32) ** 2) for p in jax.tree.leaves(params))


VALUE = {"polyak_sgd", "momo", "momo_adam", "reduce_on_plateau", "scale_by_polyak"}
OBJECTIVE = {"sophia", "hutchinson_estimator_diag_hessian"}  # for curvature, from the loss itself


def extra_args(name, params_f32, step):
    """What `update` needs beside gradients and params; values vary, so that plateaus occur."""
    if name in VALUE:
        return {"value": squared_norm(params_f32) + 0.1 * step}
    return {"obj_fn": squared_norm} if name in OBJECTIVE else {}
