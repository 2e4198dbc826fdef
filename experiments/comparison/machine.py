"""The machine that runs were made on."""

import os
import platform
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


def describe_machine() -> str:
    """Returns the CPU's model, the cores that this process may use, and the operating system."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # Not on every system.
        cores = os.cpu_count() or 1
    return (
        f"{cpu_model()}, {cores} {'core' if cores == 1 else 'cores'}, "
        f"{platform.system()} {platform.machine()}"
    )


def cpu_model() -> str:
    """Returns the name of the CPU, as far as the system tells it."""
    try:
        for line in CPU_INFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown CPU"
