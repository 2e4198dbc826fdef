"""The comparison as a command: what it runs, skips, refuses and survives."""

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_runs import write_comparison, write_run

from experiments import compare
from experiments.comparison import machine
from experiments.comparison.processes import last_message

ROOT = Path(__file__).parents[2]
SMALL = ["--width", "2", "--stage-sizes", "1", "--batch-size", "128", "--image-size", "8"]

# A training in place of the real one. It logs its arguments; DIE names the runs that fail.
STUB = f"""
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from fake_runs import write_run
from experiments.cli import parse_config
config = parse_config(sys.argv[1:], "train")
with open(config.out.parents[1] / "log", "a") as log:
    log.write(f"{{config.out.name}} {{config.resume}}\\n")
if config.out.name in os.environ.get("DIE", "").split():
    write_run(config.out, config.precision, config.seed, done=0, epochs=config.epochs)
    sys.exit("noise\\nerror: Training stopped at step 7: no good.\\nLower --learning-rate.")
if os.environ.get("HANG") == config.out.name:
    def stop(number, frame):
        with open(config.out.parents[1] / "signals", "a") as signals:
            signals.write(f"{{number}} ")
        time.sleep(0.5)  # for a second one
        sys.exit(128 + number)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    (config.out.parents[1] / "hangs").write_text("")
    time.sleep(120)
print("an epoch")
write_run(config.out, config.precision, config.seed, epochs=config.epochs)
"""


@pytest.fixture
def out(tmp_path, monkeypatch):
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    monkeypatch.setattr(compare, "TRAIN_COMMAND", (sys.executable, str(stub)))
    return tmp_path / "out"


def run(out, *args, train_args=("--epochs", "2")):
    return compare.main(["digits", "--out", str(out), *args, "--", *train_args])


def started(out):
    log = out / "log"
    return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []


# Running


def test_all_precisions_of_a_seed_come_before_the_next_seed(out, capfd):
    assert run(out, "--seeds", "2") == 0
    assert started(out) == [
        *("float32-seed0", "bfloat16-seed0", "float16-seed0"),
        *("float32-seed1", "bfloat16-seed1", "float16-seed1"),
    ]
    printed = capfd.readouterr()
    assert "[4/6] float32, seed 1" in printed.out
    assert printed.out.count("an epoch") == 6
    assert printed.err == ""
    assert {path.name for path in out.glob("*.png")} == {
        *("overview.png", "accuracy.png", "loss.png", "loss_scale.png", "cost.png")
    }


def test_each_training_resumes_with_the_given_options(out):
    assert run(out, "--seeds", "1", "--precisions", "float16") == 0
    assert (out / "log").read_text() == "float16-seed0 True\n"
    path = out / "runs" / "float16-seed0"
    config = json.loads((path / "config.json").read_text())
    assert (config["epochs"], config["seed"], config["precision"]) == (2, 0, "float16")
    expected = (
        f"python -m experiments.train digits --precision float16 --seed 0 --out {path} --resume "
        "--epochs 2"
    )
    report = (out / "report.md").read_text()
    assert expected in report
    assert "python -m experiments.compare digits --out" in report
    assert machine.describe_machine() in report


def test_complete_runs_are_skipped_and_others_go_on(out, capsys):
    write_run(out / "runs" / "float32-seed0", "float32", 0, epochs=2)
    assert run(out, "--seeds", "2", "--precisions", "float32") == 0
    assert started(out) == ["float32-seed1"]
    assert "[1/2] float32, seed 0: complete" in capsys.readouterr().out
    assert run(out, "--seeds", "2", "--precisions", "float32") == 0
    assert started(out) == ["float32-seed1"]


def test_the_report_covers_runs_of_an_earlier_call(out):
    assert run(out, "--seeds", "1", "--precisions", "float32") == 0
    assert run(out, "--seeds", "1", "--precisions", "float16") == 0
    report = (out / "report.md").read_text()
    assert "| quantity | float32, 1 complete | float16, 1 complete |" in report
    assert report.count("--precision float32 --seed 0") == 1


