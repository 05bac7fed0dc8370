"""Detection of a script's checkpoints, and of those that are complete.

A checkpoint is a file, or a directory with its contents, that matches a glob pattern; names of
unfinished files do not count. `save_tracker` decides when the save that writes it is over, from
what it shows (`checkpoint_formats`, or the script's own marker) and from the times of its changes.
"""

from __future__ import annotations

import glob
import math
import os
import stat
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from slurm_elastic.job.complete_marker import CompleteMarker
from slurm_elastic.job.unmodified.checkpoints.checkpoint_formats import (
    Evidence,
    FileVersion,
    directory_evidence,
    is_backup,
    is_followed,
    is_temporary,
)
from slurm_elastic.job.unmodified.checkpoints.directory_changes import (
    Files,
    change_kind,
    directory_files,
    file_version,
)
from slurm_elastic.job.unmodified.checkpoints.inotify import DirectoryWatch
from slurm_elastic.job.unmodified.checkpoints.learned_saves import SaveFiles
from slurm_elastic.job.unmodified.checkpoints.save_tracker import (
    ChangeKind,
    SaveTracker,
    without_numbers,
)
from slurm_elastic.job.unmodified.checkpoints.settle_time import SettleTime
from slurm_elastic.job.unmodified.checkpoints.whole_files import is_whole

#: Directories with more files are not judged before a start: the ranks wait for that.
_MAX_JUDGED = 500
#: Newest directories, which are examined again at each scan.
_NEWEST = 4
#: A script never writes the last file of a known format if so many saves in a row were over
#: without it (our choice: as many as show the files of saves with counting names).
_LACKING_SAVES = 3


class ScriptCheckpoint(NamedTuple):
    """One version of a checkpoint.

    Attributes:
        path: real path.
        written: time of the last change, by the file system.
        signature: equal as long as nothing changes.
        changed_at: time of the scan that first found this version, by the scanner's clock.
        save: number of the save that wrote it, rises; 0 if it existed before.
    """

    path: str
    written: float
    signature: tuple[int, ...]
    changed_at: float
    save: int = 0


@dataclass
class _Tracked:
    """State of one checkpoint; the files of a single one have the name "".

    Attributes:
        base: the files of its last complete version, when something of it is written anew.
        whole: result of `is_whole` for versions of files.
        version: the last complete one.
        lacks: it counted as over without the last file of its format.
    """

    path: str
    is_directory: bool
    inode: int
    files: Files
    changed_at: float
    is_complete: bool = False
    is_renamed: bool = False
    base: Files = field(default_factory=dict)
    whole: dict[str, tuple[FileVersion, bool | None]] = field(default_factory=dict)
    version: ScriptCheckpoint | None = None
    lacks: bool = False

    def changed(self) -> Files:
        """Return the files that its present save has written."""
        return {n: v for n, v in self.files.items() if self.base.get(n) != v}

    def names(self) -> Counter[str]:
        """Return the names of these files without their numbers."""
        return Counter(map(without_numbers, self.changed()))

    def checkpoint(self, save: int = 0) -> ScriptCheckpoint:
        newest = max((version.changed_ns for version in self.files.values()), default=0)
        size = sum(version.size for version in self.files.values())
        signature = (self.inode, size, newest, len(self.files))
        return ScriptCheckpoint(self.path, newest / 1e9, signature, self.changed_at, save)


class _UsualFiles(NamedTuple):
    """Names, without their numbers, of the files of earlier directories."""

    always: Counter[str]
    ever: Counter[str]


