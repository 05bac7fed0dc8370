"""Checkpoints on a disk that only one node has.

A job that is moved to another node does not find them, and its script would start anew. Temporary
directories may be emptied at each requeue, even on the same node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Directories that each node usually has for itself, and variables that name such directories.
_PLACES = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - nothing is written there
_VARIABLES = ("TMPDIR", "SLURM_TMPDIR")


def temporary_directory(
    path: str, directories: Sequence[str], env: Mapping[str, str] | None = None
) -> str:
    """Return the temporary directory of this node that contains a checkpoint; "" if none does.

    A temporary directory on the file system of the job's own directories does not count: a cluster
    of one machine has only one file system.

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


def refusal_line(pattern: str, *, written: int, state: str, job_id: str, node: str = "") -> str:
    """Return the message about a script that is not started, as none of its checkpoints is here.

    Args:
        pattern: of the checkpoints.
        written: checkpoints that the job has completed.
        state: file with what is known of the job.
        job_id: as `scontrol` takes it.
        node: on which the newest was completed, if that is another one; "": not known.
    """
    last = f", the last one on {node}" if node else ""
    there = (
        f" To go on from there, once the job is held: scontrol update jobid={job_id}"
        f" ReqNodeList={node}, then selastic release {job_id}."
    )
    return (
        f"--checkpoint {pattern}: nothing matches on this node, though the job has completed"
        f" {written} checkpoint{'' if written == 1 else 's'}{last}; the program is not started, as"
        " it would begin anew. Write checkpoints to a file system that all nodes share."
        f"{there if node else ''} To begin anew on purpose, delete {state} and requeue the job"
    )


def this_node() -> str:
    """Return the name of this node in Slurm; "" outside a job."""
    return os.environ.get("SLURMD_NODENAME", "")


def _device(path: Path) -> int | None:
    try:
        return path.stat().st_dev
    except OSError:
        return None
