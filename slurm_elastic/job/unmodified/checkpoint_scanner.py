"""Detection of a script's checkpoints, and of those that are complete.

A checkpoint is a file, or a directory with its contents, that matches a glob pattern. It is
complete when its size and times have not changed for `SETTLE_S` seconds of scans; names of
unfinished files do not count. If each save is a single file, a rename into place completes it.
"""

from __future__ import annotations

import glob
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from slurm_elastic.job.unmodified.inotify import DirectoryWatch

SETTLE_S = 1.0

_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock", "~")
#: At most this many files of a directory are examined.
_MAX_FILES = 20_000
#: Only this many of the newest checkpoints are examined again at each scan.
_NEWEST = 4


class ScriptCheckpoint(NamedTuple):
    """One version of a checkpoint.

    Attributes:
        path: real path.
        written: time of the last change, by the file system.
        signature: equal as long as nothing changes.
        changed_at: time of the scan that first found this version, by the scanner's clock.
    """

    path: str
    written: float
    signature: tuple[int, ...]
    changed_at: float


class CheckpointScanner:
    """Scanner of the checkpoints that match a pattern.

    Args:
        pattern: a glob pattern, may contain `**`; relative to the current directory.
        clock: monotonic seconds.

    Attributes:
        trust_renames: whether a file that is renamed into place is complete at once. Wrong for
            scripts that write several files per save: others may follow.
    """

    def __init__(self, pattern: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.pattern = pattern
        self.trust_renames = False
        self._clock = clock
        self._seen: dict[str, ScriptCheckpoint] = {}
        self._complete: dict[str, ScriptCheckpoint] = {}
        self._directory_watch = DirectoryWatch()

    def accept_existing(self) -> None:
        """Take all existing checkpoints as complete; to be called while no rank runs."""
        self._refresh()
        self._complete = dict(self._seen)

    def scan(self) -> list[ScriptCheckpoint]:
        """Scan; return the versions that have become complete since the last scan, oldest first."""
        now = self._clock()
        renamed = self._directory_watch.renamed()
        self._refresh()
        fresh = [
            checkpoint
            for path, checkpoint in self._seen.items()
            if self._complete.get(path) != checkpoint
            and (
                now - checkpoint.changed_at >= SETTLE_S or (self.trust_renames and path in renamed)
            )
        ]
        self._complete = {path: c for path, c in self._complete.items() if path in self._seen}
        self._complete.update((checkpoint.path, checkpoint) for checkpoint in fresh)
        return sorted(fresh, key=lambda checkpoint: checkpoint.written)

    def wait(self, seconds: float) -> None:
        """Wait at most this long for an event in the checkpoints' directories on this host."""
        self._directory_watch.wait(seconds)

    def wake(self) -> None:
        """End another thread's `wait`."""
        self._directory_watch.wake()

    @property
    def unsettled(self) -> bool:
        """Whether a checkpoint was incomplete at the last scan."""
        return any(self._complete.get(path) != c for path, c in self._seen.items())

    @property
    def complete(self) -> list[ScriptCheckpoint]:
        """All complete checkpoints, newest first."""
        return sorted(self._complete.values(), key=lambda c: c.written, reverse=True)

    def _refresh(self) -> None:
        now = self._clock()
        current: dict[str, ScriptCheckpoint] = {}
        matches = sorted(
            self._matches().items(), key=lambda item: item[1].st_mtime_ns, reverse=True
        )
        for rank, (path, status) in enumerate(matches):
            earlier = self._seen.get(path)
            if earlier and rank >= _NEWEST and self._complete.get(path) == earlier:
                current[path] = earlier
                continue
            signature = _signature(path, status)
            if signature is None:
                continue
            if earlier and earlier.signature == signature:
                current[path] = earlier
            else:
                current[path] = ScriptCheckpoint(path, signature[2] / 1e9, signature, now)
        self._seen = current
        self._directory_watch.watch(str(Path(path).parent) for path in current)

    def _matches(self) -> dict[str, os.stat_result]:
        """Return real paths, so that a link such as `latest` counts as its target."""
        matches = {}
        parents: dict[str, str] = {}
        for name in glob.glob(self.pattern, recursive=True):  # noqa: PTH207 - it may be absolute
            parent, base = os.path.split(name)
            if _is_unfinished(base):
                continue
            try:
                status = os.lstat(name)
                if stat.S_ISLNK(status.st_mode):
                    path = os.path.realpath(name, strict=True)
                    status = os.stat(path)  # noqa: PTH116 - called for each file at each scan
                else:
                    if parent not in parents:
                        parents[parent] = os.path.realpath(parent)
                    path = f"{parents[parent]}/{base}"
            except OSError:
                continue
            matches[path] = status
        return matches


def _is_unfinished(name: str) -> bool:
    base = name.lower()
    return base.startswith((".", "tmp")) or base.endswith(_UNFINISHED)


def _signature(path: str, status: os.stat_result) -> tuple[int, ...] | None:
    """Return inode, size and newest change, of a directory over its contents; None if empty."""
    if not stat.S_ISDIR(status.st_mode):
        return (status.st_ino, status.st_size, status.st_mtime_ns) if status.st_size else None
    files, size, newest = 0, 0, status.st_mtime_ns
    pending = [path]
    while pending and files < _MAX_FILES:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        files += 1
                        size += entry.stat().st_size
                    newest = max(newest, entry.stat().st_mtime_ns)
        except OSError:
            continue
    return (status.st_ino, size, newest, files) if files else None
