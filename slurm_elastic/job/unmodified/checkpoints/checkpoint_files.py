"""Copies and links of the files of a checkpoint."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from slurm_elastic.core.errors import SlurmElasticError

#: Errors of a full file system or quota.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_CHUNK = 16 * 1024 * 1024
_FICLONE = 0x40049409
_MAX_FILES = 20_000

#: (inode, bytes, change in ns) of each file by its path below the checkpoint, "" for itself.
Contents = dict[str, list[int]]


class CopyStoppedError(SlurmElasticError):
    """A copy was given up, as it is not needed any more."""


def contents(path: str) -> Contents:
    """Return inode, size and newest change of all files of a checkpoint; {} if it is missing."""
    listed: Contents = {}
    for file in files_of(Path(path)):
        with contextlib.suppress(OSError):
            status = file.lstat()
            name = "" if file == Path(path) else str(file.relative_to(path))
            listed[name] = [status.st_ino, status.st_size, status.st_mtime_ns]
    return listed


def shares_blocks(files: Sequence[Path], directory: Path) -> bool:
    """Return whether the file system can copy these files without using room."""
    trial = directory / "trial"
    try:
        with files[0].open("rb") as source, trial.open("wb") as copy:
            return _cloned(source.fileno(), copy.fileno())
    except (OSError, IndexError):
        return False
    finally:
        delete(trial)


def _cloned(source: int, copy: int) -> bool:
    import fcntl  # noqa: PLC0415 - not needed for the start of the ranks

    try:
        fcntl.ioctl(copy, _FICLONE, source)
    except OSError:
        return False
    return True


def place(
    path: Path, copy: Path, *, link: bool, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Copy or link a file, a symbolic link, or a directory with its contents."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_dir() or path.is_symlink():
        _place_file(path, copy, link=link, stopped=stopped)
        return
    copy.mkdir()
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        place(path / name, copy / name, link=link, stopped=stopped)
    _copy_times(path, copy)


def _place_file(path: Path, copy: Path, *, link: bool, stopped: Callable[[], bool]) -> None:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        copy.symlink_to(path.readlink())
    elif stat.S_ISREG(mode):
        if link:
            try:
                copy.hardlink_to(path)
            except FileNotFoundError:
                raise
            except OSError:  # a file system without hard links
                link = False
        if not link:
            copy_file(path, copy, stopped)


def copy_file(path: Path, copy: Path, stopped: Callable[[], bool] = lambda: False) -> None:
    """Copy a file with its times; the copy is on disk when this returns."""
    with path.open("rb") as source, copy.open("xb") as target:
        if not _cloned(source.fileno(), target.fileno()):
            while _copy_chunk(source.fileno(), target.fileno()):
                if stopped():
                    raise CopyStoppedError
        os.fsync(target.fileno())
    _copy_times(path, copy)


def _copy_times(path: Path, copy: Path) -> None:
    status = path.stat()
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.chmod(stat.S_IMODE(status.st_mode) | stat.S_IRUSR | stat.S_IWUSR)


def _copy_chunk(source: int, target: int) -> int:
    """Copy at most `_CHUNK` bytes at the present positions; return how many."""
    try:
        count = os.copy_file_range(source, target, _CHUNK)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        count = 0
    if count:
        return count
    data = os.read(source, _CHUNK)  # the end, or a file system without copy_file_range
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(target, rest) :]
    return len(data)


def sync(directory: Path) -> None:
    """Write the entries of a directory, and of those below it, to disk."""
    for top in (str(directory.parent), *(row[0] for row in os.walk(directory))):
        handle = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):  # some file systems cannot sync directories
                os.fsync(handle)
        finally:
            os.close(handle)


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint: itself, or all below it."""
    if path.is_symlink() or not path.is_dir():
        return [path] if exists(path) else []
    listed: list[Path] = []
    for top, _, names in os.walk(path):
        listed += [Path(top, name) for name in names]
        if len(listed) > _MAX_FILES:
            break
    return listed


def exists(path: Path) -> bool:
    """Return whether there is a file, a directory or a symbolic link of this name."""
    return path.is_symlink() or path.exists()


def delete(path: Path) -> None:
    """Delete a file or a directory with its contents, if there is one."""
    if path.is_dir() and not path.is_symlink():
        import shutil  # noqa: PLC0415 - not needed for the start of the ranks

        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
