"""Trains a ResNet-50 in float16, bfloat16 or float32: `python -m experiments.train --help`."""

import contextlib
import errno
import math
import sys
import time
from collections.abc import Sequence
from functools import partial

from experiments.cli import parse_config
from experiments.config import TrainConfig
from experiments.errors import UserError
from experiments.interruption import Interruption
from experiments.parallel.group import ALONE, Group
from experiments.parallel.meeting import joined, leave
from experiments.reporting import Reporter
from experiments.tracking.identity import check_same_run
from experiments.tracking.run_dir import EpochRecord, RunDir


def train(
    config: TrainConfig,
    run_dir: RunDir,
    reporter: Reporter,
    interruption: Interruption,
    group: Group = ALONE,
) -> None:
    """Runs a training, from its start or from its newest checkpoint.

    Args:
        config: what to run.
        run_dir: where it writes.
        reporter: where to say how it goes.
        interruption: tells whether the process was asked to stop.
        group: the processes that run it together.

    Raises:
        UserError: where the data or the former run are not usable, or the training stalls.
        Interrupted: where a process was asked to stop; what was done is saved.
    """
    start = time.perf_counter()

    # The former run first: whatever is wrong with it shows at once.
    with group.all_or_none():
        saved_config = run_dir.saved_config() if config.resume else None
        if saved_config is not None:
            check_same_run(saved_config, config, f"the run in {run_dir.path}")
        is_complete = saved_config is not None and run_dir.is_complete(config.epochs)
    if group.gather(is_complete)[0]:
        reporter.line(f"the run in {run_dir.path} is complete")
        return

    # Imported here, as it takes seconds and wrong arguments should show before.
    from experiments.evaluate import evaluate
    from experiments.inputs.batches import open_batches
    from experiments.parallel.mesh import make_placement
    from experiments.stall import diagnose_step
    from experiments.tracking.memory import peak_memory_bytes
    from experiments.tracking.session import Session
    from experiments.train_state import LOG_STEPS, start_epoch
    from experiments.training_setup import set_up

    placement = make_placement(config, group)
    with group.all_or_none():
        opened = open_batches(config, placement, report=reporter.line)
    with opened as batches:
        setup = set_up(config, batches, reporter, placement)
        steps_per_epoch = batches.steps_per_epoch
        with (
            Session(run_dir, config, reporter, placement, group) as session,
            interruption.deferred(),
            group.watched(),
        ):
            state, step_key = session.begin(setup.take_state(), setup.step_key, setup.facts, start)
            step, record = int(state.step), None
            while session.epochs_done < config.epochs:
                # Train. A batch depends on seed, epoch and number alone: any one can be the first.
                epoch = session.epochs_done + 1
                epoch_begin = session.epochs_done * steps_per_epoch
                first_batch = step - epoch_begin
                if first_batch == 0:
                    state = start_epoch(state)
                reporter.start_epoch(epoch, steps_per_epoch)
                epoch_batches = batches.train_batches(epoch, first_batch=first_batch)
                epoch_start = time.perf_counter()
                for batch in epoch_batches:
                    state = setup.train_step(state, step_key, *batch)
                    step += 1
                    done = step - epoch_begin
                    is_last = done == steps_per_epoch
                    is_due = session.is_checkpoint_due(step)
                    is_look_due = done % LOG_STEPS == 0 or is_last or is_due
                    # Several processes stop at the same step, so they ask each other; not at every
                    # step, as the answer waits for the device.
                    stops = None
                    if is_look_due or group.is_alone:
                        stops = group.stop_signal(interruption.requested)
                    if is_look_due or stops:
                        examples = partial(setup.make_batch, step_key, step - 1, *batch)
                        progress = session.look(
                            state,
                            partial(
                                diagnose_step,
                                setup.loss_fn,
                                state,
                                examples,
                                placement.on_one_device,
                            ),
                        )
                        reporter.steps_done(done, progress.loss_scale, progress.total_skips)
                        # While steps are skipped the older checkpoints may be the better ones.
                        is_due = is_due and not is_last and progress.consecutive_skips == 0
                        if is_due or stops:
                            session.save(state, step_key, step)
                        if stops:
                            session.stop(stops, step)
                images = (steps_per_epoch - first_batch) * config.batch_size
                images_per_second = images / (time.perf_counter() - epoch_start)

                # Evaluate, on the whole test split.
                test_loss, test_accuracy = evaluate(
                    setup.eval_step, state.params, state.batch_stats, batches.test_batches()
                )
                applied_steps = int(state.applied_steps)
                record = EpochRecord(
                    epoch=epoch,
                    step=step,
                    train_loss=float(state.loss_sum) / applied_steps if applied_steps else math.nan,
                    test_loss=test_loss,
                    test_accuracy=test_accuracy,
                    images_per_second=images_per_second if images else math.nan,
                    loss_scale=session.progress.loss_scale,
                    total_skips=session.progress.total_skips,
                    seconds=session.seconds(),
                    peak_memory_bytes=peak_memory_bytes(),
                )
                session.end_epoch(record, state, step_key)
                stops = group.stop_signal(interruption.requested)
                if stops and epoch < config.epochs:
                    session.stop(stops, step)
    if record is not None:
        reporter.line(
            f"test accuracy {100 * record.test_accuracy:.1f}% after {record.seconds:.0f} s; "
            f"metrics in {run_dir.path}"
        )
        # Not after every epoch: statistics of the first ones may overflow and recover.
        if not math.isfinite(record.test_loss):
            raise UserError(
                f"The training ended with a test loss of {record.test_loss} after "
                f"{record.total_skips} skipped steps. Lower --learning-rate or --weight-decay, or "
                "add --warmup-epochs."
            )


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        args: the arguments; those of the process by default.

    Returns:
        The exit code: 0, or 1 for a failed run, 2 for wrong arguments, 130 after SIGINT and 143
        after SIGTERM.
    """
    try:
        with Interruption() as interruption:
            config = parse_config(
                sys.argv[1:] if args is None else args, prog="python -m experiments.train"
            )
            with joined(config) as group:
                with group.all_or_none():
                    opened = RunDir(config.run_dir, writes=group.is_main)
                with (
                    contextlib.closing(opened) as run_dir,
                    Reporter(config.epochs, is_quiet=not group.is_main) as reporter,
                ):
                    train(config, run_dir, reporter, interruption, group)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: {error}. Free some space, and go on with --resume.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    finally:
        leave(code)
    sys.exit(code)