def test_a_failed_run_is_reported_and_the_others_go_on(out, capfd, monkeypatch):
    monkeypatch.setenv("DIE", "float32-seed0")
    assert run(out, "--seeds", "1") == 1
    assert started(out) == ["float32-seed0", "bfloat16-seed0", "float16-seed0"]
    printed = capfd.readouterr()
    assert "1 of 3 runs failed: float32-seed0" in printed.err
    assert "error: Training stopped at step 7" in printed.err  # as it came
    for name in ("report.md", "report.html"):
        report = (out / name).read_text()
        assert "Training stopped at step 7: no good.\nLower --learning-rate." in report
        assert "noise" not in report
        assert "float32-seed0 stopped, exit code 1" in report


def test_a_failed_run_is_tried_again(out, monkeypatch):
    monkeypatch.setenv("DIE", "float32-seed0")
    assert run(out, "--seeds", "1", "--precisions", "float32") == 1
    monkeypatch.setenv("DIE", "")
    for file in (out / "runs" / "float32-seed0").iterdir():
        file.unlink()
    (out / "runs" / "float32-seed0").rmdir()
    assert run(out, "--seeds", "1", "--precisions", "float32") == 0
    assert "no good" not in (out / "report.md").read_text()


def test_report_only_trains_nothing_and_keeps_what_is_known(out):
    assert run(out, "--seeds", "1") == 0
    before = (out / "report.md").read_text()
    (out / "report.md").unlink()
    assert compare.main(["digits", "--out", str(out), "--report-only"]) == 0
    assert (out / "report.md").read_text() == before
    assert len(started(out)) == 3


# Refusals


@pytest.mark.parametrize("precision", ["float32", "float16"])  # the first run, and a later one
def test_a_run_with_other_settings_is_refused_before_anything_runs(out, capsys, precision):
    path = out / "runs" / f"{precision}-seed0"
    write_run(path, precision, 0, epochs=2, width=8)
    assert run(out, "--seeds", "1") == 1
    message = capsys.readouterr().err
    assert f"{path} was made with other settings: --width is 8 there and 16 here" in message
    assert started(out) == []
    assert not (out / "report.md").exists()


def test_other_epochs_are_other_settings(out, capsys):
    write_run(out / "runs" / "float32-seed0", "float32", 0, epochs=3)
    assert run(out, "--seeds", "1") == 1
    assert "--epochs is 3 there and 2 here" in capsys.readouterr().err


def test_a_report_of_mixed_runs_is_refused(out, capsys):
    write_comparison(out, seeds=1, precisions=("float32",))
    write_run(out / "runs" / "float16-seed0", "float16", learning_rate=0.1)
    assert compare.main(["--report-only", "--out", str(out)]) == 1
    assert "--learning-rate is 0.1 there and 0.05 in" in capsys.readouterr().err


def test_settings_that_change_no_result_may_differ(out):
    write_run(out / "runs" / "float32-seed0", "float32", 0, epochs=2, keep=7, checkpoint_every=5)
    assert run(out, "--seeds", "1", "--precisions", "float32") == 0


