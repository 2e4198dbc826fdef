"""Times the steps of contenders in turn: whole ones, or updates alone."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from experiments.benchmarks.contenders import REFERENCE, Contender, Maker, NotMeasured
from experiments.benchmarks.problem import Problem
from experiments.benchmarks.rows import Row, Section, add_ratios
from experiments.benchmarks.timing import Compiled, Looped, compile_step, take_turns

COUNTED_STEPS = 5
"""Steps in which traces are counted."""


def measure_steps(
    section: Section,
    case: str,
    problem: Problem,
    contenders: Mapping[str, Maker],
    *,
    turns: int,
    steps: int,
    others: Mapping[str, Callable[[], Any]] | None = None,
    loop: Callable[..., Callable[[], Any]] = Looped,
) -> list[Row]:
    """Compiles every contender's step, then lets them take turns.

    Args:
        section: of the rows.
        case: likewise.
        problem: what is trained.
        contenders: by name, the reference among them.
        turns: of each.
        steps: in a turn, all alike.
        others: contenders of another framework: makers of a function that takes a turn's steps.
        loop: makes the function that takes a turn's steps, as `Looped` does.

    Returns:
        A row for each contender, those that are not installed too.
    """
    rows, runs = [], {}
    batches = {}
    for name, make in contenders.items():
        row = Row(section, case, name)
        rows.append(row)
        try:
            contender = make(problem)
        except NotMeasured as error:
            row.note = str(error)
            continue
        if contender.dtype not in batches:
            batches[contender.dtype] = problem.batch(contender.dtype)
        batch = batches[contender.dtype]
        state = contender.init()
        compiled = compile_step(contender.step, state, batch)
        _describe(row, problem, contender, compiled, state)
        for _ in range(COUNTED_STEPS):
            state = contender.step(state, batch)
        row.traces = contender.traces
        runs[name] = loop(contender.step, state, batch, steps)
        del state
    for name, make_run in (others or {}).items():
        row = Row(section, case, name)
        rows.append(row)
        try:
            runs[name] = make_run()
        except NotMeasured as error:
            row.note = str(error)
    take_turns(runs, 1)  # the first turn warms up
    times = take_turns(runs, turns)
    for row in rows:
        if row.contender in times:
            # A run that keeps its own time says it; else the turn's counts.
            seconds = [times.wall if own is None else own for own, times in times[row.contender]]
            row.seconds = [value / steps for value in seconds]
            row.cpu_seconds = [seconds.cpu / steps for _, seconds in times[row.contender]]
    add_ratios(rows, REFERENCE)
    return rows


def _describe(
    row: Row, problem: Problem, contender: Contender, compiled: Compiled, state: Any
) -> None:
    num_params = sum(leaf.size for leaf in jax.tree.leaves(problem.params))
    params, opt_state = state[:2]
    row.rest_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((params, opt_state))) / num_params
    memory = compiled.executable.memory_analysis()
    row.temp_bytes = memory.temp_size_in_bytes / num_params
    row.leaves = len(jax.tree.leaves(state))
    row.trace_seconds = compiled.trace.wall
    row.compile_seconds = compiled.compile.wall
    row.compile_cpu_seconds = compiled.trace.cpu + compiled.compile.cpu
