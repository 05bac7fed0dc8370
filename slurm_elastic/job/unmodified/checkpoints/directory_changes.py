"""Files below a checkpoint's directory, and how they have changed between two scans."""

from __future__ import annotations

import contextlib
import os

from slurm_elastic.job.unmodified.checkpoints.checkpoint_formats import (
    FileVersion,
    is_backup,
    is_temporary,
)
from slurm_elastic.job.unmodified.checkpoints.save_tracker import ChangeKind

#: Longest time of a copy, 10 minutes: it gets the time of its original, which is that much older.
_COPIED_NS = 600 * 10**9

#: Most files of a directory that are examined.
_MAX_FILES = 20_000

#: Versions by path below the directory; "" for a single file.
Files = dict[str, FileVersion]


def file_version(status: os.stat_result) -> FileVersion:
    """Return the version of a file that has this status."""
    return FileVersion(status.st_ino, status.st_size, status.st_mtime_ns)


def directory_files(path: str) -> Files:
    """Return the files below a directory without backups; links count as their targets."""
    files: Files = {}
    pending = [""]
    while pending and len(files) < _MAX_FILES:
        prefix = pending.pop()
        try:
            with os.scandir(f"{path}/{prefix}") as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(f"{prefix}{entry.name}/")
                    elif len(files) < _MAX_FILES and not is_backup(entry.name):
                        with contextlib.suppress(OSError):  # a link to nothing
                            files[prefix + entry.name] = file_version(entry.stat())
        except OSError:
            continue
    return files


def change_kind(old: Files, new: Files) -> ChangeKind | None:
    """Return the kind of change between two scans; None if nothing was written.

    A time that goes back a little is no change: a copy gets that of its original at its end.
    """
    kind = None
    for name, version in new.items():
        earlier = old.get(name)
        if earlier is None:
            kind = kind or ChangeKind.GROWN
        elif version != earlier:
            same = (version.inode, version.size) == (earlier.inode, earlier.size)
            if same and 0 < earlier.changed_ns - version.changed_ns < _COPIED_NS:
                continue
            if version.inode != earlier.inode or version.size <= earlier.size:
                return ChangeKind.REWRITTEN
            kind = ChangeKind.GROWN
    removed = old.keys() - new.keys()
    if kind is None and removed and all(is_temporary(n.rpartition("/")[2]) for n in removed):
        return ChangeKind.GROWN
    return kind
