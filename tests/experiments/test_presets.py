"""The presets made for a GPU, for an epoch at small shapes: data, recipe and step fit together."""

import json

import pytest

from experiments.train import main

SMALL = [
    *("--width", "2", "--stage-sizes", "1", "--image-size", "16", "--batch-size", "16"),
    *("--epochs", "1", "--loader-workers", "0", "--dataset", "photos"),
]


@pytest.mark.parametrize(
    ("preset", "precision"),
    [("cifar10_strong", "float16"), ("cifar100", "bfloat16"), ("imagenet", "float16")],
)
def test_preset_trains_at_small_shapes(preset, precision, tmp_path, photos_dir):
    args = ["--precision", precision, "--data-dir", photos_dir, "--out", tmp_path / "run"]
    assert main([preset, *SMALL, *map(str, args)]) == 0
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["epoch"], record["total_skips"]) == (1, 0)
    assert record["train_loss"] > 0 and record["test_loss"] > 0
