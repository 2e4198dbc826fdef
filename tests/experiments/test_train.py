"""The command as a user runs it, good and bad input."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--width", "2", "--stage-sizes", "1", "--batch-size", "128", "--image-size", "8"]
EPOCH_LINE = re.compile(
    r"epoch \d+/\d+  loss \d+\.\d{4}  test loss \d+\.\d{4}  accuracy \d+\.\d%  "
    r"loss scale \d+  skipped \d+  \d+ images/s"
)


def run(*args, cwd=ROOT, **environment):
    start = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-m", "experiments.train", *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    result.seconds = time.perf_counter() - start
    assert "Traceback" not in result.stdout + result.stderr
    return result


def test_a_run_prints_and_writes_its_epochs(tmp_path, data_dir):
    args = ["--epochs", 2, "--data-dir", data_dir, *SMALL]
    result = run(*args, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(EPOCH_LINE.findall(result.stdout)) == 2
    assert result.stderr == ""
    out = tmp_path / "runs" / "digits-float16"
    config = json.loads((out / "config.json").read_text())
    assert (config["precision"], config["epochs"], config["width"]) == ("float16", 2, 2)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records] == [1, 2]
    assert all(0 < record["images_per_second"] for record in records)
    assert records[1]["seconds"] > records[0]["seconds"]

    # The same command again: no error, and the first run is still there.
    again = run(*args, "--epochs", 1, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "earlier-1" in again.stdout
    assert (out / "earlier-1" / "metrics.jsonl").read_text().count("\n") == 2


def test_another_precision(tmp_path, data_dir):
    args = ["--precision", "bfloat16", "--epochs", 1, "--data-dir", data_dir, "--out", tmp_path]
    result = run("digits", *args, *SMALL)
    assert result.returncode == 0, result.stderr
    assert "loss scale 1  skipped 0" in result.stdout


@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_training_that_cannot_go_on_stops_with_one_message(tmp_path, data_dir, precision):
    result = run(
        *("--precision", precision, "--learning-rate", 1e30, "--warmup-epochs", 0, "--epochs", 40),
        *("--max-consecutive-skips", 45, "--data-dir", data_dir, "--out", tmp_path),
        *SMALL,
    )
    assert result.returncode == 1, result.stdout
    assert "steps in a row were skipped" in result.stderr
    assert "Lower --learning-rate" in result.stderr
    if precision == "float16":
        assert "loss scale 6.10352e-05" in result.stderr


def test_help():
    result = run("--help")
    assert result.returncode == 0
    assert "--precision {float16,bfloat16,float32}" in result.stdout


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["nosuch"], "nosuch"),
        (["--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["--batch-size", "many"], "many"),
    ],
)
def test_wrong_arguments_end_with_code_2(args, expected):
    result = run(*args)
    assert result.returncode == 2
    assert expected in result.stderr
    assert result.seconds < 10


def test_unreachable_data_says_what_to_download(tmp_path):
    # A proxy that is not there: no test may start a download of 170 MB.
    nowhere = "http://127.0.0.1:9"
    environment = {"HTTPS_PROXY": nowhere, "https_proxy": nowhere, "NO_PROXY": "", "no_proxy": ""}
    result = run("cifar10", "--data-dir", tmp_path, "--out", tmp_path / "run", **environment)
    assert result.returncode == 1
    assert "cifar-10-binary.tar.gz" in result.stderr
    assert str(tmp_path / "downloads" / "manual") in result.stderr


def test_set_in_the_wrong_format(tmp_path):
    prepared = tmp_path / "digits" / "1.0.0"
    prepared.mkdir(parents=True)
    (prepared / "dataset_info.json").write_text('{"name": "digits", "fileFormat": "tfrecord"}')
    result = run("--data-dir", tmp_path, "--out", tmp_path / "run")
    assert result.returncode == 1
    assert "tfrecord" in result.stderr
    assert str(prepared) in result.stderr


def test_out_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    result = run("--out", tmp_path / "file" / "run")
    assert result.returncode == 1
    assert "Choose a directory that can" in result.stderr
    assert result.seconds < 10


def test_batch_larger_than_the_set(tmp_path, data_dir):
    result = run("--batch-size", 2000, "--data-dir", data_dir, "--out", tmp_path, "--image-size", 8)
    assert result.returncode == 1
    assert "1437" in result.stderr
