"""Trainings as child processes, one at a time, that signals reach only through this one."""

import fcntl
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from experiments.interruption import Interrupted, SignalHandlers
from experiments.tracking.run_dir import LOCK_FILE

MAX_MESSAGE_LINES = 8


class TrainingProcesses(SignalHandlers):
    """Runs trainings, and passes SIGINT, SIGTERM and SIGHUP on to the one under way.

    Use it as a context manager. A signal that comes while no training is under way raises
    :class:`Interrupted` at once.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        """Prepares; entering the context installs the handlers."""
        super().__init__()
        self._is_running = False
        self._child: subprocess.Popen[str] | None = None

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        """Runs a command to its end; what it prints goes on as it comes.

        Args:
            command: a program and its arguments.

        Returns:
            Its exit code, and the message that it ended with on standard error.

        Raises:
            Interrupted: where a signal has come; the child has ended before.
        """
        self._check()
        sys.stdout.flush()
        tail: deque[str] = deque(maxlen=200)
        self._is_running = True
        # In a session of its own, as a terminal would send it an interrupt of its own, and a
        # second one ends a training before it has saved.
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as child:
            self._child = child
            if self.requested is not None:  # It came while the child was being made.
                child.send_signal(self.requested)
            assert child.stderr is not None
            for line in child.stderr:
                sys.stderr.write(line)
                sys.stderr.flush()
                tail.append(line.rstrip())
            exit_code = child.wait()
        self._is_running, self._child = False, None
        self._check()
        return exit_code, last_message(tail, exit_code)

    @staticmethod
    def wait_until_free(run_dir: Path) -> None:
        """Waits for the process that trains in a run directory, if there is one.

        A comparison that was killed leaves its training running.

        Args:
            run_dir: the directory; it need not exist.
        """
        if not (run_dir / LOCK_FILE).exists():
            return
        with (run_dir / LOCK_FILE).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for the process that trains in {run_dir}", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)

    def _check(self) -> None:
        if self.requested is not None:
            raise Interrupted(
                self.requested,
                "the same command goes on, and --report-only reports on what is done",
            )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        number = signal.SIGTERM if number == signal.SIGHUP else number
        self.requested = number
        if not self._is_running:
            self._check()
        elif self._child is not None:
            self._child.send_signal(number)


def last_message(lines: Sequence[str], exit_code: int) -> str:
    """Finds what a failed process said about its failure.

    Args:
        lines: the end of its standard error.
        exit_code: of the process; negative where a signal ended it.

    Returns:
        All from the last line that begins with `error:`, or else the last line that is not empty;
        nothing after success.
    """
    if exit_code == 0:
        return ""
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    said = [line for line in lines if line.strip()]
    starts = [index for index, line in enumerate(said) if line.startswith("error: ")]
    message = said[starts[-1] :][:MAX_MESSAGE_LINES] if starts else said[-1:]
    if message:
        return "\n".join(message).removeprefix("error: ")
    return f"exit code {exit_code}, and nothing on standard error"
