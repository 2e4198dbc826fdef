"""docs/scaling.md: its recipes run, its tables are what its formulas give."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from meshes import needs_eight_devices

import mpopt

PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"
NUMBERS = {"25M": 25e6, "1B": 1e9, "70B": 70e9}


def table(header):
    """The rows below a header, as lists of cells."""
    lines = PAGE.read_text().partition(header)[2].splitlines()[2:]
    rows = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@needs_eight_devices
def test_recipes_train_in_the_layouts_that_they_name():
    text = PAGE.read_text()
    sections = re.split(r"\n\*\*(.*?)\.?\*\*\.? ", text.partition("## Recipes")[2])
    titles = ["start", *sections[1::2]]
    names = {}
    ran = {}
    for title, section in zip(titles, sections[0::2], strict=True):
        for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
            exec(compile(block, f"{PAGE}: {title}", "exec"), names)
        if title == "start":
            continue
        ran[title] = names["params"], names["opt_state"], float(names["loss"])
    trained = ["Replicated", "ZeRO-1", "FSDP", "`shard_map`", "Explicit axes"]
    assert list(ran)[:5] == trained
    for title in trained:
        params, opt_state, loss = ran[title]
        assert 0 < loss < 3 and mpopt.grads_finite(opt_state), title
        kernel = params["in"]
        master = opt_state.inner_state.master_params["in"]
        moment = opt_state.inner_state.inner_state[0].nu["in"]
        assert kernel.dtype == jnp.float16
        assert kernel.sharding.is_fully_replicated == (title != "FSDP"), title
        for leaf in (master, moment):
            whole = title in ("Replicated", "`shard_map`")
            assert leaf.addressable_shards[0].data.size == leaf.size / (1 if whole else 8), title
        bookkeeping = jax.tree.leaves(opt_state._replace(inner_state=None))
        assert all(leaf.sharding.is_fully_replicated for leaf in bookkeeping)
    assert names["losses"][3] < names["losses"][0]


def test_memory_table_is_what_the_formulas_give():
    rows = table("| N | layout | k | SGD float32 | SGD 16-bit | Adam float32 | Adam 16-bit |")
    assert len(rows) == 15
    for n, layout, k, *cells in rows:
        found = [float(cell) for cell in cells]
        expected = []
        for moments in (4, 8):
            for param, master in ((4, 0), (2, 4)):
                whole, split = {
                    "replicated": (2 * param + master + moments, 0),
                    "ZeRO-1": (2 * param, master + moments),
                    "FSDP": (0, 2 * param + master + moments),
                }[layout]
                devices = 1 if k == "any" else int(k)
                expected.append(NUMBERS[n] * (whole + split / devices) / 1e9)
        assert found == pytest.approx(expected, rel=5e-3)


def test_wire_table_is_what_the_ring_gives():
    rows = table("| N | k | replicated, ZeRO-1 float32 | 16-bit | FSDP")
    assert len(rows) == 6
    for n, k, *cells in rows:
        share = (int(k) - 1) / int(k)
        expected = [times * share * b * NUMBERS[n] / 1e9 for times in (2, 3) for b in (4, 2)]
        assert [float(cell) for cell in cells] == pytest.approx(expected, rel=5e-3)


def test_every_file_that_the_page_names_exists():
    for name in re.findall(r"tests/\w+\.py", PAGE.read_text()):
        assert (PAGE.parent.parent / name).exists(), name
