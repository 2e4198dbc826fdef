"""The benchmark at tiny sizes. What it measures differs from run to run; its form does not."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import benchmark
from experiments.benchmarks import leaf_shapes, rows, tables
from experiments.benchmarks.contenders import CONTENDERS, REFERENCE, NotMeasured, choose
from experiments.benchmarks.problem import SGD, linear_problem
from experiments.benchmarks.steps import measure_steps
from experiments.benchmarks.timing import median_ratio, take_turns

SHAPES = {"dense/kernel": (3, 4), "norm/scale": (4,)}


def test_contenders_take_turns_in_the_same_order():
    calls = []
    runs = {name: lambda name=name: calls.append(name) for name in "ABC"}
    times = take_turns(runs, 3)
    assert "".join(calls) == "ABC" * 3
    assert {name: len(turns) for name, turns in times.items()} == {"A": 3, "B": 3, "C": 3}


def test_ratio_is_of_the_same_turn():
    # The machine was ten times slower in the second turn, for both.
    assert median_ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == 2.0


def test_leaf_shapes_are_those_of_the_models():
    resnet, gpt2 = leaf_shapes.resnet_shapes(), leaf_shapes.gpt2_shapes()
    assert (len(resnet), leaf_shapes.num_params(resnet)) == (161, 25_557_032)
    assert (len(gpt2), leaf_shapes.num_params(gpt2)) == (148, 124_439_808)
    assert resnet["stages/0/0/norm1/scale"] == (64,)


def contender(name, tx=SGD):
    problem = linear_problem(SHAPES, tx)
    try:
        made = CONTENDERS[name](problem)
    except NotMeasured as error:
        pytest.skip(str(error))
    return made, problem


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_makes_the_same_step(name):
    """Gradients are the same numbers, so a library used wrongly would show."""
    made, problem = contender(name, optax.sgd(1.0))
    state = made.step(made.init(), problem.batch(made.dtype))
    resolution = float(jnp.finfo(made.dtype).eps)
    expected = jax.tree.map(lambda p, g: p - g, problem.params, problem.batch(jnp.float32))
    for key, value in expected.items():
        step = np.max(np.abs(expected[key]))
        np.testing.assert_allclose(
            np.asarray(state[0][key], np.float32), value, rtol=0, atol=2 * resolution * step
        )


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_in_half_precision_skips_an_overflow(name):
    if name == REFERENCE:
        return
    made, problem = contender(name)
    batch = problem.batch(made.dtype)
    before = made.init()
    params = jax.device_get(before[0])
    batch = {**batch, "dense/kernel": batch["dense/kernel"].at[0, 0].set(jnp.inf)}
    after = made.step(before, batch)
    for key, value in params.items():
        np.testing.assert_array_equal(after[0][key], value)


def test_rows_of_all_contenders_and_one_trace_of_mpopt():
    found = measure_steps(
        "update", "tiny", linear_problem(SHAPES, SGD), CONTENDERS, turns=2, steps=1
    )
    assert [row.contender for row in found] == list(CONTENDERS)
    by_name = {row.contender: row for row in found}
    assert {row.traces for name, row in by_name.items() if "mpopt" in name} == {1}
    assert by_name[REFERENCE].ratio == 1
    assert by_name[REFERENCE].rest_bytes == 8
    # 12 narrow params of 2 + 4 + 4 bytes, 4 wide ones of 4 + 4, and the loss scale's own state.
    scale = 4 + 4 + 4 + 1 + 4 + 4 + 2 * (1 + 4)
    assert by_name["mpopt float16"].rest_bytes == (12 * 10 + 4 * 8 + scale) / 16
    assert all(len(row.seconds) == 2 for row in found if not row.note)


def missing(problem):
    raise NotMeasured("not here")


def test_contender_that_is_not_installed_is_a_row_with_a_note():
    makers = {REFERENCE: CONTENDERS[REFERENCE], "jmp float16": missing}
    problem = linear_problem(SHAPES, SGD)

    def torch():
        raise NotMeasured("no torch")

    found = measure_steps(
        "step", "tiny", problem, makers, turns=1, steps=1, others={"PyTorch": torch}
    )
    ((_, (table,)),) = tables.make_tables(found)
    assert [cells[0] for cells in table.rows] == [REFERENCE, "jmp float16", "PyTorch"]
    assert set(table.rows[1][1:]) == {tables.NOTHING}
    assert tables.make_notes(found) == ["PyTorch: no torch.", "jmp float16: not here."]


def test_jmp_is_left_out_where_it_compiles_for_minutes():
    if importlib.util.find_spec("jmp") is None:
        pytest.skip("jmp is not installed")
    many = linear_problem(leaf_shapes.same_shapes(65, (2,)), SGD)
    with pytest.raises(NotMeasured, match="65 leaves.*--slow"):
        choose(slow=False)["jmp float16"](many)
    choose(slow=True)["jmp float16"](many)


def test_row_without_reference_has_no_ratio():
    row = rows.Row("step", "case", "other", seconds=[1.0])
    rows.add_ratios([row], REFERENCE)
    assert row.ratio is None


def test_command_writes_tables_json_and_picture(tmp_path, capsys):
    out = tmp_path / "benchmark"
    args = ["--sections", "compile", "dispatch", "--repeats", "1", "--compile-repeats", "1"]
    sizes = ["--compile-leaves", "1", "2", "--dispatch-leaves", "1", "--dispatch-steps", "2"]
    assert benchmark.main([*args, *sizes, "--out", str(out)]) == 0
    content = json.loads((out / "benchmark.json").read_text())
    cases = {row["case"] for row in content["rows"]}
    assert cases == {"1 leaves", "2 leaves", "1 leaves, empty program"}
    assert all(row["ratio"] > 0 for row in content["rows"])
    assert content["versions"]["jax"] == jax.__version__
    markdown = (out / "benchmark.md").read_text()
    printed = capsys.readouterr().out
    for name in ("optax float32", "mpopt float16, float32 params"):
        assert name in markdown and name in printed
    assert "--dispatch-steps 2" in markdown
    assert (out / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_value_is_refused_by_name(capsys):
    assert benchmark.main(["--repeats", "0"]) == 2
    assert "--repeats must be at least 1, got 0" in capsys.readouterr().err
