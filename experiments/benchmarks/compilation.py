"""How long updates take to compile, by the number of leaves."""

from collections.abc import Callable, Mapping, Sequence

from experiments.benchmarks.contenders import REFERENCE, Maker, NotMeasured
from experiments.benchmarks.leaf_shapes import same_shapes
from experiments.benchmarks.problem import SGD, Problem, linear_problem
from experiments.benchmarks.rows import Row, add_ratios
from experiments.benchmarks.timing import Compiled, compile_step, take_turns

LEAF_SHAPE = (16, 16)


def measure_compilation(
    leaves: Sequence[int], contenders: Mapping[str, Maker], turns: int
) -> list[Row]:
    """Traces and compiles updates of SGD with momentum, in turn.

    Args:
        leaves: numbers of leaves.
        contenders: by name, the reference among them.
        turns: compilations of each.

    Returns:
        A row for each number and contender.
    """
    rows = []
    for index, count in enumerate(leaves):
        problem = linear_problem(same_shapes(count, LEAF_SHAPE), SGD)
        runs = {}
        for name, make in contenders.items():
            row = Row("compile", f"{count} leaves", name)
            rows.append(row)
            try:
                runs[name] = _compiler(problem, make)
            except NotMeasured as error:
                row.note = str(error)
        if index == 0:  # JAX's caches of its own small functions fill up
            take_turns(runs, 1)
        times = take_turns(runs, turns)
        for row in rows[-len(contenders) :]:
            results = [compiled for compiled, _ in times.get(row.contender, [])]
            if results:
                row.seconds = [result.trace.wall + result.compile.wall for result in results]
                row.cpu_seconds = [result.trace.cpu + result.compile.cpu for result in results]
                middle = sorted(results, key=lambda r: r.trace.wall + r.compile.wall)
                median = middle[len(middle) // 2]
                row.trace_seconds, row.compile_seconds = median.trace.wall, median.compile.wall
    add_ratios(rows, REFERENCE)
    return rows


def _compiler(problem: Problem, make: Maker) -> Callable[[], Compiled]:
    """Returns a function that compiles anew whenever it is called."""
    contender = make(problem)
    state, batch = contender.init(), problem.batch(contender.dtype)
    return lambda: compile_step(make(problem).step, state, batch)
