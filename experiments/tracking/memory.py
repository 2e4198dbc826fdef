"""Peak memory: the device's where there is one, else the process's, and XLA's own account."""

import resource
from typing import Any, Literal

import jax

MemoryKind = Literal["device", "resident set"]


def memory_kind() -> MemoryKind:
    """Returns what :func:`peak_memory_bytes` measures."""
    return "device" if _device_peak() is not None else "resident set"


def peak_memory_bytes() -> int:
    """Returns the most memory in use so far, in bytes: of the first device, or of the process."""
    peak = _device_peak()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak


def step_memory_bytes(compiled: Any) -> int | None:
    """Returns what XLA says a compiled program needs, in bytes.

    Args:
        compiled: from `jax.jit(...).lower(...).compile()`.

    Returns:
        Arguments, results and temporaries, those that share a buffer once; None where the
        platform does not say.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def _device_peak() -> int | None:
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
