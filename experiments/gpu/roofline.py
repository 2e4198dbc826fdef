"""What a program costs on a GPU at least: bytes, FLOPs, and the roofline bound."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from experiments.gpu.hlo import Module
from experiments.gpu.kernels import CONVERT, Kernel, list_kernels
from experiments.gpu.origin import Origins
from experiments.gpu.targets import Gpu

DTYPE_NAMES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "tf32": "float32 (TF32)",
    "f32": "float32",
    "f64": "float64",
}


@dataclasses.dataclass
class CostlyKernel:
    """One of the kernels with the highest bound, all its runs together."""

    name: str
    kind: str
    seconds: float
    num_bytes: int
    flops: int
    dtype: str
    result: str
    source: str


@dataclasses.dataclass
class WideProduct:
    """Convolutions or products in float32, those of one source line.

    Attributes:
        kind: convolution or matrix product.
        dtype: for people.
        count: how many.
        flops: of all of them.
        is_exact: whether at a higher precision than XLA's default for float32.
        source: the line, and the function it is in.
        params: the arguments that they take as weights, where XLA's program tells.
    """

    kind: str
    dtype: str
    count: int
    flops: int
    is_exact: bool
    source: str
    params: list[str]


@dataclasses.dataclass
class Costs:
    """The figures of a program.

    Attributes:
        kernels: how many run.
        kernels_by_kind: likewise.
        products: convolutions and matrix products by kind and dtype.
        num_bytes: read and written at kernel boundaries.
        bytes_by_kind: likewise.
        flops: of convolutions and products, by dtype.
        converts_alone: kernels that only cast.
        convert_bytes: their bytes.
        bound_seconds: the sum over the kernels of the larger of bytes / bandwidth and FLOPs / peak.
            A lower bound, no prediction.
        memory_bound_share: share of the bound in kernels that the memory limits.
        costliest: the ten kernels with the highest bounds.
        wide_products: those in float32.
    """

    kernels: int
    kernels_by_kind: dict[str, int]
    products: dict[str, dict[str, int]]
    num_bytes: int
    bytes_by_kind: dict[str, int]
    flops: dict[str, int]
    converts_alone: int
    convert_bytes: int
    bound_seconds: float
    memory_bound_share: float
    costliest: list[CostlyKernel]
    wide_products: list[WideProduct]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Costs":
        """Reads what `dataclasses.asdict` gave."""
        costs = cls(**values)
        costs.costliest = [CostlyKernel(**kernel) for kernel in values["costliest"]]
        costs.wide_products = [WideProduct(**product) for product in values["wide_products"]]
        return costs


def measure_costs(module: Module, gpu: Gpu, num_costliest: int = 10) -> Costs:
    """Adds up a program.

    Args:
        module: the program.
        gpu: whose bandwidth and peaks count.
        num_costliest: how many of the costliest kernels to list.

    Returns:
        The figures.
    """
    kernels = list_kernels(module)
    origins = Origins(module)
    kinds, bytes_by_kind, flops = (collections.Counter() for _ in range(3))
    products = {kind: collections.Counter() for kind in ("convolution", "matrix product")}
    memory_seconds = bound = 0.0
    costly = []
    for kernel in kernels:
        kinds[kernel.kind] += kernel.count
        bytes_by_kind[kernel.kind] += kernel.num_bytes * kernel.count
        seconds_memory = kernel.count * kernel.num_bytes / gpu.memory_bandwidth
        seconds_compute = 0.0
        for product in kernel.products:
            dtype = DTYPE_NAMES.get(product.dtype, product.dtype)
            products[product.kind][dtype] += kernel.count
            flops[dtype] += kernel.count * product.flops
            peak = gpu.peak_flops.get(product.dtype, max(gpu.peak_flops.values()))
            seconds_compute += kernel.count * product.flops / peak
        seconds = max(seconds_memory, seconds_compute)
        bound += seconds
        memory_seconds += seconds if seconds_memory >= seconds_compute else 0
        costly.append((seconds, kernel))
    costly.sort(key=lambda pair: pair[0], reverse=True)
    return Costs(
        kernels=kinds.total(),
        kernels_by_kind=dict(kinds.most_common()),
        products={kind: dict(counts) for kind, counts in products.items()},
        num_bytes=bytes_by_kind.total(),
        bytes_by_kind=dict(bytes_by_kind.most_common()),
        flops=dict(flops),
        converts_alone=kinds[CONVERT],
        convert_bytes=bytes_by_kind[CONVERT],
        bound_seconds=bound,
        memory_bound_share=memory_seconds / bound if bound else 1.0,
        costliest=[_costly(seconds, kernel, origins) for seconds, kernel in costly[:num_costliest]],
        wide_products=_wide_products(kernels, origins),
    )


def _costly(seconds: float, kernel: Kernel, origins: Origins) -> CostlyKernel:
    return CostlyKernel(
        name=kernel.instruction.name,
        kind=kernel.kind,
        seconds=seconds,
        num_bytes=kernel.num_bytes * kernel.count,
        flops=kernel.count * sum(product.flops for product in kernel.products),
        dtype=" ".join(dict.fromkeys(DTYPE_NAMES.get(p.dtype, p.dtype) for p in kernel.products)),
        result=" ".join(map(str, kernel.instruction.arrays[:1])),
        source=origins.source(kernel.instruction),
    )


def _wide_products(kernels: Iterable[Kernel], origins: Origins) -> list[WideProduct]:
    found: dict[tuple[str, str, str], WideProduct] = {}
    for kernel in kernels:
        for product in kernel.products:
            if product.dtype not in ("f32", "tf32", "f64"):
                continue
            dtype = DTYPE_NAMES[product.dtype]
            key = (product.kind, dtype, origins.source(product.instruction))
            wide = found.setdefault(
                key, WideProduct(*key[:2], 0, 0, product.dtype == "f32", key[2], [])
            )
            wide.count += kernel.count
            wide.flops += kernel.count * product.flops
            for param in _params(kernel, product.weights, origins):
                if param not in wide.params:
                    wide.params.append(param)
    return list(found.values())


def _params(kernel: Kernel, weights: str | None, origins: Origins) -> list[str]:
    """Returns the params among a product's operands, or among those of its fusion."""
    is_fused = kernel.instruction.opcode.startswith("fusion")
    names = kernel.instruction.operands if is_fused else [weights] if weights else []
    arguments = (origins.argument(kernel.computation, name) for name in names)
    return [argument for argument in arguments if argument and "param" in argument]
