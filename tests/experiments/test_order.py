"""The order of the examples: a function of seed, epoch and position."""

import numpy as np

from experiments.inputs.order import crop_generators, padded_batches, train_order


def test_train_order_is_the_permutation_of_seed_and_epoch_in_whole_batches():
    expected = np.random.default_rng((7, 3)).permutation(23)[:20].reshape(5, 4)
    actual = train_order(7, 3, 23, 4)
    np.testing.assert_array_equal(actual, expected)
    assert actual.dtype == np.int32
    assert train_order(7, 3, 3, 4).shape == (0, 4)


def test_every_position_has_a_generator_of_its_own():
    drawn = [rng.random() for batch in range(3) for rng in crop_generators(0, 1, batch, 4)]
    assert len(set(drawn)) == 12
    # Not that of the epoch's order either, nor another epoch's.
    assert np.random.default_rng((0, 1)).random() not in drawn
    assert next(crop_generators(0, 2, 0, 4)).random() not in drawn
    assert next(crop_generators(0, 1, 2, 4)).random() == drawn[8]


def test_padded_batches_hold_every_example_once():
    for num_examples, batch_size in ((10, 4), (8, 4), (3, 5)):
        batches = list(padded_batches(num_examples, batch_size))
        assert {len(indices) for indices, _ in batches} == {batch_size}
        counted = np.concatenate([indices[is_example] for indices, is_example in batches])
        np.testing.assert_array_equal(counted, np.arange(num_examples))
