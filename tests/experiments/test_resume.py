"""Runs that are stopped, killed and resumed: the end is the undisturbed run's, bit for bit."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from experiments.tracking.checkpoint import Checkpointer

ROOT = Path(__file__).parents[2]
SMALL = ["--width", "2", "--stage-sizes", "1", "--batch-size", "128", "--image-size", "8"]
STEPS_PER_EPOCH = 1437 // 128
# Overflows at the start, growth later: the loss scale's state matters.
LOSS_SCALE = ["--initial-loss-scale", 2**24, "--growth-interval", "7"]


@pytest.fixture
def train(environment, data_dir):
    """Starts the command; see `printed` for what it prints to either stream."""
    with contextlib.ExitStack() as files:

        def start(*args):
            # A file, not a pipe: a pipe that nobody reads stops the process when it is full.
            output = files.enter_context(tempfile.TemporaryFile("w+"))
            command = [sys.executable, "-m", "experiments.train", "--data-dir", data_dir]
            process = subprocess.Popen(
                [*map(str, command), *map(str, args)],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            process.output = output
            return process

        yield start


def printed(process, timeout):
    """What the process has printed when it ends."""
    process.wait(timeout=timeout)
    process.output.seek(0)
    return process.output.read()


def end(process, code=0):
    output = printed(process, timeout=300)
    assert process.returncode == code, output
    assert "Traceback" not in output
    return output


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_event(out, event, step, process):
    """Waits until the run has recorded an event at this step or a later one."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        text = (out / "events.jsonl").read_text() if (out / "events.jsonl").exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                record = json.loads(line)
                if record["event"] == event and record["step"] >= step:
                    return
        time.sleep(0.01)
    raise AssertionError(f"no {event} from step {step} on: {printed(process, timeout=1)}")


def final_state(out):
    """Dtype, shape and CRC-32 of every leaf of the newest checkpoint."""
    checkpointer = Checkpointer(out / "checkpoints", keep=2)
    step = checkpointer.steps()[-1]
    leaves = checkpointer.read_metadata(step)["leaves"]
    checkpointer.close()
    paths = ["/params/", "master_params", "inner_state", "batch_stats", "loss_scale", "step_key"]
    for part in paths:
        assert any(part in path for path in leaves), part
    return step, leaves


def assert_same_run(out, control):
    assert final_state(out) == final_state(control)
    free = {"images_per_second", "seconds", "peak_memory_bytes"}
    metrics, expected = (
        [
            {name: value for name, value in line.items() if name not in free}
            for line in read_lines(path / "metrics.jsonl")
        ]
        for path in (out, control)
    )
    assert metrics == expected
    events, expected = (
        [line for line in read_lines(path / "events.jsonl") if line["event"] in kinds]
        for path, kinds in ((out, ("skip", "loss_scale")), (control, ("skip", "loss_scale")))
    )
    assert events == expected
    assert {"skip", "loss_scale"} == {line["event"] for line in events}
    assert [line["step"] for line in events] == sorted(line["step"] for line in events)


@pytest.fixture(scope="module")
def control(environment, data_dir, tmp_path_factory):
    """The undisturbed run of four epochs, without a checkpoint inside an epoch."""
    out = tmp_path_factory.mktemp("control") / "run"
    args = [*SMALL, *LOSS_SCALE, "--epochs", "4", "--data-dir", data_dir, "--out", out]
    subprocess.run(
        [sys.executable, "-m", "experiments.train", *map(str, args)],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=300,
    )
    return out


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_saves_and_resume_ends_as_the_undisturbed_run(
    tmp_path, train, control, number, code
):
    out = tmp_path / "run"
    args = [*SMALL, *LOSS_SCALE, "--epochs", 4, "--out", out, "--checkpoint-every", 3]
    process = train(*args)
    wait_for_event(out, "checkpoint", STEPS_PER_EPOCH + 3, process)
    process.send_signal(number)
    output = end(process, code)
    step = read_lines(out / "events.jsonl")[-1]["step"]
    name = signal.Signals(number).name
    assert f"error: stopped by {name}: step {step} is saved in {out}" in output
    assert "Go on with --resume." in output
    assert STEPS_PER_EPOCH + 3 <= step < 4 * STEPS_PER_EPOCH
    assert (out / "checkpoints" / str(step)).is_dir()

    output = end(train(*args, "--resume"))
    assert f"resumed after step {step}" in output
    assert_same_run(out, control)
    # Once more: nothing is left to do, and nothing is touched.
    before = (out / "metrics.jsonl").read_bytes()
    assert f"the run in {out} is complete" in end(train(*args, "--resume"))
    assert (out / "metrics.jsonl").read_bytes() == before


def test_resume_without_a_run_starts_one(tmp_path, train):
    out = tmp_path / "run"
    output = end(train(*SMALL, "--epochs", 1, "--out", out, "--resume"))
    assert "resumed" not in output and "anew" not in output
    assert [line["epoch"] for line in read_lines(out / "metrics.jsonl")] == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--precision", "bfloat16"], "--precision was float16, is bfloat16"),
        (["--momentum", "0.5"], "--momentum was 0.9, is 0.5"),
        (["--epochs", "5"], "--epochs was 4, is 5"),
    ],
)
def test_resume_of_another_run_is_refused_at_once(train, control, options, message):
    before = sorted((file, file.stat().st_mtime_ns) for file in control.rglob("*.jsonl"))
    args = [*SMALL, *LOSS_SCALE, "--epochs", 4, "--out", control, "--resume"]
    assert message in end(train(*args, *options), code=1)
    assert sorted((file, file.stat().st_mtime_ns) for file in control.rglob("*.jsonl")) == before


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(tmp_path, train):
    epochs, kills = 40, 20
    args = [*SMALL, *LOSS_SCALE, "--epochs", epochs, "--checkpoint-every", 4]
    end(train(*args, "--out", tmp_path / "control"))
    out = tmp_path / "run"
    rng = random.Random(0)
    reached = []
    for kill in range(kills):
        process = train(*args, "--out", out, "--resume")
        if kill % 5:  # Most of them while it trains and saves, some while it starts.
            started = len(read_lines(out / "events.jsonl")) if out.exists() else 0
            wait_until_running(out, started, process)
            time.sleep(rng.uniform(0, 3))
        else:
            time.sleep(rng.uniform(1, 4))
        process.kill()
        output = printed(process, timeout=60)
        assert process.returncode == -signal.SIGKILL, output
        assert "Traceback" not in output
        reached.append(max((int(d.name) for d in checkpoints(out)), default=0))
    assert reached == sorted(reached)  # No kill loses a checkpoint.
    assert len(set(reached)) > kills // 2
    assert 0 < reached[-1] < epochs * STEPS_PER_EPOCH  # The kills fell inside the run.
    end(train(*args, "--out", out, "--resume"))
    assert_same_run(out, tmp_path / "control")


def checkpoints(out):
    folder = out / "checkpoints"
    return [d for d in folder.iterdir() if d.name.isdigit()] if folder.exists() else []


def wait_until_running(out, num_events, process):
    """Waits for a new event: the run has begun, or begun again."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if (out / "events.jsonl").exists():
            text = (out / "events.jsonl").read_text()
            if text.count("\n") != num_events:
                return
        time.sleep(0.01)
    raise AssertionError(printed(process, timeout=1))
