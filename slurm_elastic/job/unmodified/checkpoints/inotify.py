"""Detection of reads, writes and renames of files by the kernel's inotify.

It reports what processes of this host do, on any file system, and nothing of other hosts; rank 0
runs on esrun's host.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import select
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from slurm_elastic.job.environment.regular_file import regular_file

_IN_ACCESS, _IN_MODIFY, _IN_CLOSE_WRITE, _IN_CLOSE_NOWRITE = 0x1, 0x2, 0x8, 0x10
_IN_OPEN, _IN_MOVED_TO, _IN_CREATE = 0x20, 0x80, 0x100
_IN_Q_OVERFLOW, _IN_IGNORED, _IN_ISDIR = 0x4000, 0x8000, 0x40000000
_EVENT = struct.Struct("iIII")
_MAX_WATCHES = 256
#: Bytes at the beginning of a file by which JSON is recognised.
_HEAD = 64


class _Inotify:
    """One inotify instance; `_paths` has the path of each watch.

    Attributes:
        remedy: against the last refusal of the kernel; "" without one.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._paths: dict[int, str] = {}
        self.remedy = "" if self._fd >= 0 else _remedy(ctypes.get_errno(), opening=True)

    def _add(self, file: str, mask: int, path: str) -> None:
        if self._fd >= 0 and len(self._paths) < _MAX_WATCHES:
            number = int(self._libc.inotify_add_watch(self._fd, os.fsencode(file), mask))
            if number >= 0:
                self._paths[number] = path
            else:
                self.remedy = _remedy(ctypes.get_errno(), opening=False)

    def _events(self, timeout: float = 0.0) -> Iterator[tuple[str, int, str]]:
        """Yield the events so far: path of the watch, mask, name within it."""
        if self._fd < 0 or not select.select([self._fd], [], [], timeout)[0]:
            return
        while True:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return
            offset = 0
            while offset < len(data):
                number, mask, _, length = _EVENT.unpack_from(data, offset)
                offset += _EVENT.size
                name = os.fsdecode(data[offset : offset + length].rstrip(b"\0"))
                offset += length
                if number in self._paths and not mask & (_IN_Q_OVERFLOW | _IN_IGNORED):
                    yield self._paths[number], mask, name

    def close(self) -> None:
        """Stop watching."""
        # Taken first: a second thread that closes it could close another file of this number.
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()  # a user has few instances (fs.inotify.max_user_instances)


class ReadWatch(_Inotify):
    """Watch for reads of files.

    Args:
        paths: files, or directories with all files below them but descriptions in JSON.

    Attributes:
        is_active: False where the kernel gives no watch; then nothing is ever seen.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        super().__init__()
        self._opened: set[str] = set()
        self._read: set[str] = set()
        self._ignored: set[str] = set()
        mask = _IN_ACCESS | _IN_MODIFY | _IN_CLOSE_NOWRITE | _IN_OPEN
        files = [(file, path) for path in paths for file in _files(path)]
        for file, path in files:  # no watch sees how `_files` looks at them
            self._add(file, mask, path)
        self.is_active = bool(self._paths)

    def paths_read(self, timeout: float = 0.0) -> set[str]:
        """Return those of `paths` that have been read; wait at most this long for an event.

        A file counts as read if it was read from, or opened and not changed (mapped into memory);
        not if it was opened to be overwritten.
        """
        for path, mask, _ in self._events(timeout):
            if mask & _IN_ISDIR or path in self._ignored:
                continue
            if mask & (_IN_ACCESS | _IN_CLOSE_NOWRITE):
                self._read.add(path)
            elif mask & _IN_MODIFY:
                self._opened.discard(path)
            else:
                self._opened.add(path)
        return self._read | self._opened

    def ignore(self, path: str) -> None:
        """Ignore what happens to a path from now on: it has changed, and esrun itself reads it."""
        self.paths_read()
        self._opened.discard(path)  # to be written, as it has changed
        self._ignored.add(path)


class DirectoryWatch(_Inotify):
    """Watch for files that are created, closed after writing, or renamed into directories."""

    def __init__(self) -> None:
        self._wake_event = -1
        super().__init__()
        self._renamed: set[str] = set()
        self._wake_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def watch(self, directories: Iterable[str]) -> None:
        """Watch these directories too."""
        for directory in set(directories) - set(self._paths.values()):
            self._add(directory, _IN_CREATE | _IN_CLOSE_WRITE | _IN_MOVED_TO, directory)

    def wait(self, timeout: float) -> None:
        """Wait for an event, for `wake`, or for the timeout."""
        sources = [fd for fd in (self._fd, self._wake_event) if fd >= 0]
        select.select(sources, [], [], timeout)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_event)
        self._take()

    def wake(self) -> None:
        """End another thread's `wait`."""
        os.eventfd_write(self._wake_event, 1)

    def renamed(self) -> set[str]:
        """Return the paths that were renamed into place since the last call."""
        self._take()
        renamed, self._renamed = self._renamed, set()
        return renamed

    def close(self) -> None:
        """Stop watching."""
        super().close()
        descriptor, self._wake_event = self._wake_event, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _take(self) -> None:
        for directory, mask, name in self._events():
            path = f"{directory}/{name}"
            if mask & _IN_MOVED_TO:
                self._renamed.add(path)
            else:  # written to since then
                self._renamed.discard(path)


def _files(path: str) -> list[str]:
    """Return the files of a checkpoint whose reading shows that it is loaded.

    Some libraries read descriptions (JSON) of all checkpoints whenever they start, as Orbax does.
    They count only where a directory has no other files.
    """
    if not Path(path).is_dir():
        return [path]
    files = [str(Path(top, name)) for top, _, names in os.walk(path) for name in names]
    states = (file for file in files if not _is_json(file))
    return list(itertools.islice(states, _MAX_WATCHES)) or files


def _is_json(file: str) -> bool:
    try:
        with regular_file(file) as descriptor:
            head = os.pread(descriptor, _HEAD, 0)
    except OSError:
        return False
    # The length at the beginning of a safetensors file may look like a brace, but has zeros.
    return head.startswith((b"{", b"[")) and b"\0" not in head


def _remedy(error: int, *, opening: bool) -> str:
    """Return the remedy for an error of the kernel (inotify(7), "/proc interfaces")."""
    if opening and error == errno.EMFILE:
        return "raise fs.inotify.max_user_instances on this node, or the limit of open files"
    if not opening and error == errno.ENOSPC:
        return "raise fs.inotify.max_user_watches on this node"
    return f"inotify says: {os.strerror(error)}"
