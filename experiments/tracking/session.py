"""A run on disk while it goes: where it begins, what it records, what it saves."""

import contextlib
import time
from types import TracebackType
from typing import Any, NoReturn, Self

import jax

from experiments.config import TrainConfig
from experiments.errors import UserError
from experiments.interruption import Interrupted
from experiments.parallel.group import Group
from experiments.parallel.placement import Placement
from experiments.reporting import Reporter
from experiments.stall import Diagnose, StalledError, check_progress
from experiments.steps import Progress, StepReader, events
from experiments.tracking.checkpoint import Checkpointer
from experiments.tracking.identity import check_same_run, config_values
from experiments.tracking.run_dir import EpochRecord, RunDir
from experiments.tracking.tensorboard import TensorBoardWriter
from experiments.train_state import TrainState


class Session:
    """Journals, checkpoints and TensorBoard files of a run.

    Use it as a context manager: leaving it waits for the last checkpoint.

    Args:
        run_dir: the run's directory.
        config: the run.
        reporter: where to say how it goes.
        placement: where the state lives.
        group: the processes. All keep the same session, and only process 0 writes more than its
            part of the checkpoints.

    Attributes:
        epochs_done: epochs that metrics.jsonl has.
        progress: what the last look at the device gave.
    """

    progress: Progress

    def __init__(
        self,
        run_dir: RunDir,
        config: TrainConfig,
        reporter: Reporter,
        placement: Placement,
        group: Group,
    ) -> None:
        """Takes the directory; :meth:`begin` looks into it."""
        self._placement = placement
        self._group = group
        self.epochs_done = 0
        self._run_dir = run_dir
        self._config = config
        self._reporter = reporter
        self._seconds_before = 0.0
        self._checkpointer: Checkpointer | None = None
        self._tensorboard: TensorBoardWriter | None = None
        self._reader: StepReader | None = None
        self._saved_step = 0
        self._start = time.perf_counter()

    def __enter__(self) -> Self:
        """Does nothing."""
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits for the last checkpoint and closes the files."""
        # What ends the run already is what its user should read.
        with contextlib.suppress(*(() if error is None else (UserError,))):
            try:
                if self._tensorboard is not None:
                    self._tensorboard.close()
            finally:
                # Where one process fails, the others do not come to wait with it.
                is_shared = error is None or isinstance(error, StalledError | Interrupted)
                if self._checkpointer is not None and (self._group.is_alone or is_shared):
                    self._checkpointer.close()

    def begin(
        self, state: TrainState, step_key: jax.Array, facts: dict[str, Any], start: float
    ) -> tuple[TrainState, jax.Array]:
        """Starts the run anew, or goes on from its newest checkpoint.

        Args:
            state: a state before the first step.
            step_key: the run's random key.
            facts: what config.json holds beside the configuration.
            start: when the process started on the run, by `time.perf_counter`.

        Returns:
            The state and the key to go on with.

        Raises:
            UserError: where the checkpoints are not of this run, or none of them is whole.
        """
        self._start = start
        run_dir = self._run_dir
        first_step = 0
        restored = self._restore(state, step_key) if self._config.resume else None
        if restored is not None:
            first_step = self._saved_step = restored.step
            state = restored.state["train_state"]
            step_key = jax.random.wrap_key_data(restored.state["step_key"], impl="rbg")
            self.epochs_done = restored.metadata["epochs_done"]
            self._seconds_before = restored.metadata["seconds"]
            run_dir.metrics.cut_after(first_step)
            run_dir.events.cut_after(first_step)
            run_dir.events.append({"event": "resume", "step": first_step})
            self._reporter.line(f"resumed after step {first_step}")
        else:
            with self._group.all_or_none():
                moved_to = run_dir.start()
            if moved_to:
                self._reporter.line(f"moved the earlier run to {moved_to}")
            self._checkpointer = self._open_checkpoints()
        run_dir.write_config(self._config, **facts)
        self._tensorboard = TensorBoardWriter(
            run_dir.tensorboard,
            purge_step=None if restored is None else first_step + 1,
            writes=run_dir.writes,
        )
        self._reader = StepReader(state)
        self.progress = self._reader.read(state)
        scale = self.progress.loss_scale
        self._tensorboard.loss_scale(0 if restored is None else first_step + 1, scale)
        if restored is None:
            run_dir.events.append({"event": "loss_scale", "step": 0, "loss_scale": scale})
        return state, step_key

    def _restore(self, state: TrainState, step_key: jax.Array) -> Any:
        checkpointer = self._open_checkpoints()
        wanted = _saved(state, step_key)
        restored = checkpointer.restore_newest(
            self._placement.template(wanted),
            lambda saved: check_same_run(saved["config"], self._config, "the checkpoint"),
            self._reporter.line,
        )
        if restored is None:
            checkpointer.close()
            if self._run_dir.saved_config() is not None:
                self._reporter.line(f"no checkpoint in {self._run_dir.path}: starting anew")
            return None
        self._checkpointer = checkpointer
        return restored._replace(state=self._placement.place_like(restored.state, wanted))

    def _open_checkpoints(self) -> Checkpointer:
        return Checkpointer(self._run_dir.checkpoints, keep=self._config.keep, group=self._group)

    def seconds(self) -> float:
        """Returns the seconds that the run has taken, without the time that it was stopped."""
        return self._seconds_before + time.perf_counter() - self._start

    def is_checkpoint_due(self, step: int) -> bool:
        """Returns whether `--checkpoint-every` asks for a checkpoint that is not saved yet.

        Args:
            step: the steps taken.
        """
        every = self._config.checkpoint_every
        return every > 0 and step // every > self._saved_step // every

    def look(self, state: TrainState, diagnose: Diagnose) -> Progress:
        """Fetches and records the steps since the last look; due every `LOG_STEPS` steps.

        Args:
            state: the state after a step; reading it waits for the device.
            diagnose: called where the training is stuck.

        Returns:
            The metrics.

        Raises:
            StalledError: where the training is stuck.
        """
        assert self._reader is not None and self._tensorboard is not None
        progress = self.progress = self._reader.read(state)
        self._run_dir.events.append(*events(progress.records))
        self._tensorboard.steps(progress.records)
        try:
            check_progress(progress, self._config, diagnose)
        except StalledError as error:
            self._run_dir.events.append(
                {"event": "stop", "step": progress.step, "reason": str(error)}
            )
            raise
        return progress

    def save(
        self,
        state: TrainState,
        step_key: jax.Array,
        step: int,
        *,
        test_accuracy: float | None = None,
    ) -> None:
        """Starts to save a checkpoint.

        Args:
            state: the state after a step.
            step_key: the run's random key.
            step: the steps taken.
            test_accuracy: share of 1, after an evaluation.

        Raises:
            UserError: where a checkpoint cannot be written.
        """
        assert self._checkpointer is not None and self._tensorboard is not None
        self._saved_step = step
        self._tensorboard.flush()
        self._run_dir.events.append({"event": "checkpoint", "step": step})
        self._checkpointer.save(
            step,
            _saved(state, step_key),
            {
                "config": config_values(self._config),
                "epochs_done": self.epochs_done,
                "seconds": self.seconds(),
            },
            test_accuracy=test_accuracy,
        )

    def end_epoch(self, record: EpochRecord, state: TrainState, step_key: jax.Array) -> None:
        """Records an epoch and saves its state.

        Args:
            record: the epoch's.
            state: the state after it.
            step_key: the run's random key.

        Raises:
            UserError: where something cannot be written.
        """
        assert self._tensorboard is not None
        # The metrics first: a checkpoint of an epoch without its line would lose that line.
        self._run_dir.metrics.append(vars(record))
        self._tensorboard.epoch(record)
        self._tensorboard.flush()
        self.epochs_done = record.epoch
        self._reporter.end_epoch(record)
        self.save(state, step_key, record.step, test_accuracy=record.test_accuracy)

    def stop(self, signal_number: int, step: int) -> NoReturn:
        """Waits for the last checkpoint and ends the run where it is.

        Args:
            signal_number: the signal.
            step: the steps taken, all of them saved.

        Raises:
            Interrupted: says how to go on.
            UserError: where the checkpoint could not be written.
        """
        assert self._checkpointer is not None
        self._checkpointer.wait()
        error = Interrupted(
            signal_number,
            f"step {step} is saved in {self._run_dir.path}. Go on with --resume.",
        )
        self._run_dir.events.append({"event": "stop", "step": step, "reason": str(error)})
        raise error


def _saved(state: TrainState, step_key: jax.Array) -> dict[str, Any]:
    return {"train_state": state, "step_key": jax.random.key_data(step_key)}
