"""Checkpoints of a run by Orbax: written in the background, complete or absent, verified."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from experiments.errors import UserError
from experiments.parallel.group import ALONE, Group
from experiments.tracking.integrity import (
    DamagedError,
    check_leaves,
    check_seal,
    describe_leaves,
    seal,
)
from experiments.tracking.quiet import Quiet
from experiments.tracking.reading import opened_alone, set_aside

PyTree = Any


class Restored(NamedTuple):
    """A checkpoint that was read.

    Attributes:
        step: the step after which it was saved.
        state: a tree like the template.
        metadata: what was saved beside it.
    """

    step: int
    state: PyTree
    metadata: dict[str, Any]


class Checkpointer:
    """The checkpoints of one run: the newest ones, and the one with the best test accuracy.

    Orbax writes into a temporary directory and renames it when it is complete, so that a killed
    process leaves the former checkpoints and nothing in between. Neither Orbax nor its storage
    notices a flipped bit, and a template of other dtypes is cast to without a word; so each
    leaf's dtype, shape and CRC-32 are saved with it and compared on the way back, and so are the
    metadata.

    Args:
        path: directory for the checkpoints, made where it is missing.
        keep: how many of the newest to keep.
        group: the processes, which share the directory. All write, each what its devices hold;
            each reads on its own, the whole state.

    Raises:
        UserError: where the directory cannot be written.
    """

    def __init__(self, path: Path, *, keep: int, group: Group = ALONE) -> None:
        """Opens the directory and removes what a killed process left half written."""
        self.path = path.absolute()
        self._group = group
        policy = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(keep),
                checkpoint_managers.BestN(
                    get_metric_fn=lambda metrics: metrics["test_accuracy"],
                    n=1,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        )
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=policy, cleanup_tmp_directories=True
        )
        self._newest_complete: int | None = None
        self._failed = False
        self._quiet = Quiet()
        self._quiet.start()
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return ocp.CheckpointManager(self.path, options=self._options)
        except (OSError, ValueError) as error:
            self._quiet.stop()
            raise UserError(
                f"The checkpoints in {self.path} cannot be opened: {_first_line(error)}. Move that "
                "directory away, or choose another --out."
            ) from error

    def save(
        self,
        step: int,
        state: PyTree,
        metadata: Mapping[str, Any],
        *,
        test_accuracy: float | None = None,
    ) -> None:
        """Starts to save a state; returns once it is copied off the device.

        Args:
            step: the number of steps taken.
            state: a tree of arrays.
            metadata: what JSON can hold.
            test_accuracy: share of 1, where the state was evaluated: the best one is kept.

        Raises:
            UserError: where this checkpoint or the former one could not be written.
        """
        with self._explained(step):
            self._manager.wait_until_finished()
            self._newest_complete = self._manager.latest_step()
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                metadata=ocp.args.JsonSave(seal({**metadata, "leaves": describe_leaves(state)})),
            )
            metrics = None if test_accuracy is None else {"test_accuracy": test_accuracy}
            self._manager.save(step, args=args, metrics=metrics)

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk.

        Raises:
            UserError: where it could not be written.
        """
        with self._explained(None):
            self._manager.wait_until_finished()
            self._newest_complete = self._manager.latest_step()

    def close(self) -> None:
        """Waits for the last checkpoint and ends Orbax's threads.

        Raises:
            UserError: where it could not be written.
        """
        try:
            self.wait()
        finally:
            self._close_manager()
            # After a failure the tasks that are left behind report it until the process ends.
            if self._failed:
                self._quiet.stay()
            else:
                self._quiet.stop()

    def _close_manager(self) -> None:
        # Closing waits again, and raises again what was raised before.
        with contextlib.suppress(Exception):
            self._manager.close()

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def read_metadata(self, step: int) -> dict[str, Any]:
        """Reads what was saved beside a state.

        Args:
            step: one of :meth:`steps`.

        Raises:
            DamagedError: where it cannot be read, or is not what was saved.
        """
        metadata = self._read(step, metadata=ocp.args.JsonRestore())["metadata"]
        check_seal(step, metadata)
        return metadata

    def restore_newest(
        self,
        template: PyTree,
        check: Callable[[Mapping[str, Any]], None],
        report: Callable[[str], None],
    ) -> Restored | None:
        """Reads the newest checkpoint that is whole; damaged ones are renamed and passed over.

        Args:
            template: a state with the structure, dtypes, shapes and shardings wanted.
            check: called with the metadata before anything else is read; raises a `UserError`
                where the checkpoint is not of this run.
            report: called with a line for each damaged checkpoint.

        Of several processes all have to call this.

        Returns:
            The checkpoint, or None where there is none.

        Raises:
            UserError: where all are damaged, or one is of another model or precision.
        """
        damaged = []
        for step in reversed(self.steps()):
            restored = None
            with self._group.all_or_none():
                try:
                    metadata = self.read_metadata(step)
                    check(metadata)
                    check_leaves(step, metadata["leaves"], template)
                    state = self._restore(step, metadata["leaves"], template)
                    restored = Restored(step, state, metadata)
                except DamagedError as error:
                    report(f"{error}; passed over")
            if not all(self._group.gather(restored is not None)):
                damaged.append(step)
                continue
            self._set_aside(damaged)
            self._newest_complete = step
            return restored
        if damaged:
            raise UserError(
                f"All checkpoints in {self.path} are damaged: steps "
                f"{', '.join(map(str, sorted(damaged)))}. Start anew without --resume: the files "
                "are moved aside, not deleted."
            )
        return None

    def _restore(self, step: int, leaves: Mapping[str, Any], template: PyTree) -> PyTree:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, template)
        state = self._read(step, state=ocp.args.StandardRestore(abstract))["state"]
        for path, described in describe_leaves(state).items():
            if described != leaves[path]:
                raise DamagedError(step, f"leaf {path} is not what was saved")
        return state

    def _read(self, step: int, **items: Any) -> Any:
        try:
            with opened_alone(self.path, self._manager, self._group) as reader:
                return reader.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Whatever a damaged file makes of a reader.
            reason = _first_line(error)
        raise DamagedError(step, reason)

    def _set_aside(self, steps: list[int]) -> None:
        """Renames damaged checkpoints, so that their steps can be saved again."""
        if not steps:
            return
        self._close_manager()
        with self._group.all_or_none():
            if self._group.is_main:
                set_aside(self.path, steps)
        self._manager = self._open()

    @contextlib.contextmanager
    def _explained(self, step: int | None) -> Iterator[None]:
        """Says in one message that a checkpoint could not be written, and what there is."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            self._failed = True
            if self._group.is_failed_collective(error):
                raise  # A process is lost, which `Group.watched` tells.
            what = (
                "The last checkpoint" if step is None else f"A checkpoint (step {step} or before)"
            )
            kept = self._newest_complete
            raise UserError(
                f"{what} could not be written to {self.path}: {_first_line(error)}. "
                + ("There is none" if kept is None else f"The one of step {kept} is complete")
                + ". Where the disk is full, free some space; then go on with --resume."
            ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
