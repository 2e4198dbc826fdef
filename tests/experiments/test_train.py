"""The command as a user runs it, good and bad input."""

import json
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


@pytest.fixture
def run(environment):
    """Runs the command to its end."""

    def run(*args, cwd=ROOT, **variables):
        start = time.perf_counter()
        result = subprocess.run(
            [sys.executable, "-m", "experiments.train", *map(str, args)],
            cwd=cwd,
            env={**environment, **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )
        result.seconds = time.perf_counter() - start
        assert "Traceback" not in result.stdout + result.stderr
        return result

    return run


def test_a_run_prints_and_writes_its_epochs(run, tmp_path, data_dir):
    args = ["--epochs", 2, "--data-dir", data_dir, *SMALL]
    result = run(*args, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(EPOCH_LINE.findall(result.stdout)) == 2
    # jax 0.10 complains of the machine when it takes a program from the cache of this machine.
    assert [line for line in result.stderr.splitlines() if "cpu_aot_loader" not in line] == []
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


def test_another_precision(run, tmp_path, data_dir):
    args = ["--precision", "bfloat16", "--epochs", 1, "--data-dir", data_dir, "--out", tmp_path]
    result = run("digits", *args, *SMALL)
    assert result.returncode == 0, result.stderr
    assert "loss scale 1  skipped 0" in result.stdout


@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_training_that_cannot_go_on_stops_with_one_message(run, tmp_path, data_dir, precision):
    result = run(
        *("--precision", precision, "--learning-rate", 1e30, "--warmup-epochs", 0, "--epochs", 40),
        *("--max-consecutive-skips", 45, "--data-dir", data_dir, "--out", tmp_path),
        *("--checkpoint-every", 2, *SMALL),
    )
    assert result.returncode == 1, result.stdout
    assert "steps in a row were skipped" in result.stderr
    assert "ower --learning-rate" in result.stderr
    assert "Non-finite gradients, in the order of the backward pass: " in result.stderr
    if precision == "float16":
        assert "loss scale 6.10352e-05" in result.stderr
        assert re.search(r"forward pass of that step overflows at \S+: \S+ makes", result.stderr)
    # What was saved before is still there, and nothing of the end.
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    last_applied = min(line["step"] for line in trailing_skips(events)) - 1
    saved = [line["step"] for line in events if line["event"] == "checkpoint"]
    epoch_ends = {11 * epoch for epoch in range(1, 41)}
    assert max((step for step in saved if step not in epoch_ends), default=0) <= last_applied
    stop = events[-1]
    assert stop["event"] == "stop" and stop["reason"] in result.stderr


def test_training_that_ends_with_params_that_are_not_finite_is_an_error(run, tmp_path, data_dir):
    # Gradients stay finite, so that the step is applied: only the decay overflows.
    result = run(
        *("--weight-decay", 1e38, "--learning-rate", 1e3, "--warmup-epochs", 0, "--epochs", 1),
        *("--data-dir", data_dir, "--out", tmp_path, *SMALL),
    )
    assert result.returncode == 1, result.stdout
    assert re.search(
        r"error: The training ended with a test loss of (nan|inf) after", result.stderr
    )
    assert "--weight-decay" in result.stderr


def trailing_skips(events):
    """The skips at the end of a run, one step after the other."""
    skips = [line for line in events if line["event"] == "skip"]
    start = len(skips) - 1
    while start > 0 and skips[start - 1]["step"] == skips[start]["step"] - 1:
        start -= 1
    return skips[start:]


def test_help(run):
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
def test_wrong_arguments_end_with_code_2(run, args, expected):
    result = run(*args)
    assert result.returncode == 2
    assert expected in result.stderr
    assert result.seconds < 10


def test_unreachable_data_says_what_to_download(run, tmp_path):
    # A proxy that is not there: no test may start a download of 170 MB.
    nowhere = "http://127.0.0.1:9"
    environment = {"HTTPS_PROXY": nowhere, "https_proxy": nowhere, "NO_PROXY": "", "no_proxy": ""}
    result = run("cifar10", "--data-dir", tmp_path, "--out", tmp_path / "run", **environment)
    assert result.returncode == 1
    assert "cifar-10-binary.tar.gz" in result.stderr
    assert str(tmp_path / "downloads" / "manual") in result.stderr


def test_set_in_the_wrong_format(run, tmp_path):
    prepared = tmp_path / "digits" / "1.0.0"
    prepared.mkdir(parents=True)
    (prepared / "dataset_info.json").write_text('{"name": "digits", "fileFormat": "tfrecord"}')
    result = run("--data-dir", tmp_path, "--out", tmp_path / "run")
    assert result.returncode == 1
    assert "tfrecord" in result.stderr
    assert str(prepared) in result.stderr


def test_out_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    result = run("--out", tmp_path / "file" / "run")
    assert result.returncode == 1
    assert "Choose a directory that can" in result.stderr
    assert result.seconds < 10


def test_batch_larger_than_the_set(run, tmp_path, data_dir):
    result = run("--batch-size", 2000, "--data-dir", data_dir, "--out", tmp_path, "--image-size", 8)
    assert result.returncode == 1
    assert "1437" in result.stderr
