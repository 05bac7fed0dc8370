"""Checkpoints that only one node has, as they lie on a disk of its own.

A job that is moved to another node does not find them, and its script would start anew. Temporary
directories may be emptied at each requeue, even on the same node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Directories that each node has for itself, and variables that name such.
_PLACES = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - nothing is written there
_VARIABLES = ("TMPDIR", "SLURM_TMPDIR")


def temporary_directory(
    path: str, directories: Sequence[str], env: Mapping[str, str] | None = None
) -> str:
    """Return the temporary directory of this node that contains a checkpoint; "" if none does.

    One on the file system of the job's own directories is not the node's: a cluster of one machine
    has only one.

    Args:
        path: real path of the checkpoint.
        directories: for the state of the job.
        env: of the job; None: of this process.
    """
    variables = os.environ if env is None else env
    named = (variables.get(name, "") for name in _VARIABLES)
    own = {_device(Path(directory).parent) for directory in directories}
    for place in (*_PLACES, *(name for name in named if name.startswith("/"))):
        real = Path(place).resolve()
        if Path(path).is_relative_to(real) and _device(Path(path).parent) not in own:
            return str(real)
    return ""


def refusal_line(pattern: str, *, written: int, state: str) -> str:
    """Return why a script that resumes is not started where none of its checkpoints is.

    Args:
        pattern: of the checkpoints.
        written: checkpoints that the job has completed.
        state: file with what is known of the job.
    """
    return (
        f"--checkpoint {pattern}: nothing matches on this node, though the job has completed"
        f" {written} checkpoint{'' if written == 1 else 's'}; the program is not started, as it"
        " would begin anew. Write checkpoints to a file system that all nodes share. To begin"
        f" anew on purpose, delete {state} and requeue the job"
    )


def _device(path: Path) -> int | None:
    try:
        return path.stat().st_dev
    except OSError:
        return None
