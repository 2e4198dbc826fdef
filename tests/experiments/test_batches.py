"""Batches from the device and from a stream: the same ones, from any point on, each example once.

Loader processes take seconds to start, so the tests of one number of processes share a stream.
"""

import dataclasses
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import image_sets
import jax
import numpy as np
import pytest

from experiments.config import TrainConfig
from experiments.errors import UserError
from experiments.inputs import batches as batches_module
from experiments.inputs.batches import fits_device, is_resident, open_batches
from experiments.inputs.datasets.prepared import find_set

ROOT = Path(__file__).parents[2]
NUM_TRAIN, NUM_TEST, BATCH = 43, 11, 4
STEPS = NUM_TRAIN // BATCH
PHOTOS = TrainConfig(dataset="photos", batch_size=BATCH, image_size=16, seed=3, input="resident")


def gather(batch):
    images, labels, indices = (np.asarray(part) for part in batch[:3])
    return images[indices], labels[indices]


def train_batches(batches, epoch, first_batch=0):
    return [gather(batch) for batch in batches.train_batches(epoch, first_batch)]


def test_batches_of(batches):
    return [(*gather(batch), batch[3]) for batch in batches.test_batches()]


test_batches_of.__test__ = False


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        for part, other_part in zip(one, other, strict=True):
            np.testing.assert_array_equal(part, other_part)


@pytest.fixture(scope="module", params=[("photos", 0), ("photos", 2), ("grey_photos", 0)])
def case(request):
    """The set, and the number of loader processes."""
    return request.param


@pytest.fixture(scope="module")
def resident(case, photos_dir):
    config = dataclasses.replace(PHOTOS, dataset=case[0], data_dir=photos_dir)
    with open_batches(config) as batches:
        yield config, batches


@pytest.fixture(scope="module")
def streamed(case, resident):
    config = dataclasses.replace(resident[0], input="streamed", loader_workers=case[1])
    with open_batches(config) as batches:
        yield batches


def test_an_epoch_is_the_shuffled_split_in_whole_batches(resident):
    config, batches = resident
    order = np.random.default_rng((config.seed, 2)).permutation(NUM_TRAIN)
    images, labels, indices = zip(*batches.train_batches(2), strict=True)
    assert batches.steps_per_epoch == len(images) == STEPS
    np.testing.assert_array_equal(np.concatenate(indices), order[: STEPS * BATCH])
    assert (images[0].shape, labels[0].shape) == ((NUM_TRAIN, *batches.image_shape), (NUM_TRAIN,))


def test_stream_gives_the_batches_of_the_resident_set(resident, streamed):
    config, expected = resident
    assert (expected.is_streamed, streamed.is_streamed) == (False, True)
    assert streamed.augmentation == expected.augmentation
    for name in ("num_train", "num_test", "num_classes", "image_shape", "steps_per_epoch"):
        assert getattr(streamed, name) == getattr(expected, name)
    for epoch in (1, 2, 3):
        assert_same(train_batches(streamed, epoch), train_batches(expected, epoch))
        assert_same(test_batches_of(streamed), test_batches_of(expected))


@pytest.mark.parametrize("first_batch", [3, STEPS])
def test_stream_starts_at_any_batch(resident, streamed, first_batch):
    expected = train_batches(resident[1], 5)[first_batch:]
    assert_same(train_batches(streamed, 5, first_batch), expected)
    assert_same(train_batches(streamed, 6), train_batches(resident[1], 6))


def test_loop_that_was_left_can_be_entered_anywhere(resident, streamed):
    expected = train_batches(resident[1], 1)
    iterator = streamed.train_batches(1)
    assert_same([gather(next(iterator)) for _ in range(2)], expected[:2])
    assert_same(train_batches(streamed, 1, 2), expected[2:])


def test_every_test_example_is_given_once(resident, streamed):
    for batches in (resident[1], streamed):
        given = test_batches_of(batches)
        assert {len(labels) for _, labels, _ in given} == {BATCH}
        images = np.concatenate([images[mask] for images, _, mask in given])
        assert len(images) == NUM_TEST
        assert len({image.tobytes() for image in images}) == NUM_TEST


def test_batches_have_the_shapes_that_the_step_is_compiled_for(resident, streamed):
    for batches in (resident[1], streamed):
        for part, spec in zip(next(batches.train_batches(1)), batches.train_spec, strict=True):
            assert (part.shape, part.dtype) == (spec.shape, spec.dtype)


@pytest.fixture(scope="module")
def cropped(photos_dir):
    """Epochs of random crops, read in threads."""
    config = dataclasses.replace(
        PHOTOS, data_dir=photos_dir, random_resized_crop=True, input="auto", loader_workers=0
    )
    with open_batches(config) as batches:
        return config, [train_batches(batches, epoch) for epoch in (1, 2)]


def test_random_crops_are_the_same_from_any_batch_on_and_in_any_process(cropped):
    config, epochs = cropped
    with open_batches(dataclasses.replace(config, loader_workers=2)) as batches:
        assert_same(train_batches(batches, 2, 4), epochs[1][4:])
        assert_same(train_batches(batches, 1), epochs[0])


def test_random_crops_differ_from_epoch_to_epoch_and_seed_to_seed(cropped):
    config, epochs = cropped
    with open_batches(dataclasses.replace(config, seed=4)) as batches:
        other_seed = train_batches(batches, 1)
    seen = [
        image.tobytes() for epoch in (*epochs, other_seed) for batch in epoch for image in batch[0]
    ]
    assert len(set(seen)) == len(seen)


