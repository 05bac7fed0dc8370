"""A second version of a checkpoint's files, from which they can be put back.

Files are copied: by the file system where it can share blocks (`FICLONE`), else by the kernel.
Hard links are made only on request, as they keep nothing of a file that is overwritten in place.
Copies lie outside the script's own directories wherever possible: a script may list them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.job.environment.state_directory import STATE_NAME, claim, is_own
from slurm_elastic.job.unmodified.checkpoints.checkpoint_files import (
    NO_ROOM,
    Contents,
    CopyStoppedError,
    contents,
    copy_file,
    delete,
    exists,
    files_of,
    place,
    shares_blocks,
    sync,
)

#: Must be free after a copy, beside room for one more save of the same size (our choice).
LEAST_FREE_BYTES = 64 * 1024 * 1024
#: Subdirectories of the kept files: from before the restart, and files that these replaced.
BEFORE, AFTER = "before-rehearsal", "after-rehearsal"


class KeepError(SlurmElasticError):
    """A checkpoint cannot be kept.

    Attributes:
        problem: `no-room`, `not-writable`, `no-watch` (reads cannot be detected), `node-local` (in
            a temporary directory of the node), or `changes`: it changed while it was copied.
        directory: concerned.
        needed_bytes: to be freed there, if it is known.
        remedy: for `no-watch`.
    """

    def __init__(
        self, problem: str, directory: str = "", needed_bytes: int = 0, *, remedy: str = ""
    ) -> None:
        super().__init__(f"{problem} {directory}")
        self.problem, self.directory, self.needed_bytes = problem, directory, needed_bytes
        self.remedy = remedy


@dataclass(kw_only=True)
class KeptCheckpoint:
    """A kept save.

    Attributes:
        directory: contains `BEFORE` and, if something was replaced, `AFTER`.
        files: original → kept path, of each file or directory of the save.
        contents: of the originals when they were kept.
        linked: whether the kept files are hard links of the originals.
        size: bytes.
        at_start: contents of the originals when the restarted attempt began; {}: it has not.
        pattern: of the step's checkpoints; a batch script may run several steps.
        markers: originals that are markers beside checkpoints → those checkpoints.
    """

    directory: str
    files: dict[str, str]
    contents: dict[str, Contents]
    linked: bool = False
    size: int = 0
    at_start: dict[str, Contents] = field(default_factory=dict)
    pattern: str = ""
    markers: dict[str, list[str]] = field(default_factory=dict)

    @property
    def checkpoints(self) -> list[str]:
        """The originals without the markers beside them."""
        return [path for path in self.files if path not in self.markers]

    @property
    def place(self) -> str:
        """The directory with the kept files, for messages."""
        return str(Path(self.directory, BEFORE))

    @classmethod
    def of(cls, body: object) -> KeptCheckpoint | None:
        """Return it from its JSON object; None if it is none."""
        names = cls.__dataclass_fields__
        try:
            values = {k: v for k, v in dict(body).items() if k in names}  # type: ignore[call-overload]
            kept = cls(**values)
            valid = [str(k) == k and str(v) == v for k, v in kept.files.items()]
            shapes = [dict(kept.contents), dict(kept.at_start), dict(kept.markers)]
        except (TypeError, ValueError, AttributeError):
            return None
        return kept if all(valid) and kept.files and shapes and kept.directory else None

    def present(self) -> dict[str, Contents]:
        """Return the contents of the originals now; {} of those that are missing."""
        return {path: contents(path) for path in self.files}

    def intact(self) -> bool:
        """Return whether all originals are as they were when they were kept."""
        return _same(self.present(), self.contents)

    def unchanged_since_start(self) -> bool:
        """Return whether no original has changed since `at_start` was set."""
        return _same(self.present(), self.at_start)


def keep(
    paths: Sequence[str],
    *,
    run_id: str,
    directories: Sequence[str],
    markers: Mapping[str, list[str]] | None = None,
    link: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> KeptCheckpoint:
    """Keep the files of one save; what was kept in the same place before is removed.

    Args:
        paths: complete files or directories.
        run_id: of the job.
        directories: for the state of the job; they are kept in the first that can be written and
            is on their file system.
        markers: files beside the checkpoints that show that these are complete → the checkpoints.
        link: make hard links, for checkpoints that are only ever replaced.
        stopped: asked between chunks; the copy is then given up.

    Raises:
        KeepError: nothing is kept.
    """
    markers = dict(markers or {})
    paths = [p for p in paths if not any(Path(other) in Path(p).parents for other in paths)]
    if not paths:
        raise KeepError("changes")
    directory = _directory_for(_base(paths), run_id, directories)
    paths += [path for path in markers if path not in paths]
    original = {path: contents(path) for path in paths}
    if not all(original.values()):
        raise KeepError("changes")
    base = _base(paths)
    size = sum(row[1] for files in original.values() for row in files.values())
    target = directory / BEFORE
    kept = KeptCheckpoint(
        directory=str(directory),
        files={path: str(target / Path(path).relative_to(base)) for path in paths},
        contents=original,
        linked=link,
        size=size,
        markers=markers,
    )
    try:
        delete(target)
        if not link and not shares_blocks(files_of(Path(paths[0])), directory):
            _check_room(directory, size)
        for path, copy in kept.files.items():
            place(Path(path), Path(copy), link=link and path not in markers, stopped=stopped)
        sync(target)
    except (FileNotFoundError, CopyStoppedError):
        remove(kept)
        raise KeepError("changes", str(directory)) from None
    except KeepError:
        remove(kept)
        raise
    except OSError as error:
        remove(kept)
        problem = "no-room" if error.errno in NO_ROOM else "not-writable"
        raise KeepError(problem, str(directory), size) from None
    if not kept.intact():
        remove(kept)
        raise KeepError("changes", str(directory))
    return kept


def put_back(kept: KeptCheckpoint, *, only_missing: bool = False) -> list[tuple[str, str]]:
    """Put back the originals that have changed or are gone; nothing is deleted.

    A file that is replaced is moved to `AFTER`. A marker follows the checkpoints that it belongs
    to: beside a later version of one it would show that this is complete. To be called while no
    rank runs; after an interruption it may be called again.

    Args:
        kept: the files.
        only_missing: leave originals alone that have changed.

    Returns:
        Original, and where its newer version is now ("" if it was gone), of each that was put back.

    Raises:
        OSError: a file could not be put back; the kept one is where it was.
        KeepError: the directory of the kept files belongs to another user.
    """
    _check_owner(kept)
    moved, left = [], set[str]()
    for name, copy in sorted(kept.files.items(), key=lambda item: item[0] in kept.markers):
        original, now = Path(name), contents(name)
        if now == kept.contents.get(name) or (now and _equal(now, contents(copy))):
            continue
        is_marker_left = not left.isdisjoint(kept.markers.get(name, ()))
        if is_marker_left or (only_missing and now) or not exists(Path(copy)):
            left.add(name)
            continue
        original.parent.mkdir(parents=True, exist_ok=True)
        staged = original.with_name(f".{original.name}.selastic")
        delete(staged)
        place(Path(copy), staged, link=name not in kept.markers)
        aside = None
        if exists(original):
            below = Path(copy).relative_to(kept.place)
            aside = _free_name(Path(kept.directory, AFTER, below))
            aside.parent.mkdir(parents=True, exist_ok=True)
            _move_aside(original, aside, keep_name=not staged.is_dir())
        staged.rename(original)
        moved.append((name, str(aside or "")))
    return moved


def unshare(kept: KeptCheckpoint) -> None:
    """Give kept files that are links of the originals an inode of their own.

    `put_back` makes links; a script that overwrites in place would change both.

    Raises:
        KeepError: there is no room; the links stay.
    """
    if kept.linked:
        return
    for original, copy in kept.files.items():
        theirs = contents(original)
        for name, row in contents(copy).items():
            if name not in theirs or theirs[name][0] != row[0]:
                continue
            shared = Path(copy, name) if name else Path(copy)
            fresh = shared.with_name(f"{shared.name}.selastic")
            try:
                _check_room(Path(kept.directory), row[1])
                copy_file(shared, fresh)
                fresh.replace(shared)
            except OSError:
                delete(fresh)
                raise KeepError("no-room", kept.directory, row[1]) from None


def remove(kept: KeptCheckpoint) -> None:
    """Remove the kept files; what `put_back` has moved to `AFTER` stays."""
    delete(Path(kept.place))
    folder = Path(kept.directory)
    with contextlib.suppress(OSError):
        for empty in (folder, *folder.parents[:2]):
            empty.rmdir()


def remove_below(directory: str) -> None:
    """Remove a copy that was begun in this directory and is not complete."""
    delete(Path(directory, BEFORE))
    delete(Path(directory, "trial"))


def room_missing(paths: Sequence[str], *, run_id: str, directories: Sequence[str]) -> int:
    """Return the bytes to free before a copy of these files fits; 0: it fits."""
    size = sum(row[1] for path in paths for row in contents(path).values())
    try:
        return _missing(_directory_for(_base(paths), run_id, directories), size)
    except (OSError, KeepError):
        return 0


def directory_of(paths: Sequence[str], *, run_id: str, directories: Sequence[str]) -> str:
    """Return the directory in which `keep` would keep these.

    Raises:
        KeepError: there is none.
    """
    return str(_directory_for(_base(paths), run_id, directories))


def _base(paths: Sequence[str]) -> Path:
    return Path(os.path.commonpath([Path(path).parent for path in paths]))


def _directory_for(base: Path, run_id: str, directories: Sequence[str]) -> Path:
    """Return a directory on the checkpoints' file system, created.

    In one of the job's directories, else beside the checkpoints' directory, else within it.
    """
    try:
        device = base.stat().st_dev
    except OSError:
        raise KeepError("changes", str(base)) from None
    for root in (*map(Path, directories), base.parent / STATE_NAME, base / STATE_NAME):
        try:
            if root.parent.stat().st_dev != device:
                continue
            folder = Path(root, "kept", run_id)
            for part in (root, folder.parent, folder):
                claim(str(part))
            if folder.stat().st_dev == device:
                return folder
        except OSError as error:
            if error.errno in NO_ROOM:
                raise KeepError("no-room", str(root.parent), LEAST_FREE_BYTES) from None
    raise KeepError("not-writable", str(base))


def _check_owner(kept: KeptCheckpoint) -> None:
    """Check that nobody else has put another directory in the place of the kept files.

    Raises:
        KeepError: it belongs to another user.
    """
    with contextlib.suppress(OSError):
        if not is_own(os.lstat(kept.place)):
            raise KeepError("not-writable", kept.place)


def _check_room(directory: Path, size: int) -> None:
    missing = _missing(directory, size)
    if missing > 0:
        raise KeepError("no-room", str(directory), missing)


def _missing(directory: Path, size: int) -> int:
    room = os.statvfs(directory)
    free = room.f_bavail * room.f_frsize
    return max(0, size + max(size, LEAST_FREE_BYTES) - free)


def _move_aside(original: Path, aside: Path, *, keep_name: bool) -> None:
    """Move a file or directory; a file's name exists at every moment, if `keep_name`."""
    if keep_name and original.is_file():
        try:
            aside.hardlink_to(original)
        except OSError:  # a file system without hard links
            original.rename(aside)
    else:
        original.rename(aside)


def _same(first: Mapping[str, Contents], second: Mapping[str, Contents]) -> bool:
    return {k: dict(v) for k, v in first.items()} == {k: dict(v) for k, v in second.items()}


def _equal(first: Contents, second: Contents) -> bool:
    """Return whether two checkpoints have files of the same names, sizes and times."""
    return {k: v[1:] for k, v in first.items()} == {k: v[1:] for k, v in second.items()}


def _free_name(path: Path) -> Path:
    number, free = 1, path
    while exists(free):
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def size_text(size: float) -> str:
    """Return bytes for a message.

    >>> size_text(1_530_000_000), size_text(400_000)
    ('1.5 GB', '0.4 MB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{max(size, 1e5) / 1e6:.1f} MB"
