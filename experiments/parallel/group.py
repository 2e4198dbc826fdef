"""The processes that train together, and how they agree."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator

from experiments.errors import UserError

_FAILED_COLLECTIVE = re.compile(
    "(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): "
)
"""How XLA's runtime and JAX's coordination service begin what they say."""


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
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if not self.is_failed_collective(error):
                raise
            reason = str(error).strip().split("\n", 1)[0][:120]
            raise LostProcessError(
                f"Process {self.index} of {self.count} has lost another process, which ended or "
                "cannot be reached. See what that one says; start all of them again with "
                f"--resume. ({reason})"
            ) from error

    def is_failed_collective(self, error: Exception) -> bool:
        """Tells whether an error means that the processes could not exchange something.

        Args:
            error: a `JaxRuntimeError`, or a `ValueError` where NumPy waited for the result.
        """
        return not self.is_alone and _FAILED_COLLECTIVE.match(str(error)) is not None


ALONE = Group()
