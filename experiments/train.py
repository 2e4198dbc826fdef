"""Trains a ResNet-50 in float16, bfloat16 or float32: `python -m experiments.train --help`."""

import sys
import time
from collections.abc import Sequence

from experiments.cli import parse_config
from experiments.config import TrainConfig
from experiments.errors import UserError
from experiments.reporting import Reporter
from experiments.run_dir import EpochRecord, RunDir

CHECK_EVERY = 20
"""Steps between two looks at the loss scale: each makes the host wait for the device."""


def train(config: TrainConfig, reporter: Reporter) -> EpochRecord:
    """Runs a training.

    Args:
        config: what to run.
        reporter: where to say how it goes.

    Returns:
        The metrics after the last epoch.

    Raises:
        UserError: where the data or the run directory are not usable, or the training stalls.
    """
    start = time.perf_counter()

    # The run directory first: whatever is wrong with it shows at once.
    run_dir = RunDir(config.run_dir)

    # Imported here, as it takes seconds and wrong arguments should show before.
    import jax
    import numpy as np

    import mpopt
    from experiments import data
    from experiments.augment import Augmentation
    from experiments.evaluate import evaluate
    from experiments.optimizer import make_optimizer, make_policy
    from experiments.resnet import init_resnet
    from experiments.stall import check_progress
    from experiments.train_step import (
        init_train_state,
        make_eval_step,
        make_train_step,
        start_epoch,
    )

    # Data: the whole set on the device, as bytes.
    data_dir = config.data_dir or data.default_data_dir()
    image_set = data.load(config.dataset, data_dir, config.image_size, report=reporter.line)
    num_train = len(image_set.train.labels)
    steps_per_epoch = num_train // config.batch_size
    if steps_per_epoch == 0:
        raise UserError(f"--batch-size {config.batch_size} is more than the {num_train} examples.")
    train_split, test_split = jax.device_put((image_set.train, image_set.test))
    mean, std = data.mean_and_std(image_set.train.images)
    augmentation = Augmentation(mean, std, config.crop_padding, config.flip)

    # Model, optimizer and state, each made by one compiled program: many small ones take longer.
    policy = make_policy(config)
    tx = make_optimizer(config, steps_per_epoch)
    device = jax.devices()[0].device_kind
    reporter.line(f"{config.model_name} of width {config.width}, {config.precision}, on {device}")
    compile_start = time.perf_counter()
    # The rbg generator compiles in a third of threefry's time.
    init_key, step_key = jax.random.split(jax.random.key(config.seed, impl="rbg"))
    graphdef, params_f32, batch_stats = init_resnet(
        init_key,
        num_classes=image_set.num_classes,
        in_channels=train_split.images.shape[-1],
        width=config.width,
        stage_sizes=config.stage_sizes,
        stem=config.stem,
        dtype=policy.compute_dtype,
    )
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params_f32))
    init_state = jax.jit(init_train_state, static_argnums=(2, 3))
    state = init_state(params_f32, batch_stats, tx, policy)
    del params_f32, batch_stats

    # The step is compiled ahead of its first call, so that no epoch's time contains it.
    indices = np.zeros(config.batch_size, np.int32)
    train_step = (
        make_train_step(graphdef, tx, policy, augmentation)
        .lower(state, step_key, *train_split, indices)
        .compile()
    )
    eval_step = make_eval_step(graphdef, policy, augmentation)
    reporter.line(
        f"{num_params:,} params, {steps_per_epoch} steps of {config.batch_size} images an epoch, "
        f"compiled in {time.perf_counter() - compile_start:.0f} s"
    )

    moved_to = run_dir.start(config, num_params=num_params, device=device)
    if moved_to:
        reporter.line(f"moved the earlier run to {moved_to}")
    record = None
    for epoch in range(1, config.epochs + 1):
        # Train: the order depends on seed and epoch alone.
        order = np.random.default_rng((config.seed, epoch)).permutation(num_train)
        batches = order[: steps_per_epoch * config.batch_size].astype(np.int32)
        reporter.start_epoch(epoch, steps_per_epoch)
        epoch_start = time.perf_counter()
        state = start_epoch(state)
        for step, indices in enumerate(batches.reshape(steps_per_epoch, -1), start=1):
            state = train_step(state, step_key, *train_split, indices)
            if step % CHECK_EVERY == 0 or step == steps_per_epoch:
                metrics = jax.device_get(mpopt.metrics(state.opt_state))
                reporter.steps_done(step, float(metrics["loss_scale"]), int(metrics["total_skips"]))
                check_progress(state, config)
        images_per_second = batches.size / (time.perf_counter() - epoch_start)

        # Evaluate, on the whole test split.
        test_loss, test_accuracy = evaluate(
            eval_step,
            state.params,
            state.batch_stats,
            test_split.images,
            test_split.labels,
            config.batch_size,
        )
        applied_steps = int(state.applied_steps)
        record = EpochRecord(
            epoch=epoch,
            train_loss=float(state.loss_sum) / applied_steps if applied_steps else float("nan"),
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            images_per_second=images_per_second,
            loss_scale=float(metrics["loss_scale"]),
            total_skips=int(metrics["total_skips"]),
            seconds=time.perf_counter() - start,
        )
        run_dir.append_metrics(record)
        reporter.end_epoch(record)

    assert record is not None  # config.epochs is at least 1
    reporter.line(
        f"test accuracy {100 * record.test_accuracy:.1f}% after {record.seconds:.0f} s; "
        f"metrics in {run_dir.path}"
    )
    return record


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        args: the arguments; those of the process by default.

    Returns:
        The exit code: 0, or 1 for a failed run, 2 for wrong arguments, 130 when interrupted.
    """
    try:
        config = parse_config(
            sys.argv[1:] if args is None else args, prog="python -m experiments.train"
        )
        with Reporter(config.epochs) as reporter:
            train(config, reporter)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
