"""Removal of state that ended jobs have left in `state_directory`.

A job may come back as long as Slurm lists it, also after its program has ended with exit code 0
(`scontrol requeue`). So a later job in the same directory removes the state of jobs of its cluster
that Slurm no longer lists, a day after the last change.

Checkpoints that were kept (`kept/`) are the user's data and never removed here.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slurm_elastic.job.environment.state_directory import is_own

#: Age of the newest file of a job at which Slurm is asked for the job (our choice).
_OLD_S = 86400.0
_SQUEUE_S = 30.0
_SQUEUE = ("squeue", "--me", "--array", "--states=all", "--noheader", "--format=%A")
#: Variables of the user that would make squeue list fewer jobs, or those of another cluster.
_SQUEUE_VARIABLES = ("SQUEUE_", "SLURM_CLUSTERS")


def remove_old_state(
    directories: Sequence[str],
    run_id: str,
    *,
    now: float | None = None,
    listed: Callable[[], frozenset[str] | None] | None = None,
) -> None:
    """Remove old files of jobs of this job's cluster that Slurm does not list.

    Args:
        directories: those of `state_directories`.
        run_id: of this job.
        now: epoch s; None for the present time.
        listed: returns the ids of the user's jobs, None if they are not known; None for squeue.
    """
    now = time.time() if now is None else now
    cluster = run_id.rpartition("-")[0]
    old: dict[str, list[Path]] = {}
    for directory in map(Path, directories):
        newest: dict[str, float] = {}
        paths: dict[str, list[Path]] = {}
        for path, changed in _files(directory, f"{cluster}-"):
            job_id = path.name[len(cluster) + 1 :].partition(".")[0]
            if job_id.isdecimal() and f"{cluster}-{job_id}" != run_id:
                newest[job_id] = max(changed, newest.get(job_id, 0.0))
                paths.setdefault(job_id, []).append(path)
        for job_id, changed in newest.items():
            if now - changed > _OLD_S:
                old.setdefault(job_id, []).extend(paths[job_id])
    alive = (listed or _listed)() if old else None
    if alive is None:
        return
    for job_id in old.keys() - alive:
        for path in old[job_id]:
            with contextlib.suppress(OSError):
                path.unlink()
            kept = path.parent / "kept"
            for folder in (kept / f"{cluster}-{job_id}", kept, path.parent):
                with contextlib.suppress(OSError):  # only empty directories can be removed so
                    folder.rmdir()


def _files(directory: Path, start: str) -> list[tuple[Path, float]]:
    """Return path and time of change of the user's files whose names begin so."""
    files = []
    with contextlib.suppress(OSError):
        folder = directory.lstat()
        if stat.S_ISDIR(folder.st_mode) and is_own(folder):
            for path in directory.iterdir():
                status = path.lstat()
                if path.name.startswith(start) and stat.S_ISREG(status.st_mode) and is_own(status):
                    files.append((path, status.st_mtime))
    return files


def _listed() -> frozenset[str] | None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(_SQUEUE_VARIABLES)}
    try:
        process = subprocess.run(
            _SQUEUE, capture_output=True, text=True, check=True, timeout=_SQUEUE_S, env=env
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return frozenset(process.stdout.split())