def test_random_crops_leave_the_test_split_alone(cropped, photos_dir):
    config = cropped[0]
    with open_batches(config) as batches:
        first, second = test_batches_of(batches), test_batches_of(batches)
    assert_same(first, second)
    whole = dataclasses.replace(config, random_resized_crop=False, input="resident")
    with open_batches(whole) as batches:  # the whole central square, not 87.5 % of it
        assert not np.array_equal(first[0][0], test_batches_of(batches)[0][0])


def test_processes_end_with_the_context(photos_dir):
    config = dataclasses.replace(PHOTOS, data_dir=photos_dir, input="streamed", loader_workers=1)
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt), open_batches(config) as batches:
        next(batches.train_batches(1))
        next(batches.test_batches())
        started = set(multiprocessing.active_children()) - before
        assert len(started) == 2
        raise KeyboardInterrupt
    assert not [process for process in started if process.is_alive()]


def test_process_that_dies_is_one_clear_error(photos_dir):
    config = dataclasses.replace(PHOTOS, data_dir=photos_dir, input="streamed", loader_workers=1)
    before = set(multiprocessing.active_children())
    with open_batches(config) as batches:
        iterator = batches.train_batches(1)
        (process,) = set(multiprocessing.active_children()) - before
        process.kill()
        with pytest.raises(UserError, match="lower --loader-workers"):
            list(iterator)
            list(batches.train_batches(2))


SCRIPT = """
import sys
from pathlib import Path
from experiments.inputs.batches import open_batches
from experiments.config import TrainConfig
from experiments.interruption import Interruption
if __name__ == "__main__":
    config = TrainConfig(dataset="photos", batch_size=4, image_size=16, input="streamed",
                         loader_workers=2, data_dir=Path(sys.argv[1]))
    with Interruption() as interruption, interruption.deferred(), open_batches(config) as batches:
        for epoch in range(1, 10**6):
            for batch in batches.train_batches(epoch):
                print(flush=True)
                if interruption.requested is not None:
                    sys.exit(f"stopped by {interruption.requested}")
"""


def children(pid):
    result = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True
    )
    return [int(child) for child in result.stdout.split()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_loader_processes_end_with_their_parent(tmp_path, photos_dir, number):
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), str(photos_dir)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    workers = [pid for pid in children(process.pid) if is_running(pid)]
    assert len(workers) >= 2
    # SIGINT as a terminal sends it: to the loader processes too.
    os.kill(process.pid, number) if number == signal.SIGKILL else os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, workers))
    if number == signal.SIGINT:
        assert errors == b"stopped by 2\n"


class Unreadable(image_sets.GreyPhotos, skip_registration=True):
    """The images of the training split are no images."""

    def _generate_examples(self, split):
        for index, example in super()._generate_examples(split):
            if split == "train":
                example["image"].truncate(60)
            yield index, example


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_record_that_cannot_be_decoded_is_named(tmp_path, loader_workers, monkeypatch):
    image_sets.prepare(Unreadable, tmp_path)
    monkeypatch.setattr(
        batches_module.data, "read_statistics", lambda *args, **options: ((0.5,), (1.0,))
    )
    config = dataclasses.replace(
        PHOTOS,
        dataset="unreadable",
        data_dir=tmp_path,
        input="streamed",
        loader_workers=loader_workers,
    )
    with open_batches(config) as batches:
        with pytest.raises(UserError, match=r"Record \d+ of train in .* cannot be read") as caught:
            batches.train_batches(1)
    assert str(tmp_path / "unreadable" / "1.0.0") in str(caught.value)
    assert re.search(r"Record (\d+)", str(caught.value))


def test_resident_set_names_the_record_too(tmp_path):
    image_sets.prepare(Unreadable, tmp_path)
    config = dataclasses.replace(PHOTOS, dataset="unreadable", data_dir=tmp_path)
    with pytest.raises(UserError, match="Record 0 of train"):
        open_batches(config)


def test_batch_larger_than_the_set(photos_dir):
    config = dataclasses.replace(PHOTOS, data_dir=photos_dir, batch_size=NUM_TRAIN + 1)
    with pytest.raises(UserError, match="--batch-size 44 is more than the 43 examples"):
        open_batches(config)


def test_sets_go_to_the_device_while_they_take_a_quarter_of_its_memory(photos_dir, monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 4000}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert fits_device(1000)
    assert not fits_device(1001)
    prepared = find_set("photos", photos_dir)  # 54 images
    auto = dataclasses.replace(PHOTOS, input="auto")
    assert is_resident(prepared, dataclasses.replace(auto, image_size=2))  # 648 bytes
    assert not is_resident(prepared, dataclasses.replace(auto, image_size=3))  # 1458 bytes
    assert is_resident(prepared, dataclasses.replace(PHOTOS, image_size=3))
    assert not is_resident(
        prepared, dataclasses.replace(auto, image_size=2, random_resized_crop=True)
    )


def test_device_without_a_limit_takes_the_machines_memory():
    assert fits_device(2**20)
    assert not fits_device(2**60)


def test_only_a_stream_imports_grain(photos_dir):
    script = (
        "import dataclasses, json, pathlib, sys\n"
        "from experiments import train\n"
        "from experiments.inputs.batches import open_batches\n"
        "from experiments.config import TrainConfig\n"
        "config = TrainConfig(dataset='photos', batch_size=4, image_size=16,\n"
        f"                     data_dir=pathlib.Path({str(photos_dir)!r}))\n"
        "open_batches(config)\n"
        "print(json.dumps([name in sys.modules for name in ('jax', 'grain')]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout.splitlines()[-1]) == [True, False]
