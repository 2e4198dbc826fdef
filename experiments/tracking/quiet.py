"""Keeps a library's background threads from printing what one message of ours says."""

import gc
import logging
import sys
import threading
import warnings
from typing import Any

LOGGERS = ("absl", "asyncio")
"""Orbax logs through the first; what its unfinished tasks leave behind comes from the second."""


class Quiet:
    """Holds back logs and tracebacks of background threads.

    From :meth:`start` to :meth:`stop`, or to the end of the process with :meth:`stay`. Where
    Orbax's storage fails, every leaf's task and thread reports the same failure: through the log,
    through Python's hook for what is raised in a destructor, and through the hook for what nobody
    catches. The caller gets the failure as an exception.
    """

    def __init__(self) -> None:
        """Changes nothing yet."""
        self._levels: list[int] = []
        self._hooks: tuple[Any, Any] | None = None

    def start(self) -> None:
        """Begins to hold back."""
        self._hooks = sys.excepthook, sys.unraisablehook
        self._levels = [logging.getLogger(name).level for name in LOGGERS]
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        sys.excepthook = self._excepthook
        sys.unraisablehook = lambda unraisable: None

    def stop(self) -> None:
        """Collects what is left behind, and lets everything be printed again."""
        if self._hooks is None:
            return
        gc.collect()
        sys.excepthook, sys.unraisablehook = self._hooks
        self._hooks = None
        for name, level in zip(LOGGERS, self._levels, strict=True):
            logging.getLogger(name).setLevel(level)

    def stay(self) -> None:
        """Holds back to the end of the process, and warnings of what is never awaited too."""
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)

    def _excepthook(self, *error: Any) -> None:
        if self._hooks is not None and threading.current_thread() is threading.main_thread():
            self._hooks[0](*error)
