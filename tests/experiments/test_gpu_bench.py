"""The script for a GPU, on the CPU at tiny sizes. Times are there, and not looked at."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import gpu_bench
from experiments.benchmarks import device_checks, gpu_time
from experiments.benchmarks.contenders import NotMeasured
from experiments.benchmarks.gpu_plan import CIFAR, COMMAND_BUFFERS, TORCH, Measurement, make_plan
from experiments.gpu.targets import GPUS

TINY = dataclasses.replace(CIFAR, batch_size=2, image_size=8, width=2, stage_sizes=(1,))
NOT_ALLOWED = (
    *("tyro", "matplotlib", "tensorflow_datasets", "tensorboardX", "grain", "sklearn"),
    *("tensorflow", "torch", "jmp"),
)


def test_needs_no_package_but_jax_flax_optax_numpy(environment):
    """Flax itself imports rich and Orbax where they are; nothing else may be needed."""
    block = "".join(f"sys.modules[{name!r}] = None; " for name in NOT_ALLOWED)
    code = (
        f"import sys; {block}import flax.nnx, flax.training.dynamic_scale, optax\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "import experiments.gpu_bench\n"
        "after = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(after - before - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['experiments', 'mpopt']"


@pytest.mark.parametrize("dtype", device_checks.HALF_DTYPES)
@pytest.mark.parametrize("name", device_checks.CHECKS)
def test_checks_pass_on_this_device(name, dtype):
    assert device_checks.CHECKS[name](dtype) is None


def test_check_of_the_rounding_sees_one_wrong_bit(monkeypatch):
    class Truncating:
        def cast_to_param(self, tree):
            bits = jax.lax.bitcast_convert_type(tree["kernel"], jnp.uint32)
            bits = jax.lax.bitwise_and(bits, np.uint32(0xFFFF0000))
            return {"kernel": jax.lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)}

    monkeypatch.setattr(device_checks, "policy", lambda dtype: Truncating())
    assert "are rounded otherwise" in device_checks.rounding_is_numpys(jnp.bfloat16, 1000)


def test_plan_covers_what_is_promised():
    plan = make_plan()
    names = [measurement.name for measurement in plan]
    assert len(set(names)) == len(names)
    for workload in ("ImageNet", "CIFAR"):
        for what in (
            *("mpopt float16", "mpopt bfloat16", "optax float32, TF32", "optax float32, highest"),
            *("Flax DynamicScale float16", TORCH, "mpopt float16, command buffers on"),
            *("mpopt float16, command buffers off", "mpopt float16, scan of 1"),
            "mpopt float16, scan of 8",
        ):
            assert f"{workload}, {what}" in names
    assert "ImageNet, mpopt float16, low_traffic" in names


@pytest.mark.parametrize("command_buffers", COMMAND_BUFFERS)
def test_xla_knows_the_values_of_the_option(command_buffers):
    try:
        options = gpu_time._compiler_options(command_buffers)
    except NotMeasured as error:
        pytest.skip(str(error))
    jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=options)


@pytest.mark.parametrize(
    "options",
    [{}, {"scan": 2}, {"blocks": "low_traffic", "contender": "mpopt bfloat16"}],
    ids=["a step", "scan", "low traffic"],
)
def test_measurement_has_its_figures(options):
    measurement = Measurement(**{"workload": TINY, "contender": "mpopt float16", **options})
    result = gpu_time.time_measurement(measurement, turn_seconds=0.001)
    assert len(result.turns) == gpu_time.TURNS
    assert result.images_per_second == pytest.approx(2e3 / result.milliseconds)
    assert result.program_peak_bytes is None or result.program_peak_bytes > 0
    assert result.bound_milliseconds is None and "cpu" in result.bound_note


@pytest.mark.parametrize(
    ("kind", "name"),
    [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA L4", None)],
)
def test_bound_is_of_the_device_at_hand(kind, name):
    assert gpu_time.find_gpu(kind) is (GPUS[name] if name else None)


def fake_timed(milliseconds):
    return gpu_time.Timed(milliseconds, [milliseconds], 1e3 / milliseconds)


def test_a_failure_is_written_down_and_the_rest_goes_on(tmp_path):
    plan = make_plan()[:4]

    def measure(measurement):
        seen = json.loads((tmp_path / "out.json").read_text())
        assert len(seen["measurements"]) == plan.index(measurement)  # written after each
        if measurement is plan[1]:
            raise RuntimeError("out of memory\nand a long story")
        if measurement is plan[2]:
            raise NotMeasured("no torch")
        return fake_timed(2.0)

    record = gpu_bench.Record(tmp_path / "out.json", {"device": "fake"})
    gpu_bench.take_measurements(record, plan, 1e9, measure)
    results = list(json.loads((tmp_path / "out.json").read_text())["measurements"].values())
    assert results[1]["error"] == "RuntimeError: out of memory"
    assert results[2]["not_measured"] == "no torch"
    assert (results[0]["milliseconds"], results[3]["milliseconds"]) == (2.0, 2.0)
    table = gpu_bench.format_table(record.content)
    assert "(RuntimeError: out of memory) | – |" in table and "| 2.00 | 500 |" in table


def test_what_does_not_fit_the_budget_is_dropped_and_named(tmp_path):
    now = 0.0
    large = [Measurement(CIFAR, name) for name in ("mpopt float16", "mpopt bfloat16", TORCH)]

    def measure(measurement):
        nonlocal now
        now += 50
        return fake_timed(1.0)

    record = gpu_bench.Record(tmp_path / "out.json", {})
    gpu_bench.take_measurements(record, large, 120, measure, clock=lambda: now)
    assert list(record.content["measurements"]) == [m.name for m in large[:2]]
    assert record.content["dropped"] == [large[2].name]
    assert f"Dropped, as the time was up: {large[2].name}." in gpu_bench.format_table(
        record.content
    )


def test_command_writes_checks_and_measurements(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        gpu_bench,
        "CHECKS",
        {"a check": lambda dtype: "2 bits differ" if dtype == np.float16 else None},
    )
    out = tmp_path / "new" / "out.json"
    args = ["--tiny", "--turn-seconds", "0.001", "--only", "CIFAR, Flax", "--out", str(out)]
    assert gpu_bench.main(args) == 1  # as a check has failed
    content = json.loads(out.read_text())
    assert content["checks"] == {"a check, float16": "2 bits differ", "a check, bfloat16": "passed"}
    assert list(content["measurements"]) == ["CIFAR, Flax DynamicScale float16"]
    assert content["versions"]["jax"] == jax.__version__
    assert "| CIFAR, Flax DynamicScale float16 |" in capsys.readouterr().out


def test_file_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert gpu_bench.main(["--out", str(tmp_path / "file" / "out.json")]) == 1
    assert "cannot be written" in capsys.readouterr().err
