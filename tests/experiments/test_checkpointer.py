"""Checkpoints: the right ones kept, whole or absent, and never taken for what they are not."""

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.errors import UserError
from experiments.tracking.checkpoint import Checkpointer


class State(NamedTuple):
    params: Any
    step: jax.Array


def make_state(step):
    weights = jnp.asarray(np.random.RandomState(step).randn(100, 300), jnp.float32)
    params = {"w": weights, "half": weights[0].astype(jnp.float16), "flag": weights[:3, 0] > 0}
    return State(params, jnp.int32(step))


TEMPLATE = jax.tree.map(jnp.zeros_like, make_state(0))


def save(path, steps, *, keep=2, **accuracies):
    checkpointer = Checkpointer(path, keep=keep)
    for step in steps:
        accuracy = accuracies.get(f"step{step}")
        checkpointer.save(step, make_state(step), {"epochs_done": step}, test_accuracy=accuracy)
    checkpointer.close()


def restore(path, template=TEMPLATE):
    lines = []
    checkpointer = Checkpointer(path, keep=2)
    try:
        return checkpointer.restore_newest(template, lambda metadata: None, lines.append), lines
    finally:
        checkpointer.close()


def largest_file(path, step) -> Path:
    files = [file for file in (path / str(step) / "state").rglob("*") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_size)


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def assert_is_step(restored, step):
    assert restored.step == step
    for a, b in zip(
        jax.tree.leaves(restored.state), jax.tree.leaves(make_state(step)), strict=True
    ):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_newest_comes_back_with_its_structure_dtypes_bits_and_metadata(tmp_path):
    save(tmp_path / "checkpoints", [3, 7])
    restored, lines = restore(tmp_path / "checkpoints")
    assert_is_step(restored, 7)
    assert isinstance(restored.state, State)
    assert restored.metadata["epochs_done"] == 7
    assert lines == []


def test_newest_and_best_are_kept(tmp_path):
    save(tmp_path, range(1, 8), keep=2, step2=0.9, step4=0.8, step6=0.7)
    checkpointer = Checkpointer(tmp_path, keep=2)
    assert checkpointer.steps() == [2, 6, 7]
    checkpointer.close()


def test_state_may_be_donated_right_after_the_save(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1)
    overwrite = jax.jit(lambda state: jax.tree.map(jnp.ones_like, state), donate_argnums=0)
    state = make_state(5)
    checkpointer.save(5, state, {})
    for _ in range(20):
        state = overwrite(state)
    checkpointer.close()
    assert_is_step(restore(tmp_path)[0], 5)


def test_empty_directory_has_nothing_to_restore(tmp_path):
    assert restore(tmp_path / "new") == (None, [])


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
def test_damaged_checkpoint_is_passed_over_and_kept_aside(tmp_path, damage, capfd):
    path = tmp_path / "checkpoints"
    save(path, [3, 7])
    damage(largest_file(path, 7))
    restored, lines = restore(path)
    assert_is_step(restored, 3)
    assert len(lines) == 1
    assert lines[0].startswith("the checkpoint of step 7 is damaged (")
    assert (tmp_path / "damaged" / "7").is_dir()
    save(path, [7])  # Its step can be saved again.
    assert_is_step(restore(path)[0], 7)
    assert capfd.readouterr() == ("", "")


def test_damaged_metadata_is_noticed(tmp_path):
    path = tmp_path / "checkpoints"
    save(path, [3, 7])
    truncate(path / "7" / "metadata" / "metadata")
    restored, lines = restore(path)
    assert_is_step(restored, 3)
    assert "step 7 is damaged" in lines[0]


@pytest.mark.parametrize("altered", [b'"epochs_done": 6', b'"epochs": 7'])
def test_altered_metadata_is_noticed(tmp_path, altered):
    path = tmp_path / "checkpoints"
    save(path, [3, 7])
    file = path / "7" / "metadata" / "metadata"
    content = file.read_bytes()
    assert b'"epochs_done": 7' in content
    file.write_bytes(content.replace(b'"epochs_done": 7', altered))
    restored, lines = restore(path)
    assert_is_step(restored, 3)
    assert lines == [
        "the checkpoint of step 7 is damaged (its metadata is not what was saved); passed over"
    ]


