"""Hardware facts of the GPUs that a program can be compiled for.

Sources of the peaks, all dense, and of the bandwidths, as NVIDIA's data sheets give them:
H200 SXM: https://www.nvidia.com/en-us/data-center/h200/
H100 SXM: https://www.nvidia.com/en-us/data-center/h100/
A100 SXM 80GB: https://www.nvidia.com/en-us/data-center/a100/
The first two sheets state tensor-core rates with sparsity, twice the dense ones.

Source of what the compiler asks for (cores, memories, clock): the target configurations of XLA,
https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs, h200.txtpb,
h100_sxm.txtpb and a100_sxm_80.txtpb. Its bandwidths are within 0.1 % of the data sheets'.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

GpuName = Literal["h200", "h100", "a100"]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: as CUDA names it.
        compute_capability: major and minor.
        core_count: streaming multiprocessors.
        fpus_per_core: float32 lanes of one of them.
        shared_memory_per_core: bytes.
        shared_memory_per_block_optin: bytes that a block may ask for.
        l2_cache_size: bytes.
        memory_size: bytes.
        memory_bandwidth: bytes a second.
        clock_rate_ghz: highest clock.
        peak_flops: FLOP/s of matrix products by dtype; `tf32` is float32 on the tensor cores,
            XLA's default for float32, and `f32` is at the highest precision.
    """

    name: str
    compute_capability: tuple[int, int]
    core_count: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    l2_cache_size: int
    memory_size: int
    memory_bandwidth: float
    clock_rate_ghz: float
    peak_flops: Mapping[str, float]


_HOPPER_PEAKS = {"f16": 989.5e12, "bf16": 989.5e12, "tf32": 494.5e12, "f32": 67e12, "f64": 67e12}

GPUS: dict[GpuName, Gpu] = {
    "h200": Gpu(
        name="NVIDIA H200 141GB HBM3e",
        compute_capability=(9, 0),
        core_count=132,
        fpus_per_core=128,
        shared_memory_per_core=233_472,
        shared_memory_per_block_optin=232_448,
        l2_cache_size=52_428_800,
        memory_size=151_397_597_184,
        memory_bandwidth=4.8e12,
        clock_rate_ghz=1.98,
        peak_flops=_HOPPER_PEAKS,
    ),
    "h100": Gpu(
        name="NVIDIA H100 80GB HBM3",
        compute_capability=(9, 0),
        core_count=132,
        fpus_per_core=128,
        shared_memory_per_core=233_472,
        shared_memory_per_block_optin=232_448,
        l2_cache_size=52_428_800,
        memory_size=84_942_979_072,
        memory_bandwidth=3.35e12,
        clock_rate_ghz=1.98,
        peak_flops=_HOPPER_PEAKS,
    ),
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        core_count=108,
        fpus_per_core=64,
        shared_memory_per_core=167_936,
        shared_memory_per_block_optin=166_912,
        l2_cache_size=41_943_040,
        memory_size=85_100_068_864,
        memory_bandwidth=2.039e12,
        clock_rate_ghz=1.41,
        peak_flops={"f16": 312e12, "bf16": 312e12, "tf32": 156e12, "f32": 19.5e12, "f64": 19.5e12},
    ),
}


def target_config(gpu: Gpu) -> str:
    """Writes a GPU down for the compiler.

    XLA ends the process where a value it divides by is missing, so that every value is given.

    Args:
        gpu: the GPU.

    Returns:
        A `stream_executor.GpuTargetConfigProto` in text format.
    """
    major, minor = gpu.compute_capability
    # Hopper's own instructions (wgmma, TMA) are a feature set beside the compute capability.
    is_accelerated = major >= 9
    extension = "ACCELERATED_FEATURES" if is_accelerated else "NONE"
    suffix = "a" if is_accelerated else ""
    return f"""
platform_name: "CUDA"
device_description_str: "{gpu.name}"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
gpu_device_info {{
  name: "{gpu.name}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.{minor}{suffix}"
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  core_count: {gpu.core_count}
  fpus_per_core: {gpu.fpus_per_core}
  clock_rate_ghz: {gpu.clock_rate_ghz}
  memory_bandwidth: {gpu.memory_bandwidth:.0f}
  device_memory_size: {gpu.memory_size}
  device_address_bits: 64
  l2_cache_size: {gpu.l2_cache_size}
  shared_memory_per_core: {gpu.shared_memory_per_core}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared_memory_per_block_optin}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}}
"""
