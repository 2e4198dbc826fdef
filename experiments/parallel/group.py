"""The processes that train together: how they meet, agree, and part."""

import contextlib
import dataclasses
import json
import os
import sys
import time
import traceback
import zlib
from collections.abc import Iterator

from experiments.config import TrainConfig, option_name
from experiments.errors import UserError
from experiments.tracking.identity import config_values

CONNECT_SECONDS = 300
"""How long a process waits for the others at its start."""

HEARTBEAT_SECONDS = 60
"""A process that is not heard of for so long is taken for dead, and the others end."""

PARTING_SECONDS = 3.0
"""How much later than the others process 0 ends after a failure; see :func:`leave`."""

OWN_OPTIONS = frozenset({"process_id", "data_dir", "loader_workers"})
"""Options that may differ from process to process."""


class LostProcessError(UserError):
    """Another process has ended, or cannot be reached."""


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes of a run, seen from one of them. One process makes a group too.

    Attributes:
        index: the number of this process.
        count: how many there are.
    """

    index: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is process 0, the one that prints and writes the journals."""
        return self.index == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return self.count == 1

    def gather(self, number: int) -> list[int]:
        """Collects a number from each process; all of them have to call this.

        Args:
            number: this process's, an int32.

        Returns:
            The numbers, in the order of the processes.
        """
        if self.is_alone:
            return [number]
        import numpy as np
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(np.array([number], np.int32)).ravel().tolist()

    def stop_signal(self, requested: int | None) -> int | None:
        """Agrees whether to stop; all processes have to call this at the same step.

        Args:
            requested: the signal that this process has got, if any.

        Returns:
            A signal that some process has got, the same for all.
        """
        return max(self.gather(requested or 0)) or None

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Raises in all processes where one raises a :class:`UserError` inside the context."""
        error = None
        try:
            yield
        except UserError as raised:
            error = raised
        failed = [index for index, has in enumerate(self.gather(error is not None)) if has]
        if error is not None:
            raise error
        if failed:
            raise UserError(f"Process {failed[0]} of {self.count} cannot go on; see what it says.")

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Says in one message that a collective failed, as they do where a process is gone.

        Raises:
            LostProcessError: in place of JAX's error.
        """
        if self.is_alone:
            yield
            return
        import jax

        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).strip().split("\n", 1)[0][:120]
            raise LostProcessError(
                f"Process {self.index} of {self.count} has lost another process, which ended or "
                "cannot be reached. See what that one says; start all of them again with "
                f"--resume. ({reason})"
            ) from error


ALONE = Group()


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
