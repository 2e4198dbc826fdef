"""Compiles in a process of its own, as XLA ends the process where it does not know the GPU."""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments.errors import UsageError, UserError
from experiments.gpu.messages import Request, StepReport

PLUGIN = "jax_cuda13_plugin"
INSTALL_COMMAND = 'pip install -e ".[experiments,gpu-program]"'
COMMAND = (sys.executable, "-m", "experiments.gpu.compiler")
_LAST_LINES = 15


def check_plugin() -> None:
    """Tells how to install the compiler where it is missing.

    Raises:
        UsageError: where it is.
    """
    if importlib.util.find_spec(PLUGIN) is None:
        raise UsageError(
            "Compiling for a GPU needs JAX's CUDA 13 plugin and NVIDIA's assembler (no GPU, no "
            f"driver). Install them with: {INSTALL_COMMAND}"
        )


def compile_in_child(request: Request, command: Sequence[str] = COMMAND) -> StepReport:
    """Compiles in a process of its own.

    XLA_FLAGS hold for it. The devices of this machine do not matter to it.

    Args:
        request: what to compile.
        command: the process; it gets the files of the request and of the result as arguments.

    Returns:
        Its report.

    Raises:
        UsageError: where the request is wrong.
        UserError: where the process ends without a report; with its last lines.
    """
    with tempfile.TemporaryDirectory() as folder:
        request_file, result_file = Path(folder, "request.json"), Path(folder, "result.json")
        request_file.write_text(json.dumps(dataclasses.asdict(request)))
        ended = subprocess.run(
            [*command, str(request_file), str(result_file)],
            # The plugin reports an error where it may look for a GPU and there is none. The cache
            # of compiled programs would load this one, and that takes a GPU.
            env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if ended.returncode == 0 and result_file.exists():
            return StepReport.from_json(json.loads(result_file.read_text()))
    lines = [line for line in ended.stdout.splitlines() if line.strip()]
    code = ended.returncode
    if code == UsageError.exit_code and lines:
        raise UsageError(lines[-1].removeprefix("error: "))
    how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"
    raise UserError(
        f"The compiler's process {how} and left no program. Its last lines:\n"
        + "\n".join(f"  {line[:300]}" for line in lines[-_LAST_LINES:] or ["(none)"])
    )


def _signal_name(number: int) -> str:
    """XLA divides by values of the GPU (SIGFPE) or checks them (SIGABRT)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