def test_nothing_but_damaged_checkpoints_is_an_error_that_leaves_them(tmp_path):
    save(tmp_path, [3, 7])
    for step in (3, 7):
        truncate(largest_file(tmp_path, step))
    with pytest.raises(UserError, match="All checkpoints in .* are damaged: steps 3, 7"):
        restore(tmp_path)
    assert {"3", "7"} <= {entry.name for entry in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: {**p, "w": p["w"].astype(jnp.float16)},
            r"params/w is float32\[100, 300\] in it and float16\[100, 300\] in this run",
        ),
        (
            lambda p: {**p, "half": p["half"][:7]},
            r"params/half is float16\[300\] in it and float16\[7\] in this run",
        ),
        (lambda p: {**p, "new": p["half"]}, "params/new is absent in it"),
        (lambda p: {"w": p["w"], "half": p["half"]}, r"bool\[3\] in it and absent in this run"),
    ],
    ids=["dtype", "shape", "missing leaf", "leaf too many"],
)
def test_leaf_that_does_not_fit_is_named_and_nothing_is_touched(tmp_path, change, message):
    save(tmp_path, [3, 7])
    with pytest.raises(UserError, match=message):
        restore(tmp_path, TEMPLATE._replace(params=change(TEMPLATE.params)))
    assert_is_step(restore(tmp_path)[0], 7)


def test_check_sees_the_metadata_before_the_state_is_read(tmp_path):
    save(tmp_path, [3])
    truncate(largest_file(tmp_path, 3))

    def refuse(metadata):
        raise UserError(f"made after {metadata['epochs_done']} epochs")

    checkpointer = Checkpointer(tmp_path, keep=1)
    with pytest.raises(UserError, match="made after 3 epochs"):
        checkpointer.restore_newest(TEMPLATE, refuse, print)
    checkpointer.close()


def test_what_a_killed_process_left_is_not_a_checkpoint(tmp_path):
    save(tmp_path, [3])
    partial = tmp_path / "7.orbax-checkpoint-tmp"
    (tmp_path / "3").rename(partial)
    save(tmp_path, [2])
    assert_is_step(restore(tmp_path)[0], 2)
    assert not partial.exists()


def test_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file.*cannot be opened"):
        Checkpointer(tmp_path / "file", keep=1)


FULL_DISK = """
import logging, resource, sys
sys.path[:0] = sys.argv[2:]
from test_checkpointer import Checkpointer, Path, UserError, make_state
checkpointer = Checkpointer(Path(sys.argv[1]), keep=2)
checkpointer.save(3, make_state(3), {})
checkpointer.wait()
# No file may grow beyond this: writing fails as it does on a full disk.
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
try:
    # Every leaf's task fails.
    checkpointer.save(7, {str(number): make_state(7) for number in range(8)}, {})
    checkpointer.wait()
except UserError as error:
    print(error)
try:
    checkpointer.close()
except UserError:
    pass
# As asyncio says at the end of the process of a future that a full disk leaves behind.
logging.getLogger("asyncio").error("Future exception was never retrieved")
"""


# A run notices at its next checkpoint.
NEXT_SAVE = FULL_DISK.replace(
    "})\n    checkpointer.wait()", "})\n    checkpointer.save(9, make_state(9), {})"
)


@pytest.mark.parametrize("script", [FULL_DISK, NEXT_SAVE], ids=["wait", "next save"])
def test_failed_write_says_what_is_left_and_leaves_it(tmp_path, script):
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    here = Path(__file__).parent
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(here), str(here.parents[1])],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "could not be written" in result.stdout, result.stderr
    assert "The one of step 3 is complete" in result.stdout
    assert result.stderr == ""
    assert_is_step(restore(tmp_path)[0], 3)
