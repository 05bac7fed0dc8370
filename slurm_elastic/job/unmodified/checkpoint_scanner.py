"""Which checkpoints of a script are there, and which of them are complete.

A checkpoint is what a glob pattern matches: a file, or a directory with all
that is in it. It is complete when its size and times have not changed for
`SETTLE_S` while somebody looked; names that say "not yet" do not count. Where
saves are known to be one file each, being renamed into place is enough.
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
#: A directory with more files than this is judged by its first ones.
_MAX_FILES = 20_000
#: Older checkpoints than so many are not looked into again.
_FRESH = 4


class ScriptCheckpoint(NamedTuple):
    """One version of a checkpoint.

    Attributes:
        path: its real path.
        written: time of the last change, as the file system says.
        signature: equal as long as nothing changes.
        changed_at: when this version was first seen, on the scanner's clock.
    """

    path: str
    written: float
    signature: tuple[int, ...]
    changed_at: float


class CheckpointScanner:
    """Looks at the checkpoints again and again.

    Args:
        pattern: the glob pattern, `**` included; relative to the present directory.
        clock: monotonic seconds.

    Attributes:
        trust_renames: what is renamed into place is complete at once. Not to be believed of a
            script that writes several files for one save: the others may still be to come.
    """

    def __init__(self, pattern: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.pattern = pattern
        self.trust_renames = False
        self._clock = clock
        self._seen: dict[str, ScriptCheckpoint] = {}
        self._complete: dict[str, ScriptCheckpoint] = {}
        self._directories = DirectoryWatch()

    def adopt(self) -> None:
        """Take all that is there as complete: nobody is writing yet."""
        self._look()
        self._complete = dict(self._seen)

    def scan(self) -> list[ScriptCheckpoint]:
        """Look once; the versions that have become complete since the last look, oldest first."""
        now = self._clock()
        renamed = self._directories.renamed()
        self._look()
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
        """Until something happens beside the checkpoints on this host, at most so long."""
        self._directories.wait(seconds)

    def poke(self) -> None:
        """End another thread's `wait`."""
        self._directories.poke()

    @property
    def unsettled(self) -> bool:
        """Whether something was being written at the last look."""
        return any(self._complete.get(path) != c for path, c in self._seen.items())

    @property
    def complete(self) -> list[ScriptCheckpoint]:
        """All complete ones, newest first."""
        return sorted(self._complete.values(), key=lambda c: c.written, reverse=True)

    def _look(self) -> None:
        now = self._clock()
        found: dict[str, ScriptCheckpoint] = {}
        tops = sorted(self._matches().items(), key=lambda item: item[1].st_mtime_ns, reverse=True)
        for rank, (path, status) in enumerate(tops):
            known = self._seen.get(path)
            if known and rank >= _FRESH and self._complete.get(path) == known:
                found[path] = known
                continue
            signature = _signature(path, status)
            if signature is None:
                continue
            if known and known.signature == signature:
                found[path] = known
            else:
                found[path] = ScriptCheckpoint(path, signature[2] / 1e9, signature, now)
        self._seen = found
        self._directories.watch(str(Path(path).parent) for path in found)

    def _matches(self) -> dict[str, os.stat_result]:
        """Real paths, so that a `latest` link is the checkpoint that it names."""
        found = {}
        parents: dict[str, str] = {}
        for name in glob.glob(self.pattern, recursive=True):  # noqa: PTH207 - it may be absolute
            parent, base = os.path.split(name)
            if _is_unfinished(base):
                continue
            try:
                status = os.lstat(name)
                if stat.S_ISLNK(status.st_mode):
                    path = os.path.realpath(name, strict=True)
                    status = os.stat(path)  # noqa: PTH116 - called for every file again and again
                else:
                    if parent not in parents:
                        parents[parent] = os.path.realpath(parent)
                    path = f"{parents[parent]}/{base}"
            except OSError:
                continue
            found[path] = status
        return found


def _is_unfinished(name: str) -> bool:
    base = name.lower()
    return base.startswith((".", "tmp")) or base.endswith(_UNFINISHED)


def _signature(path: str, status: os.stat_result) -> tuple[int, ...] | None:
    """Inode, size and newest change, for a directory of all that is in it; None if still empty."""
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
