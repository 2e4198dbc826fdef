"""The GPU's program as a command: what it refuses, prints and writes, and the figures it proves."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import hlo_texts
import pytest
from rich.console import Console

from experiments import gpu_program
from experiments.errors import UsageError, UserError
from experiments.gpu import child
from experiments.gpu.hlo import parse_module
from experiments.gpu.messages import CompiledProgram, Request, StepReport
from experiments.gpu.programs import IMAGE_SETS, make_programs
from experiments.gpu.roofline import measure_costs
from experiments.gpu.table import notes, print_reports, warnings
from experiments.gpu.targets import GPUS, target_config

HERE = Path(__file__).parent
REQUEST = Request("h200", ["digits"])

needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec(child.PLUGIN) is None,
    reason=f"compiling for a GPU needs the plugin: {child.INSTALL_COMMAND}",
)


def program(text, peak_bytes):
    costs = measure_costs(parse_module(text), GPUS["h200"])
    return CompiledProgram(costs, 1.5, 1000, 200, peak_bytes)


def report(precision, text=hlo_texts.CONVOLUTIONS, peak_bytes=8_000_000_000):
    step = program(text, peak_bytes)
    return StepReport(precision, step, step, "ResNet-50", "plain", 8, 64, 1000, 4, "0.12.0")


@pytest.fixture
def stubbed(monkeypatch):
    """Compiles nothing; returns the requests."""
    requests = []

    def compile_in_child(request):
        requests.append(request)
        precision = request.train_args[request.train_args.index("--precision") + 1]
        return report(precision, peak_bytes=int(1e9) * (2 if precision == "float32" else 1))

    monkeypatch.setattr(gpu_program, "compile_in_child", compile_in_child)
    monkeypatch.setattr(gpu_program, "check_plugin", lambda: None)
    return requests


def test_missing_plugin_is_named_with_the_install_command(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert gpu_program.main(["digits"]) == 2
    message = capsys.readouterr().err
    assert 'pip install -e ".[experiments,gpu-program]"' in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [
        ["--batch-size", "0"],
        ["--num-classes", "-1"],
        ["--precision", "float16", "float16"],
        ["--", "--momentum", "2"],
    ],
)
def test_wrong_options_are_refused_before_anything_is_compiled(args, stubbed, capsys):
    assert gpu_program.main(["digits", *args]) == 2
    assert capsys.readouterr().err.startswith("error: --")
    assert stubbed == []


def test_options_reach_the_training(stubbed):
    options = ["--image-size", "64", "--gpu", "a100", "--model", "planted:PlantedResNet"]
    assert gpu_program.main(["imagenet", *options, "--no-update", "--", "--width", "8"]) == 0
    precisions = [request.train_args[4] for request in stubbed]
    assert precisions == ["float16", "bfloat16", "float32"]
    assert stubbed[0] == Request(
        "a100",
        ["imagenet", "--width", "8", "--precision", "float16", "--image-size", "64"],
        "planted:PlantedResNet",
        with_update=False,
    )


def test_figures_are_written_as_json(stubbed, tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert gpu_program.main(["digits", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert figures["steps"]["float16"]["step"]["costs"]["kernels"] == 4
    assert figures["gpu"]["memory_bandwidth"] == 4.8e12
    assert len(figures["warnings"]) == 2
    printed = capsys.readouterr().out
    for line in figures["warnings"]:
        assert f"WARNING: {line[:40]}" in printed


def test_json_that_cannot_be_written_is_an_error(stubbed, tmp_path, capsys):
    assert gpu_program.main(["digits", "--json", str(tmp_path / "no" / "figures.json")]) == 1
    assert "cannot be written: No such file" in capsys.readouterr().err


def test_precisions_stand_side_by_side_with_ratios_to_float32():
    console = Console(width=120, highlight=False, markup=False)
    with console.capture() as captured:
        print_reports(console, [report("float16", peak_bytes=2 * 10**9), report("float32")])
    rows = [line.split() for line in captured.get().splitlines()]
    assert ["float16", "float32", "float16", "/", "float32"] in rows
    assert "GB at the peak 2.00 8.00 0.250".split() in rows
    assert "convolutions, float32 (TF32) 2 2".split() in rows
    assert "kernels 4 4 1.000".split() in rows
    # 4 kernels of 4 leaves, 200 bytes for 1000 params
    assert "kernels a leaf, of 4 1.00 1.00".split() in rows
    assert "temporary bytes a param 0.200 0.200".split() in rows


def test_warnings_are_for_half_precision_alone():
    assert warnings(report("float32")) == []
    assert warnings(report("bfloat16", hlo_texts.LOOP)) == []
    assert warnings(report("float16")) == [
        "2 float32 (TF32) convolutions in the float16 step, from /work/resnet.py:95 in "
        "ResNet.__call__ (state.params['stem']['kernel'].value)",
    ]


def test_precision_that_the_source_asks_for_is_a_note_and_jaxs_default_a_warning():
    line = (
        "1 float32 convolution in the float16 step, from /work/resnet.py:95 in "
        "ResNet.__call__ (state.params['stem']['kernel'].value)"
    )
    assert notes(report("float16")) == [f"{line}: asked for, 33.3% of the FLOPs"]
    by_default = dataclasses.replace(report("float16"), default_precision="highest")
    assert notes(by_default) == []
    assert warnings(by_default)[1] == line


def test_process_that_dies_is_reported_with_its_last_lines():
    script = "import os; print('F1202 Check failed: core_count', flush=True); os.abort()"
    with pytest.raises(UserError, match=r"ended by SIGABRT and (.|\n)*Check failed: core_count"):
        child.compile_in_child(REQUEST, [sys.executable, "-c", script])


def test_process_that_leaves_nothing_is_reported():
    with pytest.raises(UserError, match=r"ended with code 0 and left no program(.|\n)*\(none\)"):
        child.compile_in_child(REQUEST, [sys.executable, "-c", ""])


def test_refusal_of_the_process_is_passed_on():
    script = "import sys; print('noise'); print('error: --model must be'); sys.exit(2)"
    with pytest.raises(UsageError, match="^--model must be$"):
        child.compile_in_child(REQUEST, [sys.executable, "-c", script])


def test_report_survives_its_way_between_the_processes():
    sent = report("float16")
    values = json.loads(json.dumps(dataclasses.asdict(sent)))
    assert StepReport.from_json(values) == sent
    assert StepReport.from_json({**values, "update": None}).update is None


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_target_is_complete(gpu):
    text = target_config(gpu)
    for key in ("core_count", "fpus_per_core", "clock_rate_ghz", "memory_bandwidth"):
        assert f"{key}: " in text
    assert text.count("{") == text.count("}") == 3
    # Dense tensor-core peaks: float16 is twice TF32, which is well above the float32 units.
    assert gpu.peak_flops["f16"] == pytest.approx(2 * gpu.peak_flops["tf32"], rel=1e-3)
    # The float32 peak is that of the cores: 2 FLOP a lane and cycle.
    lanes = gpu.core_count * gpu.fpus_per_core
    assert 2 * lanes * gpu.clock_rate_ghz * 1e9 == pytest.approx(gpu.peak_flops["f32"], rel=0.01)


def test_every_preset_has_its_image_set():
    from experiments.presets import PRESETS

    assert {config.dataset_name for config in PRESETS.values()} == set(IMAGE_SETS)


def test_programs_are_made_of_shapes_alone():
    import jax

    from experiments.cli import parse_config

    args = ["imagenet", "--width", "2", "--stage-sizes", "1", "--batch-size", "4"]
    programs = make_programs(parse_config(args, "train"), num_classes=7)
    leaves = jax.tree.leaves((programs.step.arguments, programs.update.arguments))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert programs.step.arguments[2].shape == (4, 224, 224, 3)
    head = programs.step.arguments[0].params["head"]["kernel"].get_value()
    assert (head.shape, head.dtype) == ((8, 7), "float16")


def test_model_is_that_of_the_blocks_or_of_its_name():
    from experiments.gpu.programs import find_model
    from experiments.low_traffic.model import LowTrafficResNet
    from experiments.resnet import ResNet

    assert find_model("plain") is ResNet
    assert find_model("low_traffic") is LowTrafficResNet
    assert find_model("experiments.resnet:ResNet") is ResNet


def test_unknown_model_and_set_are_refused():
    from experiments.cli import parse_config

    with pytest.raises(
        UsageError, match="--model must be one of plain, low_traffic, or MODULE:CLASS"
    ):
        make_programs(parse_config(["digits"], "train"), model="resnext")
    with pytest.raises(UsageError, match="give --num-classes"):
        make_programs(parse_config(["digits", "--dataset", "mnist"], "train"))


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Compiles for the H200 and returns the figures."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE.parents[1]}:{HERE}")

    def run(*args):
        path = tmp_path / "figures.json"
        assert gpu_program.main(["--gpu", "h200", "--json", str(path), *args]) == 0
        return json.loads(path.read_text())

    return run


@needs_plugin
@pytest.mark.slow
def test_resnet50_in_float16_has_no_float32_convolution_or_product(run):
    options = ["--precision", "float16", "--batch-size", "8", "--image-size", "64", "--no-update"]
    figures = run("imagenet", *options)
    costs = figures["steps"]["float16"]["step"]["costs"]
    # 53 convolutions forward and backward to kernel and input, but for the first one's input.
    assert costs["products"]["convolution"] == {"float16": 53 + 53 + 52}
    assert costs["products"]["matrix product"] == {"float16": 3}
    assert figures["warnings"] == []


@needs_plugin
@pytest.mark.slow
def test_update_takes_24_bytes_a_param_and_float16_half_the_memory(run):
    # Two blocks have every kind of layer, and compile in a sixth of the time.
    # They are wide, so that a few bytes a leaf do not show.
    options = ["--", "--stage-sizes", "1", "1", "--width", "256"]
    figures = run("imagenet", "--precision", "float16", "float32", *options)
    half, single = (figures["steps"][name] for name in ("float16", "float32"))
    params = half["num_params"]
    # Gradients twice, for the check and the update; params read; params, masters and momentum
    # written, masters and momentum read.
    assert half["update"]["costs"]["num_bytes"] / params == pytest.approx(24.0, abs=0.05)
    assert half["update"]["temporary_bytes"] / params < 0.05
    assert half["step"]["peak_bytes"] / single["step"]["peak_bytes"] < 0.55
    assert half["step"]["costs"]["num_bytes"] / single["step"]["costs"]["num_bytes"] < 0.56
    # 292 where masters, momentum and params are transposed into the layout of cuDNN's gradients.
    assert half["step"]["costs"]["kernels"] <= 240


@needs_plugin
@pytest.mark.slow
def test_low_traffic_blocks_move_a_third_less_and_free_four_tenths_of_the_memory(run):
    options = ["imagenet", "--precision", "float16", "--no-update", "--", "--stage-sizes", "1", "1"]
    plain, low = (
        run(*options, "--blocks", blocks)["steps"]["float16"]["step"]
        for blocks in ("plain", "low_traffic")
    )
    assert low["costs"]["num_bytes"] / plain["costs"]["num_bytes"] < 0.70
    assert low["peak_bytes"] / plain["peak_bytes"] < 0.62
    convolutions = [program["costs"]["products"]["convolution"] for program in (plain, low)]
    assert convolutions[0] == convolutions[1] == {"float16": 26}


@needs_plugin
@pytest.mark.slow
def test_planted_float32_layer_is_reported_by_name(run, capsys):
    figures = run(
        *("imagenet", "--precision", "float16", "--batch-size", "8", "--image-size", "64"),
        *("--no-update", "--model", "planted:PlantedResNet"),
        *("--", "--stage-sizes", "1", "--width", "32"),
    )
    (warning,) = figures["warnings"]
    assert warning.startswith("3 float32 (TF32) convolutions in the float16 step, from ")
    assert "experiments/resnet.py:" in warning and "Bottleneck.__call__" in warning
    assert "['stages'][0][0]['conv2']['kernel']" in warning
    assert f"WARNING: {warning[:60]}" in capsys.readouterr().out
