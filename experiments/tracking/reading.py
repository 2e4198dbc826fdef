"""Reading checkpoints where a file may be damaged and other processes read too."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import orbax.checkpoint as ocp

from experiments.parallel.group import Group


@contextlib.contextmanager
def opened_alone(
    path: Path, manager: ocp.CheckpointManager, group: Group
) -> Iterator[ocp.CheckpointManager]:
    """Opens checkpoints for one process alone.

    Where processes read together and one meets a damaged file, the others wait for it.

    Args:
        path: the directory.
        manager: what the processes write with.
        group: the processes.

    Yields:
        A manager to read with: `manager` itself where there is no other process.
    """
    if group.is_alone:
        yield manager
        return
    alone = ocp.options.MultiprocessingOptions(
        primary_host=group.index,
        active_processes={group.index},
        barrier_sync_key_prefix=f"alone{group.index}",
    )
    options = ocp.CheckpointManagerOptions(read_only=True, multiprocessing_options=alone)
    with ocp.CheckpointManager(path, options=options) as reader:
        yield reader


def set_aside(path: Path, steps: Sequence[int]) -> None:
    """Renames damaged checkpoints, so that their steps can be saved again.

    Args:
        path: the directory that they are in; they go to `damaged` beside it.
        steps: which.
    """
    for step in steps:
        target = path.parent / "damaged" / str(step)
        target.parent.mkdir(exist_ok=True)
        number = 1
        while target.exists():
            number += 1
            target = target.with_name(f"{step}-{number}")
        (path / str(step)).rename(target)
