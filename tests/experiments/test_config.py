"""Configuration and its command line: presets, options, what is refused."""

import dataclasses
import json

import pytest

from experiments.cli import parse_config
from experiments.config import TrainConfig
from experiments.errors import UsageError
from experiments.presets import PRESETS


def parse(*args):
    return parse_config(args, prog="train")


def test_digits_is_the_default_preset():
    assert parse() == PRESETS["digits"]


@pytest.mark.parametrize("name", list(PRESETS))
def test_preset_by_name(name):
    assert parse(name) == PRESETS[name]
    assert parse(name).preset == name


def test_options_work_with_and_without_the_preset_on_either_side():
    expected = dataclasses.replace(PRESETS["cifar10"], epochs=3, precision="bfloat16")
    assert parse("cifar10", "--epochs", "3", "--precision", "bfloat16") == expected
    assert parse("--epochs", "3", "--precision", "bfloat16", "cifar10") == expected
    assert parse("--seed", "7") == dataclasses.replace(PRESETS["digits"], seed=7)


def test_cifar10_is_the_classic_set_up():
    config = PRESETS["cifar10"]
    assert (config.batch_size, config.learning_rate, config.momentum) == (64, 0.01, 0.9)
    assert (config.epochs, config.width, config.stage_sizes) == (10, 64, (3, 4, 6, 3))
    assert (config.schedule, config.weight_decay) == ("constant", 0.0)


def test_digits_is_a_resnet50_of_width_16():
    config = PRESETS["digits"]
    assert (config.model_name, config.width, config.stem) == ("ResNet-50", 16, "imagenet")
    assert config.image_size == 32


@pytest.mark.parametrize("name", list(PRESETS))
def test_preset_states_its_source_command_accuracy_and_time(name):
    text = type(PRESETS[name]).__doc__
    for part in ("Source:", "Command: python -m experiments.train", "Expected:"):
        assert part in text


@pytest.mark.parametrize("name", list(PRESETS))
def test_help_describes_every_option(name, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(name, "--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(TrainConfig):
        if field.name != "preset":
            assert "--" + field.name.replace("_", "-") in text
    assert "Source:" in text


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["nosuch"], "nosuch"),
        (["--epochs", "many"], "many"),
        (["--precision", "float8"], "float8"),
        (["--learning-rat", "1"], "--learning-rat"),
        (["--epochs"], "--epochs"),
    ],
)
def test_arguments_that_cannot_be_read_end_with_code_2(args, expected, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*args)
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert expected in output.out + output.err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("epochs", 0),
        ("batch_size", -1),
        ("image_size", 0),
        ("width", 0),
        ("stage_sizes", ()),
        ("stage_sizes", (3, 0)),
        ("seed", -1),
        ("momentum", 1.0),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("initial_loss_scale", float("inf")),
        ("initial_loss_scale", 1e-6),
        ("initial_loss_scale", 2.0**25),
        ("growth_interval", 0),
        ("weight_decay", -1.0),
        ("warmup_epochs", float("nan")),
        ("max_consecutive_skips", -1),
        ("loader_workers", -1),
        ("loader_workers", 129),
        ("weight_decay", float("inf")),
        ("learning_rate", 1e39),
        ("warmup_epochs", float("inf")),
        ("growth_interval", 2**31),
        ("keep", 2**31),
        ("crop_padding", 33),
        ("cutout", -1),
        ("label_smoothing", 1.0),
        ("label_smoothing", float("nan")),
        ("step_epochs", ()),
        ("step_epochs", (0, 30)),
        ("step_epochs", (30, 30)),
    ],
)
def test_values_out_of_range_are_named(option, value):
    with pytest.raises(UsageError, match="--" + option.replace("_", "-")):
        TrainConfig(**{option: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_optimizer": True}, "--shard-optimizer needs --data-parallel"),
        ({"coordinator": "host:1"}, "--coordinator needs --data-parallel"),
        ({"process_id": 0}, "--process-id needs --coordinator HOST:PORT"),
        (
            {"data_parallel": True, "coordinator": "auto", "num_processes": 2},
            "--num-processes needs --coordinator HOST:PORT",
        ),
        ({"data_parallel": True, "coordinator": "host"}, "--coordinator must be HOST:PORT or auto"),
        (
            {"data_parallel": True, "coordinator": "host:1", "num_processes": 2},
            "--coordinator host:1 needs --process-id too",
        ),
        (
            dict(data_parallel=True, coordinator="host:1", num_processes=2, process_id=2),
            "--process-id must be between 0 and 1, as --num-processes says, got 2",
        ),
        (
            dict(data_parallel=True, coordinator="host:1", num_processes=0, process_id=0),
            "--num-processes must be at least 1, got 0",
        ),
    ],
)
def test_options_of_several_devices_go_together(options, message):
    with pytest.raises(UsageError, match=message):
        TrainConfig(**options)


def test_random_crops_are_not_for_a_resident_set():
    with pytest.raises(UsageError, match="--input must be auto or streamed"):
        TrainConfig(random_resized_crop=True, input="resident")


def test_data_set_is_the_presets_unless_another_is_named():
    assert parse("digits").dataset_name == "digits"
    assert parse("cifar10_strong").dataset_name == "cifar10"
    assert parse("imagenet").dataset_name == "imagenet2012"
    other = parse("imagenet", "--dataset", "imagenet_resized/64x64")
    assert other.dataset_name == "imagenet_resized/64x64"
    assert str(other.run_dir) == "runs/imagenet-imagenet_resized-64x64-float16"


def test_cifar10_strong_is_the_recipe_of_its_sources():
    config = PRESETS["cifar10_strong"]
    assert (config.batch_size, config.epochs, config.stem) == (128, 200, "cifar")
    assert (config.learning_rate, config.momentum, config.nesterov) == (0.1, 0.9, True)
    assert (config.weight_decay, config.label_smoothing) == (5e-4, 0.1)
    assert (config.crop_padding, config.flip, config.cutout) == (4, True, 16)
    differences = {"preset": "cifar100", "dataset": "cifar100", "cutout": 8}
    assert dataclasses.asdict(PRESETS["cifar100"]) == {**dataclasses.asdict(config), **differences}


def test_imagenet_is_the_recipe_of_its_sources():
    config = PRESETS["imagenet"]
    assert (config.batch_size, config.epochs, config.image_size) == (256, 90, 224)
    assert (config.learning_rate, config.weight_decay, config.warmup_epochs) == (0.1, 1e-4, 5.0)
    assert (config.width, config.stage_sizes, config.stem) == (64, (3, 4, 6, 3), "imagenet")
    assert (config.input, config.random_resized_crop) == ("streamed", True)


def test_run_dir_names_preset_and_precision(tmp_path):
    assert str(parse("cifar10").run_dir) == "runs/cifar10-float16"
    assert parse("--out", str(tmp_path)).run_dir == tmp_path


def test_config_can_be_written_as_json():
    json.dumps(dataclasses.asdict(PRESETS["digits"]), default=str)
