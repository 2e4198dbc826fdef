"""What a program for eight H200 moves: dtypes and bytes, compiled without a GPU."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpopt
from experiments.gpu.child import INSTALL_COMMAND, PLUGIN
from experiments.gpu.targets import GPUS, target_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec(PLUGIN) is None,
        reason=f"compiling for a GPU needs the plugin: {INSTALL_COMMAND}",
    ),
]
WIDTH, LAYERS, BATCH = 1024, 4, 4096
NUM_PARAMS = LAYERS * WIDTH * WIDTH
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "pred": 1, "s32": 4}
SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


@pytest.fixture(scope="module")
def mesh():
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(GPUS["h200"]), topology="1x1x8"
    )
    return Mesh(np.array(topology.devices), ("data",))


def mlp_loss(params, x):
    x = x.astype(params["0"].dtype)
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return jnp.mean(x.astype(jnp.float32) ** 2)


def compiled_step(mesh, layout, dtype, options=None):
    policy = mpopt.Policy(dtype)
    tx = mpopt.mixed_precision(optax.adam(1e-3), policy=policy)
    shapes = {str(i): jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(LAYERS)}
    replicated = jax.tree.map(lambda _: NamedSharding(mesh, P()), shapes)
    shards = mpopt.opt_state_sharding(shapes, mesh, "data")
    params_sharding = shards if layout == "fsdp" else replicated
    state_shapes = jax.eval_shape(tx.init, shapes)
    state_sharding = mpopt.opt_state_sharding(
        state_shapes, mesh, None if layout == "replicated" else "data"
    )

    def step(params, opt_state, batch):
        gathered = params
        if layout == "fsdp":  # gather the weights, not the activations
            gathered = jax.lax.with_sharding_constraint(params, replicated)
        _, grads = mpopt.value_and_grad(mlp_loss)(gathered, batch, opt_state=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state

    def described(tree, sharding):
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, sharding
        )

    jitted = jax.jit(step, out_shardings=(params_sharding, state_sharding), donate_argnums=(0, 1))
    return jitted.lower(
        described(jax.eval_shape(policy.cast_to_param, shapes), params_sharding),
        described(state_shapes, state_sharding),
        jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P("data"))),
    ).compile(compiler_options=options)


def moved(text):
    """Bytes of the whole arrays that each collective moves, by kind and dtype, from 1 kB on."""
    result = {}
    pattern = r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all)(-start)?\("
    for types, kind, start in re.findall(pattern, re.sub(r"\{[^{}]*\}", "", text)):
        sizes = {}
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", types):
            num_bytes = int(np.prod([int(d) for d in dims.split(",") if d])) * ITEM_BYTES[dtype]
            sizes.setdefault(dtype, []).append(num_bytes)
        for dtype, all_bytes in sizes.items():
            # A started collective's type lists operands and results: the larger are whole.
            whole = sum(size for size in all_bytes if size == max(all_bytes))
            if kind == "all-reduce" and start:
                whole //= 2
            if kind == "reduce-scatter" and not start:
                whole *= 8
            if whole >= 1000:
                result[kind, dtype] = result.get((kind, dtype), 0) + whole
    return result


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["replicated", "zero1", "fsdp"])
def test_collectives_move_gradients_and_params_in_their_own_dtype(mesh, layout, dtype):
    compiled = compiled_step(mesh, layout, dtype)
    text, name = compiled.as_text(), SHORT[dtype]
    whole = NUM_PARAMS * ITEM_BYTES[name]
    if layout == "replicated":
        assert moved(text) == {("all-reduce", name): whole}
    else:
        assert moved(text) == {("reduce-scatter", name): whole, ("all-gather", name): whole}
    # Bytes a param that a device holds between steps: param, master, two moments.
    param, state = ITEM_BYTES[name], 8 if dtype == "float32" else 12
    held = {"replicated": param + state, "zero1": param + state / 8, "fsdp": (param + state) / 8}
    batch = BATCH * WIDTH * 4 / 8
    argument_bytes = compiled.memory_analysis().argument_size_in_bytes
    assert argument_bytes == pytest.approx(held[layout] * NUM_PARAMS + batch, abs=200)
    if layout != "replicated" and dtype != "float32":
        assert f"f32[{WIDTH},{WIDTH}]" not in text  # nowhere a whole matrix in float32
        # The decision to skip: one flag a leaf.
        assert re.search(rf"pred\[{LAYERS}\]\S* all-reduce", text)


OVERLAP = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_reduce_combine_threshold_bytes": WIDTH * WIDTH * 2,
    "xla_gpu_all_gather_combine_threshold_bytes": WIDTH * WIDTH * 2,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": WIDTH * WIDTH * 2,
}


@pytest.mark.parametrize(
    ("layout", "collective"), [("replicated", "all-reduce"), ("fsdp", "all-gather")]
)
def test_collectives_overlap_with_products_where_the_scheduler_is_told_to(mesh, layout, collective):
    text = compiled_step(mesh, layout, "float16", OVERLAP).as_text()
    entry = text[text.index("\nENTRY") :]
    between = re.findall(rf"%{collective}-start(.*?)%{collective}-done[\w.]* = ", entry, re.DOTALL)
    assert len(between) == LAYERS
    assert sum("%gemm_fusion" in part for part in between) >= LAYERS - 1
