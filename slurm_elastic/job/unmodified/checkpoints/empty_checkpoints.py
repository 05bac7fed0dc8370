"""Removal of directories of saves that were ended before their first file.

Slurm continues stopped ranks for a moment before it ends a job. In it they cannot open files, but
make the directory of their next save (docs/reliability-defects.md, "A moment in which ranks run").
A script that resumes from its newest directory would fail on that one at each start.
"""

from __future__ import annotations

import contextlib
import glob
import os
import time
from pathlib import Path

from slurm_elastic.job.launch import log_line
from slurm_elastic.job.unmodified.checkpoints.checkpoint_files import exists, files_of

#: A directory that is younger may be one that another job with the same pattern is about to fill.
_LEAST_AGE_S = 1.0


def remove_empty(pattern: str) -> None:
    """Remove directories without any file that are newer than all checkpoints with files.

    To be called while no rank runs. Nothing that holds a file is ever removed, and nothing at all
    where there is no checkpoint with files. One that cannot be removed does not keep the others.
    Each is written to the job's log.

    Args:
        pattern: glob pattern of the checkpoints.
    """
    for path in _newest_empty(pattern):
        try:
            for directory, _, _ in os.walk(path, topdown=False):
                Path(directory).rmdir()
        except OSError as error:
            if exists(path) and not files_of(path):  # no other job has filled or removed it
                log_line(
                    f"{path} holds no file, and cannot be removed: {error.strerror}; if the "
                    "program fails on it, remove it"
                )
        else:
            log_line(f"{path} is removed: it is empty, the save that made it was ended")


def _newest_empty(pattern: str) -> list[Path]:
    """Return the empty directories that are newer than all checkpoints with files."""
    newest_ns = 0
    empty: list[tuple[Path, int]] = []
    for name in sorted(glob.glob(pattern, recursive=True)):  # noqa: PTH207 - may be absolute
        path = Path(name)
        with contextlib.suppress(OSError):  # one that disappears meanwhile
            changed_ns = path.lstat().st_mtime_ns
            if files_of(path):
                newest_ns = max(newest_ns, changed_ns)
            elif path.is_dir() and not path.is_symlink():
                empty.append((path, changed_ns))
    last_ns = time.time_ns() - int(_LEAST_AGE_S * 1e9)
    return [path for path, changed_ns in empty if 0 < newest_ns < changed_ns < last_ns]
