"""What Orbax does not check of a checkpoint: dtypes, shapes and bytes of its leaves."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from experiments.errors import UserError
from experiments.parallel.collect import on_host

_CHECKSUM = "crc32"


class DamagedError(Exception):
    """A checkpoint that cannot be read, or is not what was saved.

    Args:
        step: its step.
        reason: what is wrong.
    """

    def __init__(self, step: int, reason: str) -> None:
        """Makes the message."""
        super().__init__(
            f"the checkpoint of step {step} is damaged ({reason.split('. ')[0][:100]})"
        )


def describe_leaves(tree: Any) -> dict[str, list[Any]]:
    """Describes each leaf by what Orbax does not check.

    Args:
        tree: a tree of arrays; where processes hold parts of them, all have to call this.

    Returns:
        Dtype, shape and CRC-32 of the bytes, by key path.
    """
    leaves = jax.tree.flatten_with_path(jax.device_get(jax.tree.map(on_host, tree)))[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): [
            str(leaf.dtype),
            list(leaf.shape),
            zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).data),
        ]
        for path, leaf in ((path, np.asarray(leaf)) for path, leaf in leaves)
    }


def seal(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Adds a checksum to what is saved beside a state.

    Args:
        metadata: what JSON can hold.

    Returns:
        The metadata with its CRC-32.
    """
    return {**metadata, _CHECKSUM: _checksum(metadata)}


def check_seal(step: int, metadata: Mapping[str, Any]) -> None:
    """Compares metadata with its checksum.

    Args:
        step: the checkpoint's.
        metadata: from :func:`seal`, read back.

    Raises:
        DamagedError: where it is not what was saved.
    """
    content = {name: value for name, value in metadata.items() if name != _CHECKSUM}
    if metadata.get(_CHECKSUM) != _checksum(content):
        raise DamagedError(step, "its metadata is not what was saved")


def _checksum(metadata: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(metadata, sort_keys=True).encode())


def check_leaves(step: int, leaves: Mapping[str, Any], template: Any) -> None:
    """Compares a checkpoint's leaves with those that a run needs.

    Args:
        step: the checkpoint's.
        leaves: from :func:`describe_leaves`, saved with it.
        template: the run's state.

    Raises:
        UserError: names the first leaf that is missing, too many, or of another dtype or shape.
    """
    flat = jax.tree.flatten_with_path(template)[0]
    wanted = {
        jax.tree_util.keystr(path, simple=True, separator="/"): [
            str(leaf.dtype),
            list(leaf.shape),
        ]
        for path, leaf in flat
    }
    saved = {path: list(described[:2]) for path, described in leaves.items()}
    for path in sorted(wanted.keys() | saved.keys()):
        if wanted.get(path) != saved.get(path):
            sides = [
                "absent" if side is None else f"{side[0]}{side[1]}"
                for side in (saved.get(path), wanted.get(path))
            ]
            raise UserError(
                f"The checkpoint of step {step} is of another model, precision or version: leaf "
                f"{path} is {sides[0]} in it and {sides[1]} in this run. Use the options that it "
                "was made with, or another --out."
            )
