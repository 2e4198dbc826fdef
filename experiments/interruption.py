"""SIGINT and SIGTERM: at once while there is nothing to save, else after the step under way."""

import abc
import contextlib
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, ClassVar, Self

from experiments.errors import UserError


class Interrupted(UserError):
    """The process was asked to stop.

    Args:
        signal_number: SIGINT or SIGTERM.
        message: what was saved, and how to go on.

    Attributes:
        exit_code: 128 and the signal's number, as shells have it: 130 for SIGINT, 143 for SIGTERM.
    """

    def __init__(self, signal_number: int, message: str = "nothing was saved") -> None:
        """Makes the message and the exit code."""
        super().__init__(f"stopped by {signal.Signals(signal_number).name}: {message}")
        self.exit_code = 128 + signal_number


class SignalHandlers(abc.ABC):
    """Handles signals while its context lasts.

    Attributes:
        requested: the signal that has come, or None.
    """

    SIGNALS: ClassVar[tuple[int, ...]]

    def __init__(self) -> None:
        """Prepares; entering the context installs the handlers."""
        self.requested: int | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Installs the handlers."""
        for number in self.SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # Started by nohup.
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Puts the former handlers back."""
        for number, handler in self._former.items():
            signal.signal(number, handler)

    @abc.abstractmethod
    def _handle(self, number: int, frame: FrameType | None) -> None: ...


class Interruption(SignalHandlers):
    """Handles SIGINT and SIGTERM while its context lasts.

    Outside :meth:`deferred` a signal raises :class:`Interrupted` at once. Inside, the first one
    only sets `requested`, for the loop to look at, and a second one raises.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        """Prepares; entering the context installs the handlers."""
        super().__init__()
        self._is_deferred = False

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Lets a signal wait for the loop inside this context."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        waits = self._is_deferred and self.requested is None
        # Set in either case: Python drops an exception that is raised inside a destructor.
        self.requested = number
        if not waits:
            raise Interrupted(number)