@pytest.mark.parametrize(
    ("args", "train_args", "expected"),
    [
        (["--seeds", "0"], [], "--seeds must be at least 1, got 0"),
        (["--precisions", "float16", "float16"], [], "each of them once"),
        ([], ["--seed", "3"], "which the comparison sets itself"),
        ([], ["--no-resume"], "which the comparison sets itself"),
        ([], ["--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["--report-only"], ["--epochs", "1"], "leave out the options after --"),
    ],
)
def test_wrong_arguments_end_with_code_2(out, capsys, args, train_args, expected):
    assert run(out, *args, train_args=train_args) == 2
    assert expected in capsys.readouterr().err
    assert started(out) == []


def test_unknown_training_options_end_with_code_2(out, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(out, train_args=["--nosuch", "1"])
    assert "--nosuch" in capsys.readouterr().err


def test_nothing_to_report_on(out, capsys):
    assert compare.main(["--report-only", "--out", str(out)]) == 1
    assert "There is no run in" in capsys.readouterr().err


def test_only_one_comparison_at_a_time(out, capsys):
    out.mkdir()
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(out) == 1
    assert "in use by another comparison" in capsys.readouterr().err


def test_out_that_cannot_be_written(out, capsys):
    out.write_text("")
    assert run(out) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_a_damaged_comparison_file_is_named(out, capsys):
    out.mkdir()
    (out / "comparison.json").write_text("{")
    assert run(out) == 1
    assert "comparison.json cannot be read" in capsys.readouterr().err


# Signals


def launch(out, **environment):
    """A comparison of its own process, with the stub that the fixture has written."""
    program = (
        "import sys; from experiments import compare;"
        f"compare.TRAIN_COMMAND = (sys.executable, {str(out.parent / 'stub.py')!r});"
        "sys.exit(compare.main())"
    )
    args = ["digits", "--out", str(out), "--seeds", "1", "--", "--epochs", "2"]
    return subprocess.Popen(
        [sys.executable, "-c", program, *args],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_the_training_once_and_ends_the_comparison_after_it(out, number, code):
    process = launch(out, HANG="bfloat16-seed0")
    wait_for(out / "hangs")
    os.killpg(process.pid, number)  # as a terminal does it, to the whole group
    printed, error = process.communicate(timeout=60)
    assert process.returncode == code
    assert (out / "signals").read_text() == f"{int(number)} "
    assert f"stopped by {signal.Signals(number).name}: the same command goes on" in error
    assert "Traceback" not in printed + error
    assert started(out) == ["float32-seed0", "bfloat16-seed0"]

    # It goes on where it stopped.
    assert run(out, "--seeds", "1") == 0
    assert started(out)[2:] == ["bfloat16-seed0", "float16-seed0"]


def test_a_killed_comparison_waits_for_the_training_that_it_left_behind(out):
    path = out / "runs" / "float32-seed0"
    path.mkdir(parents=True)
    orphan = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys; lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX);"
            "print(flush=True); sys.stdin.read()",
            str(path / ".lock"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert orphan.stdin and orphan.stdout
    orphan.stdout.readline()
    process = launch(out)
    assert process.stdout
    assert "waiting for the process that trains in" in process.stdout.readline()
    assert started(out) == []
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    orphan.communicate(timeout=60)


# Pieces


@pytest.mark.parametrize(
    ("lines", "exit_code", "expected"),
    [
        (["error: first", "error: a", "b"], 1, "a\nb"),
        (["Traceback (most recent call last):", "  x", "ValueError: y", ""], 1, "ValueError: y"),
        (["progress"], -9, "killed by SIGKILL"),
        ([], 1, "exit code 1, and nothing on standard error"),
        (["a warning"], 0, ""),
    ],
)
def test_last_message_of_a_process(lines, exit_code, expected):
    assert last_message(lines, exit_code) == expected


def test_cpu_model(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "cpuinfo")
    assert machine.cpu_model() != ""
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\n")
    assert machine.cpu_model() == "A CPU @ 2 GHz"
    assert machine.describe_machine().startswith("A CPU @ 2 GHz, ")


def test_training_does_not_need_matplotlib():
    program = (
        "import sys; sys.modules['matplotlib'] = None;"
        "import experiments.train, experiments.tracking.session, experiments.compare"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


# The real training


@pytest.mark.slow
def test_two_precisions_from_end_to_end(tmp_path, data_dir):
    args = ["--seeds", "1", "--precisions", "float32", "float16", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "experiments.compare", "digits", *args, "--"]
    command += ["--epochs", "1", "--data-dir", str(data_dir), *SMALL]
    for expected in ("[2/2] float16, seed 0", "[2/2] float16, seed 0: complete"):
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        assert expected in result.stdout.splitlines() or expected in result.stdout
        report = (tmp_path / "out" / "report.md").read_text()
        assert "| float32, seed 0 | 1 of 1 |" in report
        assert "| float16, seed 0 | 1 of 1 |" in report
        assert "no spread is known" in report
        assert shlex.join(["--data-dir", str(data_dir)]) in report
    assert list((tmp_path / "out" / "runs" / "float16-seed0" / "tensorboard").iterdir())
