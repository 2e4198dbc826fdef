"""The run directory: complete files, nothing of another run lost, one process at a time."""

import dataclasses
import json
from pathlib import Path

import pytest

from experiments.errors import UserError
from experiments.presets import PRESETS
from experiments.tracking.identity import check_same_run, config_values
from experiments.tracking.run_dir import EpochRecord, RunDir

RECORD = EpochRecord(
    epoch=1,
    step=10,
    train_loss=0.5,
    test_loss=float("nan"),
    test_accuracy=0.25,
    images_per_second=100.0,
    loss_scale=2.0**15,
    total_skips=2,
    seconds=3.0,
    peak_memory_bytes=4,
)
DIGITS = PRESETS["digits"]


def start(path, **facts):
    """A run as train.py begins it; the caller lets go of the directory."""
    run_dir = RunDir(path)
    moved_to = run_dir.start()
    run_dir.write_config(DIGITS, **facts)
    run_dir.close()
    return run_dir, moved_to


def test_metrics_have_a_line_an_epoch_with_the_documented_keys(tmp_path):
    run_dir, _ = start(tmp_path / "new" / "run")
    run_dir.metrics.append(vars(RECORD))
    run_dir.metrics.append(vars(RECORD))
    lines = (run_dir.path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert list(json.loads(lines[0])) == [
        "epoch",
        "step",
        "train_loss",
        "test_loss",
        "test_accuracy",
        "images_per_second",
        "loss_scale",
        "total_skips",
        "seconds",
        "peak_memory_bytes",
    ]


def test_config_is_written_with_versions(tmp_path):
    run_dir, _ = start(tmp_path, num_params=5)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content == run_dir.saved_config()
    assert content["preset"] == "digits"
    assert content["num_params"] == 5
    assert set(content["versions"]) == {"jax", "flax", "optax"}


def test_earlier_runs_are_moved_aside_with_all_they_left(tmp_path):
    for number in range(3):
        run_dir, moved_to = start(tmp_path, run=number)
        assert moved_to == (tmp_path / f"earlier-{number}" if number else None)
        run_dir.metrics.append(vars(RECORD))
        run_dir.events.append({"event": "skip", "step": number})
        (run_dir.checkpoints / str(number)).mkdir(parents=True)
        run_dir.tensorboard.mkdir()
    for number in (1, 2):
        earlier = tmp_path / f"earlier-{number}"
        assert json.loads((earlier / "config.json").read_text())["run"] == number - 1
        assert (earlier / "metrics.jsonl").read_text().count("\n") == 1
        assert json.loads((earlier / "events.jsonl").read_text())["step"] == number - 1
        assert [entry.name for entry in (earlier / "checkpoints").iterdir()] == [str(number - 1)]
        assert (earlier / "tensorboard").is_dir()


@pytest.mark.parametrize("left", ["metrics", "a checkpoint"])
def test_run_that_left_anything_is_kept(tmp_path, left):
    run_dir, _ = start(tmp_path)
    if left == "metrics":
        run_dir.metrics.append(vars(RECORD))
    else:
        (run_dir.checkpoints / "7").mkdir(parents=True)
    assert start(tmp_path)[1] == tmp_path / "earlier-1"


def test_run_without_epoch_and_checkpoint_is_not_kept(tmp_path):
    run_dir, _ = start(tmp_path)
    run_dir.events.append({"event": "loss_scale", "step": 0})
    (run_dir.checkpoints / "7.orbax-checkpoint-tmp").mkdir(parents=True)
    assert start(tmp_path)[1] is None
    assert run_dir.events.read() == []


def test_a_run_that_does_not_start_leaves_the_earlier_one_in_place(tmp_path):
    run_dir, _ = start(tmp_path)
    run_dir.metrics.append(vars(RECORD))
    RunDir(tmp_path).close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".lock", "config.json", "events.jsonl", "metrics.jsonl"}
    assert len(run_dir.metrics.read()) == 1


def test_a_directory_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="not a run's"):
        RunDir(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_second_process_is_refused(tmp_path):
    first = RunDir(tmp_path)
    with pytest.raises(UserError, match="in use by another process"):
        RunDir(tmp_path)
    first.close()
    RunDir(tmp_path).close()


@pytest.mark.parametrize("below", ["", "run"])
def test_path_that_cannot_be_a_directory_is_named(tmp_path, below):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / below
    with pytest.raises(UserError, match=f"--out {path} cannot be written"):
        RunDir(Path(path))


def test_run_is_complete_with_its_last_epoch_and_that_checkpoint(tmp_path):
    run_dir, _ = start(tmp_path)
    assert not run_dir.is_complete(1)
    run_dir.metrics.append(vars(RECORD))
    assert not run_dir.is_complete(1)  # Killed while the checkpoint was written.
    (run_dir.checkpoints / str(RECORD.step)).mkdir(parents=True)
    assert run_dir.is_complete(1)
    assert not run_dir.is_complete(2)


@pytest.mark.parametrize("content", ['{"preset": "dig', "[1]", "null"])
def test_config_that_is_not_json_is_named(tmp_path, content):
    run_dir, _ = start(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match="config.json cannot be read"):
        run_dir.saved_config()


def test_directory_without_a_run_has_no_config(tmp_path):
    run_dir = RunDir(tmp_path)
    assert run_dir.saved_config() is None
    run_dir.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bfloat16"}, "--precision was float16, is bfloat16"),
        ({"learning_rate": 0.1, "seed": 3}, "--seed was 0, is 3; --learning-rate was 0.05, is 0.1"),
        ({"stage_sizes": (1,)}, r"--stage-sizes was \[3, 4, 6, 3\], is \[1\]"),
        ({"epochs": 30}, "--epochs was 20, is 30"),  # shapes the cosine
    ],
)
def test_other_options_are_refused_by_name(options, message):
    saved = {**config_values(DIGITS), "num_params": 5}
    with pytest.raises(UserError, match=message):
        check_same_run(saved, dataclasses.replace(DIGITS, **options), "the run")


def test_another_preset_is_refused():
    with pytest.raises(UserError, match="--preset was fashion_mnist, is digits"):
        check_same_run(config_values(PRESETS["fashion_mnist"]), DIGITS, "the run")


def test_run_from_before_an_option_was_there_has_its_default():
    saved = config_values(DIGITS)
    del saved["nesterov"]
    check_same_run(saved, DIGITS, "the run")
    with pytest.raises(UserError, match="--nesterov was False, is True"):
        check_same_run(saved, dataclasses.replace(DIGITS, nesterov=True), "the run")


def test_directory_that_another_process_writes_is_only_read(tmp_path):
    run_dir, _ = start(tmp_path)
    run_dir.metrics.append(vars(RECORD))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = RunDir(tmp_path, writes=False)
    assert other.start() is None
    other.write_config(DIGITS)
    other.metrics.append(vars(RECORD))
    other.metrics.cut_after(0)
    other.close()
    assert len(other.metrics.read()) == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_does_not_change_a_step_may_differ():
    saved = config_values(DIGITS)
    options = {"out": Path("x"), "resume": True, "keep": 9, "checkpoint_every": 3}
    options["blocks"] = "low_traffic"
    options |= {"data_parallel": True, "shard_optimizer": True}
    check_same_run(saved, dataclasses.replace(DIGITS, **options), "the run")
    constant = dataclasses.replace(DIGITS, schedule="constant")
    longer = dataclasses.replace(constant, epochs=99)
    check_same_run(config_values(constant), longer, "the run")
