"""What the host reads of the steps: every one once, by name, at no cost in between."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import mpopt
from experiments.steps import MAX_LEAVES, StepReader, StepRecord, events
from experiments.train_state import LOG_STEPS, StepLog, init_train_state

SCALE = 2.0**10
POLICY = mpopt.Policy(jnp.float16)
TX = mpopt.mixed_precision(
    optax.sgd(0.1), policy=POLICY, loss_scale=mpopt.dynamic_loss_scale(SCALE, growth_interval=3)
)
PARAMS = {"first": {"kernel": jnp.ones(2)}, "second": {"kernel": jnp.ones(3), "bias": jnp.ones(1)}}


class Step(NamedTuple):
    loss: float
    overflows: tuple[str, ...] = ()


@jax.jit
def take(state, loss, first, second) -> Any:
    """A step as `make_train_step` takes it, with gradients from outside."""
    grads = jax.tree.map(lambda p: jnp.ones_like(p), state.params)
    grads["first"]["kernel"] *= first.astype(jnp.float16)
    grads["second"]["bias"] *= second.astype(jnp.float16)
    _, opt_state = TX.update(grads, state.opt_state, state.params)
    row = StepLog(
        loss,
        mpopt.loss_scale(state.opt_state),
        mpopt.loss_scale(opt_state),
        mpopt.grads_finite(opt_state),
        optax.tree.get(opt_state, "nonfinite_leaves"),
    )
    index = state.step % LOG_STEPS
    log = jax.tree.map(lambda rows, new: rows.at[index].set(new), state.log, row)
    return state._replace(step=state.step + 1, opt_state=opt_state, log=log)


def run(state, steps):
    for step in steps:
        factors = [jnp.inf if name in step.overflows else 1.0 for name in ("first", "second")]
        state = take(state, jnp.float32(step.loss), *map(jnp.float32, factors))
    return state


def fresh():
    return init_train_state(PARAMS, {}, TX, POLICY)


def test_every_step_is_read_once_with_its_scales_and_leaves():
    state = fresh()
    reader = StepReader(state)
    assert reader.read(state).records == ()
    state = run(state, [Step(1.0), Step(2.0, ("first", "second")), Step(3.0)])
    progress = reader.read(state)
    assert progress.records == (
        StepRecord(1, 1.0, SCALE, SCALE, True, ()),
        StepRecord(2, 2.0, SCALE, SCALE / 2, False, ("first/kernel", "second/bias")),
        StepRecord(3, 3.0, SCALE / 2, SCALE / 2, True, ()),
    )
    assert (progress.step, progress.loss_scale) == (3, SCALE / 2)
    assert (progress.consecutive_skips, progress.total_skips) == (0, 1)
    state = run(state, [Step(4.0), Step(5.0), Step(6.0, ("second",))])
    assert reader.read(state).records == (
        StepRecord(4, 4.0, SCALE / 2, SCALE / 2, True, ()),
        StepRecord(5, 5.0, SCALE / 2, SCALE, True, ()),
        StepRecord(6, 6.0, SCALE, SCALE / 2, False, ("second/bias",)),
    )


def test_log_goes_round_and_losing_steps_is_an_error():
    state = fresh()
    reader = StepReader(state)
    for _ in range(3):
        state = run(state, [Step(float(i)) for i in range(LOG_STEPS)])
        records = reader.read(state).records
        assert [record.loss for record in records] == list(map(float, range(LOG_STEPS)))
    assert [record.step for record in records] == list(range(2 * LOG_STEPS + 1, 3 * LOG_STEPS + 1))
    state = run(state, [Step(0.0)] * (LOG_STEPS + 1))
    with pytest.raises(ValueError, match=f"due every {LOG_STEPS} steps"):
        reader.read(state)


def test_reader_of_a_restored_state_begins_after_its_step():
    state = run(fresh(), [Step(1.0)] * 7)
    reader = StepReader(state)
    assert reader.read(state).records == ()
    assert [record.step for record in reader.read(run(state, [Step(2.0)])).records] == [8]


def test_events_are_skips_and_changes_of_the_scale():
    many = tuple(f"layer{index}" for index in range(MAX_LEAVES + 5))
    records = [
        StepRecord(1, 0.5, 8.0, 8.0, True, ()),
        StepRecord(2, float("nan"), 8.0, 4.0, False, many),
        StepRecord(3, 0.5, 4.0, 8.0, True, ()),
        StepRecord(4, 0.5, 8.0, 8.0, False, ("a",)),
    ]
    skip, down, up, skip_at_a_fixed_scale = events(records)
    assert skip["leaves"] == list(many[:MAX_LEAVES]) and skip["num_leaves"] == len(many)
    assert (skip["event"], skip["step"], skip["loss_scale"]) == ("skip", 2, 8.0)
    assert down == {"event": "loss_scale", "step": 2, "loss_scale": 4.0}
    assert up == {"event": "loss_scale", "step": 3, "loss_scale": 8.0}
    assert skip_at_a_fixed_scale["step"] == 4
