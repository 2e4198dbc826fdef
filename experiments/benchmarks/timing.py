"""Measures in turns, so that whatever else the machine does meets all contenders alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax


class Seconds(NamedTuple):
    """How long something took.

    Attributes:
        wall: on the clock.
        cpu: of this process, all threads together.
    """

    wall: float
    cpu: float


def timed(run: Callable[[], Any]) -> tuple[Any, Seconds]:
    """Calls a function.

    Args:
        run: what to time; it must wait for its own results.

    Returns:
        Its result and the time it took.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    return result, Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def take_turns(
    runs: Mapping[str, Callable[[], Any]], turns: int
) -> dict[str, list[tuple[Any, Seconds]]]:
    """Calls each function once a turn, in the same order: A B C A B C.

    Args:
        runs: what to time, by name.
        turns: how many.

    Returns:
        Results and times, one for each turn.
    """
    results: dict[str, list[tuple[Any, Seconds]]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            results[name].append(timed(run))
    return results


def median_ratio(own: Sequence[float], reference: Sequence[float]) -> float:
    """Returns the median over the turns of a time divided by the reference's in the same turn.

    Args:
        own: times, one for each turn.
        reference: likewise.
    """
    return statistics.median(a / b for a, b in zip(own, reference, strict=True))


class Compiled(NamedTuple):
    """A compiled step.

    Attributes:
        executable: from `Lowered.compile`.
        trace: time to trace and to lower.
        compile: time of XLA.
    """

    executable: Any
    trace: Seconds
    compile: Seconds


def compile_step(step: Any, *args: Any, **options: Any) -> Compiled:
    """Traces and compiles; the jitted function finds the program when it is called.

    Args:
        step: a jitted function, never called before.
        *args: its arguments.
        **options: of `Lowered.compile`.

    Returns:
        The program and the times.
    """
    lowered, trace = timed(lambda: step.lower(*args))
    executable, compiling = timed(lambda: lowered.compile(**options))
    return Compiled(executable, trace, compiling)


class Looped:
    """Steps of one contender that go on from turn to turn.

    Args:
        step: `step(state, batch) -> state`; the state is donated.
        state: the first.
        batch: the same for every step.
        steps: in a turn.
    """

    def __init__(self, step: Any, state: Any, batch: Any, steps: int) -> None:
        """Keeps them."""
        self._step, self._state, self._batch, self._steps = step, state, batch, steps

    def __call__(self) -> None:
        """Takes the steps of a turn and waits for the last."""
        for _ in range(self._steps):
            self._state = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)
