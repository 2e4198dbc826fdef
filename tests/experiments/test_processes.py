"""Two and four real processes on this machine: one run, one stop, one failure, one set of files."""

import contextlib
import json
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import parallel_case
import pytest
from test_checkpointer import flip_a_bit, largest_file
from test_parallel import DEVICES, assert_same_steps, seen
from test_resume import final_state, read_lines, wait_for_event

from experiments.parallel.meeting import HEARTBEAT_SECONDS
from experiments.tracking.checkpoint import Checkpointer

ROOT = Path(__file__).parents[2]
OPTIONS = ["--width", "64", "--stage-sizes", "1", "--batch-size", "128", "--image-size", "8"]
# No overflow, growth within the first epoch: the scale is the same whatever the order of sums.
OPTIONS += ["--initial-loss-scale", "256", "--growth-interval", "7"]
OPTIONS += ["--schedule", "constant", "--warmup-epochs", "0", "--learning-rate", "0.01"]
STEPS_PER_EPOCH = 1437 // 128


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def start(environment):
    """Starts a command in several processes, each with devices of its own."""
    with contextlib.ExitStack() as stack:

        def start(commands, devices=1):
            flags = f"--xla_force_host_platform_device_count={devices}"
            processes = []
            for command in commands:
                output = stack.enter_context(tempfile.TemporaryFile("w+"))
                process = subprocess.Popen(
                    [sys.executable, *map(str, command)],
                    cwd=ROOT,
                    env={**environment, "XLA_FLAGS": flags},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
                process.output = output
                processes.append(process)
            return processes

        yield start


@pytest.fixture
def train(start, data_dir):
    """Starts a training: with `count` processes, or with one that uses one device."""

    def train(count, *args):
        command = ["-m", "experiments.train", *OPTIONS, "--data-dir", data_dir, *args]
        if count == 1:
            return start([command])
        together = ["--data-parallel", "--coordinator", f"127.0.0.1:{free_port()}"]
        return start(
            [*command, *together, "--num-processes", count, "--process-id", index]
            for index in range(count)
        )

    return train


def ended(processes, *codes, timeout=300):
    """What the processes have printed when they end, with these codes."""
    outputs = []
    for process, expected in zip(processes, codes or [0] * len(processes), strict=True):
        process.wait(timeout=timeout)
        process.output.seek(0)
        outputs.append(process.output.read())
        allowed = expected if isinstance(expected, tuple) else (expected,)
        assert process.returncode in allowed, outputs[-1]
    # Gloo, which carries the collectives between CPUs, says whom it meets.
    return [re.sub(r"\[Gloo\] Rank .*\n", "", output) for output in outputs]


@pytest.mark.parametrize(("count", "devices"), [(2, 4), (4, 2)])
@pytest.mark.slow
def test_processes_take_the_steps_of_one_device(tmp_path, start, count, devices):
    address = f"127.0.0.1:{free_port()}"
    script = Path(parallel_case.__file__)
    outs = [tmp_path / str(index) for index in range(count)]
    commands = [[script, address, count, index, out] for index, out in enumerate(outs)]
    ended(start(commands, devices))
    results = [parallel_case.Seen(**pickle.loads(out.read_bytes())) for out in outs]
    for index, result in enumerate(results):
        # Each has its own part; the infinite example is in the last one's.
        size = parallel_case.BATCH // count
        assert result.part == (index * size, (index + 1) * size)
        assert result.crc32 == results[0].crc32
        assert result.evaluation == results[0].evaluation
        assert_same_steps(result, seen("one", "float16"), precision="float16")
        assert all(DEVICES * part == whole for part, whole in result.split_bytes)
        assert not result.applied[parallel_case.BAD_STEP - 1]


@pytest.fixture(scope="module")
def control(environment, data_dir, tmp_path_factory):
    """Two epochs on one device."""
    out = tmp_path_factory.mktemp("control") / "run"
    args = [*OPTIONS, "--epochs", "2", "--data-dir", data_dir, "--out", out]
    subprocess.run(
        [sys.executable, "-m", "experiments.train", *map(str, args)],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=300,
    )
    return out


def leaves_of(out, step):
    checkpointer = Checkpointer(out / "checkpoints", keep=2)
    leaves = checkpointer.read_metadata(step)["leaves"]
    checkpointer.close()
    return leaves


@pytest.mark.slow
def test_stop_of_one_process_stops_all_and_one_device_goes_on(tmp_path, train, control):
    out = tmp_path / "run"
    args = ["--shard-optimizer", "--input", "streamed", "--loader-workers", 1, "--out", out]
    processes = train(2, *args, "--epochs", 100, "--checkpoint-every", 4, "--keep", 9)
    wait_for_event(out, "checkpoint", 4, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    main, other = ended(processes, 143, 143)
    step = read_lines(out / "events.jsonl")[-1]["step"]
    message = f"error: stopped by SIGTERM: step {step} is saved in {out}. Go on with --resume.\n"
    assert main.endswith(message) and other == message  # process 0 alone prints more
    assert step < 2 * STEPS_PER_EPOCH
    leaves = leaves_of(out, step)

    # One device reads what two wrote, and ends as the run that was one device's all along.
    (output,) = ended(train(1, "--epochs", 2, "--keep", 9, "--out", out, "--resume"))
    assert f"resumed after step {step}" in output
    assert leaves_of(out, step) == leaves
    assert [*leaves] == [*final_state(control)[1]]
    records, expected = (read_lines(path / "metrics.jsonl") for path in (out, control))
    assert [record["epoch"] for record in records] == [1, 2]
    for record, other in zip(records, expected, strict=True):
        for name in ("step", "loss_scale", "total_skips"):
            assert record[name] == other[name]
        for name in ("train_loss", "test_loss", "test_accuracy"):
            assert record[name] == pytest.approx(other[name], rel=0.02)
    scales, expected = (
        [line for line in read_lines(path / "events.jsonl") if line["event"] == "loss_scale"]
        for path in (out, control)
    )
    assert scales == expected and len(scales) > 1
    for file in ("metrics.jsonl", "events.jsonl", "config.json"):
        assert list(out.rglob(file)) == [out / file]


@pytest.mark.parametrize(("count", "killed"), [(2, 0), (4, 2)])
@pytest.mark.slow
def test_killed_process_ends_the_others_with_a_message(tmp_path, train, control, count, killed):
    out = tmp_path / "run"
    shutil.copytree(control, out)
    first = STEPS_PER_EPOCH
    if killed == 2:  # and a checkpoint is damaged: all pass it over
        flip_a_bit(largest_file(out / "checkpoints", 2 * STEPS_PER_EPOCH))
    else:
        first = 2 * STEPS_PER_EPOCH
    args = ["--out", out, "--resume", "--checkpoint-every", 3]
    processes = train(count, *args, "--epochs", 100, "--shard-optimizer")
    wait_for_event(out, "resume", first, processes[0])
    wait_for_event(out, "checkpoint", first + 6, processes[0])
    processes[killed].kill()
    begin = time.monotonic()
    # Where process 0 is gone, JAX aborts the others if their own message does not come first.
    codes = [-signal.SIGKILL if index == killed else (1, -signal.SIGABRT) for index in range(count)]
    outputs = ended(processes, *codes)
    assert time.monotonic() - begin < HEARTBEAT_SECONDS + 30
    for index, output in enumerate(outputs):
        if index != killed:
            assert "has lost another process" in output or "another task died" in output
            assert "Traceback" not in output
    assert f"resumed after step {first}" in outputs[0]
    assert ("is damaged" in outputs[0]) == (killed == 2)

    # The rest goes on, whatever their number.
    newest = max(int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdigit())
    (output,) = ended(train(1, *args, "--epochs", newest // STEPS_PER_EPOCH + 1))
    assert f"resumed after step {newest}" in output


def test_processes_with_other_options_are_refused(tmp_path, start):
    command = ["-m", "experiments.train", "--data-parallel", "--out", tmp_path]
    together = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", 2]
    outputs = ended(
        start(
            [*command, *together, "--process-id", index, "--seed", index + 5] for index in (0, 1)
        ),
        1,
        1,
    )
    for output in outputs:
        assert "Process 1 was started with other options than process 0." in output


def test_directory_in_use_ends_all_processes(tmp_path, train, control):
    import fcntl

    with (control / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        main, other = ended(train(2, "--out", control, "--resume"), 1, 1)
    assert "is in use by another process" in main
    assert "error: Process 0 of 2 cannot go on; see what it says." in other
    assert json.loads((control / "config.json").read_text())["epochs"] == 2
