"""What is printed: plain lines in a file, a bar on a terminal."""

import dataclasses
import io
import math

import pytest
import rich.console

from experiments.reporting import Reporter, format_epoch, format_scale
from experiments.tracking.run_dir import EpochRecord

RECORD = EpochRecord(
    epoch=3,
    step=66,
    train_loss=0.1234,
    test_loss=0.1,
    test_accuracy=0.975,
    images_per_second=1140.2,
    loss_scale=2.0**15,
    total_skips=2,
    seconds=12.0,
    peak_memory_bytes=10**9,
)
LINE = (
    "epoch 3/10  loss 0.1234  test loss 0.1000  accuracy 97.5%  loss scale 32768  skipped 2  "
    "1140 images/s"
)


def test_epoch_line():
    assert format_epoch(RECORD, 10) == LINE


def test_epoch_line_without_a_speed_where_nothing_was_trained():
    record = dataclasses.replace(RECORD, images_per_second=math.nan)
    assert format_epoch(record, 10) == LINE.removesuffix("  1140 images/s")


@pytest.mark.parametrize(
    ("scale", "expected"), [(2.0**24, "16777216"), (1.0, "1"), (2.0**-14, "6.1e-05")]
)
def test_scale_is_written_in_full(scale, expected):
    assert format_scale(scale) == expected


def report(is_terminal):
    file = io.StringIO()
    console = rich.console.Console(
        file=file, force_terminal=is_terminal, width=80, highlight=False, soft_wrap=True
    )
    with Reporter(10, console) as reporter:
        reporter.line("preparing [digits]")
        reporter.start_epoch(3, 20)
        reporter.steps_done(20, 32768.0, 2)
        reporter.end_epoch(RECORD)
    return file.getvalue()


def test_plain_lines_where_there_is_no_terminal():
    assert report(is_terminal=False) == f"preparing [digits]\n{LINE}\n"


def test_bar_and_lines_on_a_terminal():
    text = report(is_terminal=True)
    assert "epoch 3/10" in text
    assert "loss scale 32768" in text
    assert LINE in text
