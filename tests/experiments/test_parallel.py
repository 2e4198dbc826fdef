"""Eight devices and one: the same steps, the same skips, the same checkpoints."""

import dataclasses
import functools

import jax
import numpy as np
import parallel_case
import pytest
from parallel_case import BAD_STEP, CONFIG, STEPS, make_state, run

from experiments.config import TrainConfig
from experiments.errors import UsageError
from experiments.inputs.batches import open_batches
from experiments.inputs.loader import TestSource, TrainSource
from experiments.inputs.records import Records
from experiments.parallel.group import ALONE
from experiments.parallel.mesh import make_placement
from experiments.parallel.placement import ONE_DEVICE
from experiments.tracking.checkpoint import Checkpointer

DEVICES = 8
pytestmark = pytest.mark.skipif(jax.device_count() != DEVICES, reason="needs eight devices")
SHARDED = dataclasses.replace(CONFIG, shard_optimizer=True)


def assert_same_steps(actual, expected, *, precision):
    """Equal but for the order of sums; decisions equal exactly."""
    assert actual.loss_scale == expected.loss_scale
    assert actual.applied == expected.applied
    assert actual.metrics == expected.metrics
    # float16 gradients are rounded to float16 before they are summed over the devices.
    rtol = 1e-5 if precision == "float32" else 4e-3
    # Of an infinite image XLA:CPU makes NaN or a number, as it fuses the maximum with 0.
    losses = (np.delete(s.loss, BAD_STEP - 1) for s in (actual, expected))
    np.testing.assert_allclose(*losses, rtol=rtol)
    np.testing.assert_allclose(actual.evaluation, expected.evaluation, rtol=rtol)
    for name in ("masters", "batch_stats"):
        a, b = (np.concatenate([x.ravel() for x in getattr(s, name)]) for s in (actual, expected))
        assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b)


@functools.cache
def seen(where, precision):
    """Compiling takes seconds, so the tests share runs."""
    config = {"eight": CONFIG, "eight sharded": SHARDED}.get(where)
    return run(make_placement(config, ALONE) if config else ONE_DEVICE, precision)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_eight_devices_take_the_steps_of_one(precision):
    assert_same_steps(seen("eight", precision), seen("one", precision), precision=precision)
    assert seen("eight", precision).split_bytes == []


def test_optimizer_split_over_devices_takes_the_same_steps():
    split, whole = seen("eight sharded", "float16"), seen("eight", "float16")
    for name in ("loss", "loss_scale", "applied", "metrics", "crc32", "evaluation"):
        np.testing.assert_equal(getattr(split, name), getattr(whole, name), name)
    # Every large master and its momentum: an eighth on each device.
    assert len(split.split_bytes) >= 2
    assert all(DEVICES * part == whole for part, whole in split.split_bytes)


@pytest.mark.parametrize("where", ["one", "eight", "eight sharded"])
def test_infinity_on_one_device_skips_the_step_on_all(where):
    result = seen(where, "float16")
    assert result.applied == [step != BAD_STEP for step in range(1, STEPS + 1)]
    assert all(np.isfinite(leaf).all() for leaf in (*result.params, *result.batch_stats))
    # Growth after steps 2 and 5, back-off after step 3.
    assert result.loss_scale == [256.0, 256.0, 512.0, 256.0, 256.0, 512.0, 512.0]


def test_evaluation_on_eight_devices_counts_every_example_once():
    accuracy = seen("eight", "float16").evaluation[1]
    correct = round(accuracy * parallel_case.NUM_TEST)
    assert parallel_case.NUM_TEST % DEVICES != 0
    assert accuracy == correct / parallel_case.NUM_TEST


@pytest.mark.parametrize("saved_on, restored_on", [("eight", "one"), ("one", "eight")])
def test_checkpoint_has_the_same_bits_on_another_number_of_devices(tmp_path, saved_on, restored_on):
    placements = {"one": ONE_DEVICE, "eight": make_placement(SHARDED, ALONE)}
    state = make_state(placements[saved_on], "float16")[0]
    rng = np.random.default_rng(0)

    def random_bits(leaf):
        if not np.issubdtype(leaf.dtype, np.floating):
            return leaf
        return jax.device_put(rng.normal(size=leaf.shape).astype(leaf.dtype), leaf.sharding)

    state = jax.tree.map(random_bits, state)
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, {"train_state": state}, {})
    checkpointer.wait()
    placement = placements[restored_on]
    wanted = {"train_state": make_state(placement, "float16")[0]}
    restored = checkpointer.restore_newest(placement.template(wanted), lambda metadata: None, print)
    checkpointer.close()
    restored = placement.place_like(restored.state, wanted)["train_state"]
    for a, b, like in zip(*map(jax.tree.leaves, (restored, state, wanted)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert a.sharding.is_equivalent_to(like.sharding, a.ndim)


def test_batch_that_devices_cannot_share_evenly_is_refused():
    config = TrainConfig(batch_size=100, data_parallel=True)
    message = "--batch-size must be a multiple of the 8 devices, such as 96 or 104, got 100"
    with pytest.raises(UsageError, match=message):
        make_placement(config, ALONE)
    with pytest.raises(UsageError, match="such as 8, got 4"):
        make_placement(TrainConfig(batch_size=4, data_parallel=True), ALONE)


def test_parts_of_a_batch_are_the_batch(photos_dir):
    records = Records(str(photos_dir / "photos" / "1.0.0"), "train", 3, 16)
    for make in (
        lambda own: TrainSource(records, 43, 8, 3, True, own),
        lambda own: TestSource(records, 43, 8, own),
    ):
        for number in (0, 7):
            images, labels = make(None).read(number)
            for part in (range(0, 4), range(4, 8)):
                own_images, own_labels = make(part).read(number)
                np.testing.assert_array_equal(own_images, images[part])
                np.testing.assert_array_equal(own_labels, labels[part])


@pytest.mark.parametrize("given", ["resident", "streamed"])
def test_each_device_gets_its_part_of_the_batch(photos_dir, given):
    config = TrainConfig(
        *("digits", "float16"),
        dataset="photos",
        data_dir=photos_dir,
        batch_size=8,
        image_size=8,
        input=given,
        loader_workers=0,
        data_parallel=True,
    )
    one = dataclasses.replace(config, data_parallel=False, input="resident")
    with (
        open_batches(config, make_placement(config, ALONE)) as split,
        open_batches(one) as whole,
    ):
        for batch, expected in zip(split.train_batches(2), whole.train_batches(2), strict=True):
            images, labels, indices = batch
            parts = (images if split.is_streamed else indices).addressable_shards
            assert [part.data.shape[0] for part in parts] == [1] * DEVICES
            np.testing.assert_array_equal(
                np.asarray(images)[np.asarray(indices)],
                np.asarray(expected[0])[np.asarray(expected[2])],
            )
            np.testing.assert_array_equal(
                np.asarray(labels)[np.asarray(indices)],
                np.asarray(expected[1])[np.asarray(expected[2])],
            )