class CheckpointScanner:
    """Scanner of the checkpoints that match a pattern.

    Args:
        pattern: a glob pattern, may contain `**`; relative to the current directory.
        settle: the script's settle time, which it learns.
        marker: shows that a checkpoint is complete; None: the script writes none.
        ranks: of the script; None: unknown.
        clock: monotonic seconds.

    Attributes:
        before_read: called with the path of a checkpoint before its contents are read.
    """

    def __init__(
        self,
        pattern: str,
        *,
        settle: SettleTime | None = None,
        marker: CompleteMarker | None = None,
        ranks: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pattern = pattern
        self.before_read: Callable[[str], None] = lambda _: None
        self._marker = marker
        self.ranks = ranks
        self._clock = clock
        self._tracker = SaveTracker(settle or SettleTime(), trusts_evidence=marker is not None)
        self._seen: dict[str, _Tracked] = {}
        self._usual: dict[str, _UsualFiles] = {}
        #: Name of directories without its numbers → saves in a row that lacked the last file.
        self._lacking: Counter[str] = Counter()
        self._directory_watch = DirectoryWatch()

    def accept_existing(self, known: SaveFiles | None = None) -> None:
        """Take all existing checkpoints as complete that are not shown to be cut off.

        To be called while no rank runs.

        Args:
            known: files of each save, from an earlier attempt with as many ranks; None: not known.
        """
        self._tracker.begin_attempt(known)
        self._usual.clear()
        self._lacking.clear()
        for slot, rows in known.contents.items() if known else ():
            names = Counter(dict(rows))
            self._usual[slot] = _UsualFiles(names, names)
        for slot in known.lacking if known else ():
            self._lacking[slot] = _LACKING_SAVES
        self._refresh(records=False)
        newest = sorted(self._seen.values(), key=_newest_ns, reverse=True)
        for rank, tracked in enumerate(newest):
            is_judged = rank < _NEWEST and len(tracked.files) <= _MAX_JUDGED
            tracked.is_complete = not is_judged or self._evidence(tracked.path) > Evidence.CUT
            tracked.version = tracked.checkpoint()

    def scan(self) -> list[ScriptCheckpoint]:
        """Scan; return the versions that have become complete since the last scan, oldest first.

        Those of one save are returned together, when it is over.
        """
        now = self._clock()
        renamed = self._directory_watch.renamed()
        self._refresh()
        for path in renamed & self._seen.keys():
            self._seen[path].is_renamed = True
        fresh = []
        for save in self._tracker.finished(now, self._evidence):
            for path in save.paths:
                tracked = self._seen[path]
                self._learn_files(tracked, lacks=save.lacks)
                if save.lacks:
                    continue
                tracked.is_complete = True
                tracked.version = tracked.checkpoint(save.number)
                fresh.append(tracked.version)
        return sorted(fresh, key=lambda checkpoint: (checkpoint.save, checkpoint.written))

    def wait(self, seconds: float) -> None:
        """Wait at most this long for an event in the checkpoints' directories on this host."""
        self._directory_watch.wait(seconds)

    def wake(self) -> None:
        """End another thread's `wait`."""
        self._directory_watch.wake()

    def close(self) -> None:
        """Stop watching the directories."""
        self._directory_watch.close()

    @property
    def is_confirmed(self) -> bool:
        """Whether the newest save is shown to be over by this attempt itself."""
        return self._tracker.is_confirmed(self._clock())

    @property
    def known_files(self) -> SaveFiles | None:
        """The files of each save, if all saves of the attempt were of the same; else None."""
        known = self._tracker.known
        if known is None:
            return None
        contents = {
            slot: tuple(sorted(usual.ever.items()))
            for slot, usual in self._usual.items()
            if usual.always == usual.ever
        }
        lacking = [slot for slot in contents if self._lacking[slot] >= _LACKING_SAVES]
        return replace(known, contents=contents, lacking=tuple(lacking))

    @property
    def is_contradicted(self) -> bool:
        """Whether saves of the attempt differed, or one went on after its last byte."""
        return self._tracker.is_contradicted

    @property
    def begun(self) -> int:
        """Number of the newest save that has begun, as `ScriptCheckpoint.save`."""
        return self._tracker.begun

    @property
    def has_found_any(self) -> bool:
        """Whether there is a checkpoint, complete or not."""
        return bool(self._seen)

    @property
    def unsettled(self) -> bool:
        """Whether at the last scan a save was under way, or not yet shown to be over."""
        return self._tracker.under_way

    @property
    def changed_at(self) -> float:
        """Time of the scan that found the last change, by the scanner's clock."""
        return max((t.changed_at for t in self._seen.values()), default=-math.inf)

    @property
    def complete(self) -> list[ScriptCheckpoint]:
        """All complete checkpoints, newest first."""
        versions = [t.version for t in self._seen.values() if t.is_complete and t.version]
        return sorted(versions, key=lambda c: c.written, reverse=True)

    def _refresh(self, *, records: bool = True) -> None:
        """Look at all checkpoints, and record what has changed."""
        now = self._clock()
        matches = sorted(
            self._matches().items(), key=lambda item: item[1].st_mtime_ns, reverse=True
        )
        current: dict[str, _Tracked] = {}
        changes: list[tuple[_Tracked, ChangeKind]] = []
        removed: list[str] = []
        for rank, (path, status) in enumerate(matches):
            earlier = self._seen.get(path)
            is_directory = stat.S_ISDIR(status.st_mode)
            if earlier and earlier.is_complete and is_directory and rank >= _NEWEST:
                current[path] = earlier
                continue
            files = directory_files(path) if is_directory else {"": file_version(status)}
            if earlier is None or earlier.is_directory != is_directory:
                earlier = _Tracked(path, is_directory, status.st_ino, files, now)
                changes.append((earlier, ChangeKind.NEW))
            else:
                kind = change_kind(earlier.files, files)
                if kind is not None:
                    changes.append((earlier, kind))
                    if earlier.lacks:  # it was not over
                        earlier.lacks = False
                        self._lacking[without_numbers(path)] = 0
                    if kind is ChangeKind.REWRITTEN and earlier.is_complete:
                        earlier.base = earlier.files
                    earlier.changed_at, earlier.is_renamed = now, False
                    earlier.is_complete = False
                elif earlier.files.keys() - files.keys():  # it is being deleted
                    earlier.is_complete = False
                    removed.append(path)
                earlier.inode, earlier.files = status.st_ino, files
            current[path] = earlier
        removed += self._seen.keys() - current.keys()
        self._seen = current
        self._directory_watch.watch(str(Path(path).parent) for path in current)
        if not records:
            return
        for tracked, kind in sorted(changes, key=lambda change: _newest_ns(change[0])):
            self._tracker.change(tracked.path, kind, now, is_directory=tracked.is_directory)
        # After the changes: the next save may have begun when the last one was deleted.
        for path in removed:
            self._tracker.remove(path)

    def _matches(self) -> dict[str, os.stat_result]:
        """Return real paths, so that a link such as `latest` counts as its target."""
        matches = {}
        parents: dict[str, str] = {}
        for name in glob.glob(self.pattern, recursive=True):  # noqa: PTH207 - it may be absolute
            parent, base = os.path.split(name)
            if is_temporary(base) or (self._marker and self._marker.matches(name)):
                continue
            if is_backup(base) and not is_backup(self.pattern):
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

    def _evidence(self, path: str) -> Evidence:
        tracked = self._seen[path]
        shown = self._shown(tracked)
        if self._marker is not None:
            return (
                Evidence.WHOLE if shown > Evidence.CUT and self._marked(tracked) else Evidence.CUT
            )
        if tracked.is_renamed and shown > Evidence.CUT:
            return Evidence.WHOLE
        return shown

    def _shown(self, tracked: _Tracked) -> Evidence:
        """Return the evidence in the contents that were written since the last complete save."""
        if not any(version.size for version in tracked.files.values()):
            was_filled = any(version.size for version in tracked.base.values())
            return Evidence.CUT if was_filled else Evidence.EMPTY
        if not tracked.is_directory:
            whole = self._is_whole(tracked, "")
            return {True: Evidence.WHOLE, False: Evidence.CUT, None: Evidence.UNKNOWN}[whole]
        evidence = self._by_format(tracked)
        slot = without_numbers(tracked.path)
        usual = self._usual.get(slot)
        if usual is None or evidence not in (Evidence.LACKING, Evidence.UNKNOWN):
            return evidence
        if evidence is Evidence.LACKING:
            is_usual = tracked.names() == usual.ever == usual.always
            if not is_usual or self._lacking[slot] < _LACKING_SAVES:
                return evidence
        return self._compared(tracked, usual)

    def _by_format(self, tracked: _Tracked) -> Evidence:
        return directory_evidence(
            tracked.path,
            tracked.changed() or tracked.files,
            lambda name: self._is_whole(tracked, name),
            ranks=self.ranks,
        )

    def _compared(self, tracked: _Tracked, usual: _UsualFiles) -> Evidence:
        """Return the evidence in a directory of unknown format, compared with earlier ones."""
        names = tracked.names()
        if not usual.always <= names:
            return Evidence.LACKING
        if names != usual.ever or names != usual.always:
            return Evidence.UNKNOWN
        files = tracked.changed()

        def whole(name: str) -> bool | None:
            return self._is_whole(tracked, name)

        is_over = all(whole(name) or is_followed(name, files, whole) for name in files)
        return Evidence.WHOLE if is_over else Evidence.UNKNOWN

    def _learn_files(self, tracked: _Tracked, *, lacks: bool) -> None:
        """Remember the names of the files of a directory that is over.

        Args:
            tracked: the directory.
            lacks: it is not complete: the last file of its format is missing, and the next save
                has begun.
        """
        slot, names = without_numbers(tracked.path), tracked.names()
        usual = self._usual.get(slot)
        if lacks:
            if usual is not None and names != usual.ever:
                return  # an incomplete save does not change the usual names
            tracked.lacks = True
            self._lacking[slot] += 1
        elif tracked.is_directory and self._by_format(tracked) is Evidence.LACKING:
            # No file was written for long, so this is the usual form of its saves.
            self._lacking[slot] = _LACKING_SAVES
        else:
            self._lacking[slot] = 0
        self._usual[slot] = (
            _UsualFiles(names, names)
            if usual is None
            else _UsualFiles(usual.always & names, usual.ever | names)
        )

    def _is_whole(self, tracked: _Tracked, name: str) -> bool | None:
        version = tracked.files[name]
        known = tracked.whole.get(name)
        if known is None or known[0] != version:
            self.before_read(tracked.path)
            whole = is_whole(f"{tracked.path}/{name}" if name else tracked.path)
            known = tracked.whole[name] = (version, whole)
        return known[1]

    def _marked(self, tracked: _Tracked) -> bool:
        """Return whether a marker is not older than the rest of the checkpoint."""
        assert self._marker is not None
        written_ns = self._marker.written_ns(tracked.path, is_directory=tracked.is_directory)
        if written_ns is None:
            return False
        marker = self._marker
        rest = [
            v.changed_ns for n, v in tracked.files.items() if not marker.matches(n or tracked.path)
        ]
        return written_ns >= max(rest, default=0)


def _newest_ns(tracked: _Tracked) -> int:
    return max((version.changed_ns for version in tracked.files.values()), default=0)
