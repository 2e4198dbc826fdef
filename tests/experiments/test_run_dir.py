"""The run directory: complete files, and nothing of an earlier run lost."""

import json
from pathlib import Path

import pytest

from experiments.config import PRESETS
from experiments.errors import UserError
from experiments.run_dir import EpochRecord, RunDir

RECORD = EpochRecord(
    epoch=1,
    train_loss=0.5,
    test_loss=float("nan"),
    test_accuracy=0.25,
    images_per_second=100.0,
    loss_scale=2.0**15,
    total_skips=2,
    seconds=3.0,
)


def test_metrics_have_a_line_an_epoch_with_the_documented_keys(tmp_path):
    run_dir = RunDir(tmp_path / "new" / "run")
    run_dir.start(PRESETS["digits"])
    run_dir.append_metrics(RECORD)
    run_dir.append_metrics(RECORD)
    lines = (run_dir.path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert list(json.loads(lines[0])) == [
        "epoch",
        "train_loss",
        "test_loss",
        "test_accuracy",
        "images_per_second",
        "loss_scale",
        "total_skips",
        "seconds",
    ]


def test_a_number_that_is_not_finite_is_null(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.append_metrics(RECORD)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["test_loss"] is None


def test_config_is_written_with_versions(tmp_path):
    RunDir(tmp_path).start(PRESETS["digits"], num_params=5)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["preset"] == "digits"
    assert content["num_params"] == 5
    assert set(content["versions"]) == {"jax", "flax", "optax"}


def test_earlier_runs_are_moved_aside(tmp_path):
    for number in range(3):
        run_dir = RunDir(tmp_path)
        expected = tmp_path / f"earlier-{number}" if number else None
        assert run_dir.start(PRESETS["digits"], run=number) == expected
        run_dir.append_metrics(RECORD)
    for number in (1, 2):
        content = json.loads((tmp_path / f"earlier-{number}" / "config.json").read_text())
        assert content["run"] == number - 1
        assert (tmp_path / f"earlier-{number}" / "metrics.jsonl").read_text().count("\n") == 1
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def test_a_run_without_an_epoch_is_not_kept(tmp_path):
    RunDir(tmp_path).start(PRESETS["digits"])
    assert RunDir(tmp_path).start(PRESETS["digits"]) is None


def test_a_run_that_does_not_start_leaves_the_earlier_one_in_place(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.start(PRESETS["digits"])
    run_dir.append_metrics(RECORD)
    RunDir(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "metrics.jsonl"}


def test_a_directory_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="not a run's"):
        RunDir(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("below", ["", "run"])
def test_path_that_cannot_be_a_directory_is_named(tmp_path, below):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / below
    with pytest.raises(UserError, match=f"--out {path} cannot be written"):
        RunDir(Path(path))
