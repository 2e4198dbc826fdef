"""Event files as TensorBoard reads them: framing, checksums, tags, steps and values."""

import dataclasses
import json
import struct
import subprocess
import sys
import time

import pytest
from tensorboardX.proto import event_pb2

from experiments.errors import UserError
from experiments.tracking.run_dir import EpochRecord
from experiments.tracking.tensorboard import EPOCH_TAGS, TensorBoardWriter

RECORD = EpochRecord(
    epoch=2,
    step=44,
    train_loss=0.5,
    test_loss=float("nan"),
    test_accuracy=0.875,
    images_per_second=128.0,
    loss_scale=2.0**15,
    total_skips=2,
    seconds=3.0,
    peak_memory_bytes=2**30,
)


def crc32c(data):
    """The Castagnoli checksum, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(crc):
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_events(path):
    """All events of a directory, in the order of the file names; a record cut short ends a file."""
    for file in sorted(path.iterdir()):
        assert "tfevents" in file.name
        content, position = file.read_bytes(), 0
        while position + 12 <= len(content):
            header = content[position : position + 8]
            (length,) = struct.unpack("<Q", header)
            (header_crc,) = struct.unpack("<I", content[position + 8 : position + 12])
            assert header_crc == masked(crc32c(header))
            data = content[position + 12 : position + 12 + length]
            trailer = content[position + 12 + length : position + 16 + length]
            if len(trailer) < 4:
                break
            assert struct.unpack("<I", trailer)[0] == masked(crc32c(data))
            yield event_pb2.Event.FromString(data)
            position += 16 + length


def shown(path):
    """The points that TensorBoard shows: a session's start takes later steps off the board."""
    points = []
    for event in read_events(path):
        if event.HasField("session_log"):
            assert event.session_log.status == event_pb2.SessionLog.START
            points = [point for point in points if point[1] < event.step]
        points += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return points


def test_crc32c_of_the_standard_check_string():
    assert crc32c(b"123456789") == 0xE3069283


def test_file_begins_with_the_version_of_the_format(tmp_path):
    before = time.time()
    TensorBoardWriter(tmp_path / "new" / "tensorboard").close()
    (event,) = read_events(tmp_path / "new" / "tensorboard")
    assert event.file_version == "brain.Event:2"
    assert before <= event.wall_time <= time.time()


def test_tags_steps_and_values(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.loss_scale(0, 2.0**16)
    writer.skip(1)
    writer.loss_scale(1, 2.0**15)
    writer.loss(2, 0.25)
    writer.epoch(RECORD)
    writer.close()
    assert shown(tmp_path) == [
        ("loss_scale/scale", 0, 2.0**16),
        ("loss_scale/skipped_step", 1, 1.0),
        ("loss_scale/scale", 1, 2.0**15),
        ("train/loss", 2, 0.25),
        ("train/epoch_loss", 44, 0.5),
        ("test/accuracy", 44, 0.875),
        ("speed/images_per_second", 44, 128.0),
        ("memory/peak_bytes", 44, 2.0**30),
        ("loss_scale/total_skips", 44, 2.0),
    ]


def test_every_number_of_an_epoch_has_a_tag():
    named = set(EPOCH_TAGS.values()) | {"epoch", "step", "seconds", "loss_scale"}
    assert named == {field.name for field in dataclasses.fields(EpochRecord)}


def test_a_change_of_the_loss_scale_is_drawn_as_a_step(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    for step, scale in ((0, 8.0), (100, 16.0), (101, 8.0)):
        writer.loss_scale(step, scale)
    writer.close()
    points = [(step, value) for _, step, value in shown(tmp_path)]
    assert points == [(0, 8.0), (99, 8.0), (100, 16.0), (101, 8.0)]


def test_a_resumed_run_shows_no_point_twice(tmp_path):
    first = TensorBoardWriter(tmp_path, purge_step=1)
    for step in range(1, 8):
        first.loss(step, float(step))
    first.close()
    resumed = TensorBoardWriter(tmp_path, purge_step=6)
    for step in range(6, 11):
        resumed.loss(step, float(step))
    resumed.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert shown(tmp_path) == [("train/loss", step, float(step)) for step in range(1, 11)]


def test_what_is_flushed_survives_a_kill(tmp_path):
    program = """
import os, pathlib, signal, sys
from experiments.tracking.tensorboard import TensorBoardWriter
writer = TensorBoardWriter(pathlib.Path(sys.argv[1]))
for step in range(100):
    writer.loss(step, 1.0)
writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert [step for _, step, _ in shown(tmp_path)] == list(range(100))


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file cannot be written"):
        TensorBoardWriter(tmp_path / "file")


def test_the_writer_loads_neither_tensorflow_nor_tensorboard():
    program = """
import json, sys
import experiments.tracking.tensorboard
print(json.dumps(sorted(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    loaded = json.loads(result.stdout)
    assert not {"tensorflow", "tensorboard", "torch", "matplotlib", "grpc"} & set(loaded)
