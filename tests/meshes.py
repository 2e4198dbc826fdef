"""A model on eight virtual devices, in the layouts that training uses, and what its program moves.

A layout is a name: `replicated` (data parallel), `zero1` (optimizer state split), `fsdp` (params
and state split), `tensor` (the matrices split over a second axis).
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpopt

LAYOUTS = ("replicated", "zero1", "fsdp", "tensor")
needs_eight_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def make_mesh(shape=(8,), names=("data",), axis_type=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))


def mesh_of(layout, axis_type=AxisType.Auto):
    if layout == "tensor":
        return make_mesh((4, 2), ("data", "model"), axis_type)
    return make_mesh(axis_type=axis_type)


def random_params(width=64):
    rng = np.random.RandomState(0)
    return {
        "first": {"kernel": jnp.array(rng.randn(16, width) * 0.2, jnp.float32)},
        "norm": {"scale": jnp.ones(width)},
        "second": {"kernel": jnp.array(rng.randn(width, 8) * 0.2, jnp.float32)},
    }


def random_batches(steps, size=64, width=16):
    rng = np.random.RandomState(1)
    return [np.float32(rng.randn(size, width)) for _ in range(steps)]


def tanh_loss(params, x):
    x = jnp.tanh(x.astype(params["first"]["kernel"].dtype) @ params["first"]["kernel"])
    x = (x * params["norm"]["scale"]).astype(x.dtype)
    return jnp.mean((x @ params["second"]["kernel"]).astype(jnp.float32) ** 2)


def exact_loss(params, batch):
    """Its gradients are small integers over 2^10: no sum of them is ever rounded."""
    x, t = batch
    dtype = params["kernel"].dtype
    x, t = x.astype(dtype), t.astype(dtype)
    return jnp.mean(((x @ params["kernel"] + params["bias"]) * t).astype(jnp.float32))


def exact_params():
    rng = np.random.RandomState(0)
    return {
        "kernel": jnp.array(rng.randint(-8, 9, (8, 16)) / 8, jnp.float32),
        "bias": jnp.array(rng.randint(-8, 9, 16) / 8, jnp.float32),
    }


def exact_batches(steps):
    rng = np.random.RandomState(1)
    batches = [(rng.randint(-1, 2, (64, 8)), rng.randint(-1, 2, (64, 16))) for _ in range(steps)]
    return [(np.float32(x), np.float32(t)) for x, t in batches]


def params_sharding(layout, params, mesh):
    """NamedShardings of the params; `tensor` splits the last dimension of matrices."""
    if layout == "fsdp":
        return mpopt.opt_state_sharding(params, mesh, "data", min_size=1)
    specs = {2: P(None, "model")} if layout == "tensor" else {}
    return jax.tree.map(lambda p: NamedSharding(mesh, specs.get(p.ndim, P())), params)


class Training:
    """A tx in a layout: `start` gives params and state, `step` is compiled for the mesh.

    Layout None is one device.
    """

    def __init__(self, layout, tx, policy, loss, params_f32):
        self.tx, self.policy, self.loss, self.params_f32 = tx, policy, loss, params_f32
        if layout is None:
            self.step = jax.jit(self._step)
            self._start = jax.jit(lambda p: (policy.cast_to_param(p), tx.init(p)))
            return
        self.mesh = mesh = mesh_of(layout)
        self.params_sharding = params_sharding(layout, params_f32, mesh)
        self.shapes = jax.eval_shape(tx.init, params_f32)
        self.state_sharding = mpopt.opt_state_sharding(
            self.shapes,
            mesh,
            "data" if layout == "zero1" else None,
            params=self._described(params_f32, self.params_sharding),
            min_size=1,
        )
        self.batch_sharding = NamedSharding(mesh, P("data"))
        layouts = (self.params_sharding, self.state_sharding)
        self.params_f32 = jax.device_put(params_f32, self.params_sharding)
        self._start = jax.jit(
            lambda p: (policy.cast_to_param(p), tx.init(p)), out_shardings=layouts
        )
        self.step = jax.jit(
            self._step,
            in_shardings=(*layouts, self.batch_sharding),
            out_shardings=(*layouts, None),
        )

    def _step(self, params, opt_state, batch):
        loss, grads = mpopt.value_and_grad(self.loss)(params, batch, opt_state=opt_state)
        updates, opt_state = self.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def start(self):
        return self._start(self.params_f32)

    def run(self, batches):
        params, opt_state = self.start()
        for batch in batches:
            params, opt_state, loss = self.step(params, opt_state, batch)
        return params, opt_state, loss

    def lower(self, batch):
        """Lowers the step without making an array."""
        half = jax.eval_shape(self.policy.cast_to_param, self.params_f32)
        return self.step.lower(
            self._described(half, self.params_sharding),
            self._described(self.shapes, self.state_sharding),
            batch,
        )

    @staticmethod
    def _described(tree, sharding):
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, sharding
        )


def collectives(program_text):
    """Lists `(kind, [types])` of a program in XLA's text, such as `("all-gather", ["f16[8]"])`."""
    pattern = r"= (.*?) (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\("
    found = re.findall(pattern, program_text)
    return [(kind, re.findall(r"\w+\[[\d,]*\]", types)) for types, kind in found]


def partitioned_text(lowered, folder):
    """Compiles, and returns the program as partitioned, before a backend changes its dtypes.

    XLA:CPU makes float32 collectives of bfloat16 ones, at the very end.
    """
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_pass_re": "spmd-partitioning"}
    lowered.compile(compiler_options=options)
    (file,) = folder.glob("*after_spmd-partitioning*.txt")
    return file.read_text()


def shard_bytes(tree, device):
    """Bytes of a tree on one device."""
    shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device == device)


def bookkeeping(opt_state):
    """What all devices must agree on, as numbers; every device's copy is looked at."""
    state = opt_state._asdict()
    del state["inner_state"]
    leaves = jax.tree.leaves(state)
    for leaf in leaves:
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        for copy in copies[1:]:
            np.testing.assert_array_equal(copies[0], copy)
    return [np.asarray(leaf).tolist() for leaf in leaves]
