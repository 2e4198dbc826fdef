"""What a step costs the host: Python and the call of the compiled program."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax

from experiments.benchmarks.contenders import Contender, Maker
from experiments.benchmarks.leaf_shapes import same_shapes
from experiments.benchmarks.problem import SGD, Problem, linear_problem
from experiments.benchmarks.rows import Row
from experiments.benchmarks.steps import measure_steps

LEAF_SHAPE = (2,)


class Called:
    """Steps whose clock stops when the call returns; waiting for the result does not count.

    A CPU runs so small a program within the call, so that its few microseconds do count.

    Args:
        step: `step(state, batch) -> state`; the state is donated.
        state: the first.
        batch: the same for every step.
        steps: in a turn.
    """

    def __init__(self, step: Any, state: Any, batch: Any, steps: int) -> None:
        """Keeps them."""
        self._step, self._state, self._batch, self._steps = step, state, batch, steps

    def __call__(self) -> float:
        """Takes the steps of a turn; returns their seconds."""
        total = 0.0
        for _ in range(self._steps):
            start = time.perf_counter()
            self._state = self._step(self._state, self._batch)
            total += time.perf_counter() - start
            jax.block_until_ready(self._state)
        return total


def measure_dispatch(
    leaves: Sequence[int], contenders: Mapping[str, Maker], *, turns: int, steps: int
) -> list[Row]:
    """Times the calls of updates of params that hold next to nothing, and of empty programs.

    The empty programs take and give the same arrays and compute nothing.

    Args:
        leaves: numbers of params.
        contenders: by name, the reference among them.
        turns: of each.
        steps: in a turn.

    Returns:
        Two rows for each number and contender.
    """
    empty = {name: partial(_make_empty, make) for name, make in contenders.items()}
    kinds = {"": contenders, ", empty program": empty}
    return [
        row
        for count in leaves
        for kind, makers in kinds.items()
        for row in measure_steps(
            "dispatch",
            f"{count} leaves{kind}",
            linear_problem(same_shapes(count, LEAF_SHAPE), SGD),
            makers,
            turns=turns,
            steps=steps,
            loop=Called,
        )
    ]


def _make_empty(make: Maker, problem: Problem) -> Contender:
    contender = make(problem)
    return Contender(contender.dtype, contender.init, lambda state, batch: state)
