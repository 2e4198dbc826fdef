"""How the processes that train together meet, and how one that failed leaves the others."""

import contextlib
import json
import os
import socket
import sys
import time
import traceback
import zlib
from collections.abc import Iterator

from experiments.config import TrainConfig, option_name
from experiments.errors import UserError
from experiments.parallel.group import ALONE, Group
from experiments.tracking.identity import config_values

CONNECT_SECONDS = 300
"""How long a process waits for the others at its start."""

HEARTBEAT_SECONDS = 60
"""A process that is not heard of for so long is taken for dead, and the others end."""

PARTING_SECONDS = 3.0
"""How much later than the others process 0 ends after a failure; see :func:`leave`."""

OWN_OPTIONS = frozenset({"process_id", "data_dir", "loader_workers"})
"""Options that may differ from process to process."""


@contextlib.contextmanager
def joined(config: TrainConfig) -> Iterator[Group]:
    """Meets the other processes of a run, where it has any.

    Args:
        config: the run.

    Yields:
        The group.

    Raises:
        UserError: where the others do not come, or were started with other options.
    """
    if config.coordinator is None:
        yield ALONE
        return
    import jax

    if config.process_id == 0:
        print(
            f"process 0 of {config.num_processes} at {config.coordinator} waits for the others, at "
            f"most {CONNECT_SECONDS} s",
            flush=True,
        )
    elif config.coordinator != "auto":
        _wait_for_coordinator(config.coordinator)
    # It would take SIGTERM away from the handler that is there.
    jax.config.update("jax_enable_preemption_service", False)
    given = None if config.coordinator == "auto" else config.coordinator
    try:
        jax.distributed.initialize(
            given,
            config.num_processes,
            config.process_id,
            initialization_timeout=CONNECT_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise UserError(
            f"--coordinator {config.coordinator}: the processes did not meet ({reason}). Give each "
            "the address of process 0, the same --num-processes, and a --process-id of its own."
        ) from error
    group = Group(jax.process_index(), jax.process_count())
    with group.watched():
        _check_same_options(group, config)
        yield group
    jax.distributed.shutdown()


def leave(code: int) -> None:
    """Ends a process that failed where others may still wait for it.

    The ordinary way out would wait for all of them to come to their end. Process 0 goes last, as
    JAX aborts the others when it is gone, and their own message should come before.

    Args:
        code: the exit code. Nothing happens with 0, or where the process is alone.
    """
    if code == 0 or "jax" not in sys.modules:
        return
    import jax

    if not jax.distributed.is_initialized():
        return
    if sys.exc_info()[0] is not None:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if jax.process_index() == 0:
        time.sleep(PARTING_SECONDS)
    os._exit(code)


def _check_same_options(group: Group, config: TrainConfig) -> None:
    values = {name: v for name, v in config_values(config).items() if name not in OWN_OPTIONS}
    digests = group.gather(zlib.crc32(json.dumps(values).encode()) & 0x7FFFFFFF)
    others = [index for index, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise UserError(
            f"Process {others[0]} was started with other options than process 0. Give all of them "
            f"the same, but for {', '.join(sorted(map(option_name, OWN_OPTIONS)))}."
        )


def _wait_for_coordinator(address: str) -> None:
    """Waits until process 0 answers. JAX would wait as long, and then abort the process."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=5):
                return
        except (OSError, OverflowError) as error:
            if time.monotonic() > deadline or isinstance(error, OverflowError):
                raise UserError(
                    f"--coordinator {address}: process 0 does not answer ({error}). Start it too, "
                    "and give every process its address."
                ) from error
        time.sleep(0.2)
