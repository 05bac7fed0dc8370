"""Sees files being read, written and renamed into place, through the kernel's inotify.

It sees what processes of this host do, whatever the file system, and not what
other hosts do: enough here, as rank 0 runs on esrun's host.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_IN_ACCESS, _IN_MODIFY, _IN_CLOSE_WRITE, _IN_CLOSE_NOWRITE = 0x1, 0x2, 0x8, 0x10
_IN_OPEN, _IN_MOVED_TO, _IN_CREATE = 0x20, 0x80, 0x100
_IN_Q_OVERFLOW, _IN_IGNORED, _IN_ISDIR = 0x4000, 0x8000, 0x40000000
_EVENT = struct.Struct("iIII")
_MAX_WATCHES = 256


class _Inotify:
    """One inotify instance; `_paths` names what each watch is for."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._paths: dict[int, str] = {}

    def _add(self, file: str, mask: int, path: str) -> None:
        # A watch that the kernel refuses (fs.inotify.max_user_watches) is one less.
        if self._fd >= 0 and len(self._paths) < _MAX_WATCHES:
            number = int(self._libc.inotify_add_watch(self._fd, os.fsencode(file), mask))
            if number >= 0:
                self._paths[number] = path

    def _events(self, timeout: float = 0.0) -> Iterator[tuple[str, int, str]]:
        """What has happened: path of the watch, mask, name within it."""
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
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ReadWatch(_Inotify):
    """Watches whether files are read.

    Args:
        paths: files, or directories whose files all count.

    Attributes:
        works: False where the kernel gives no watch; then nothing is ever seen.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        super().__init__()
        self._opened: set[str] = set()
        self._read: set[str] = set()
        mask = _IN_ACCESS | _IN_MODIFY | _IN_CLOSE_NOWRITE | _IN_OPEN
        for path in paths:
            for file in _files(path):
                self._add(file, mask, path)
        self.works = bool(self._paths)

    def seen(self, timeout: float = 0.0) -> set[str]:
        """Which of `paths` have been read so far; waits at most so long for news.

        A file counts that was read from, or opened and left unchanged (mapped into memory). One
        that is opened to be overwritten does not.
        """
        for path, mask, _ in self._events(timeout):
            if mask & _IN_ISDIR:
                continue
            if mask & (_IN_ACCESS | _IN_CLOSE_NOWRITE):
                self._read.add(path)
            elif mask & _IN_MODIFY:
                self._opened.discard(path)
            else:
                self._opened.add(path)
        return self._read | self._opened


class DirectoryWatch(_Inotify):
    """Watches directories for what is made or ended in them, and for what is renamed into them."""

    def __init__(self) -> None:
        super().__init__()
        self._renamed: set[str] = set()
        self._poked = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def watch(self, directories: Iterable[str]) -> None:
        """Watch these, too."""
        for directory in set(directories) - set(self._paths.values()):
            self._add(directory, _IN_CREATE | _IN_CLOSE_WRITE | _IN_MOVED_TO, directory)

    def wait(self, timeout: float) -> None:
        """Return when something has happened, when poked, or after the timeout."""
        sources = [fd for fd in (self._fd, self._poked) if fd >= 0]
        select.select(sources, [], [], timeout)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._poked)
        self._take()

    def poke(self) -> None:
        """End another thread's `wait`."""
        os.eventfd_write(self._poked, 1)

    def renamed(self) -> set[str]:
        """What was renamed into place since the last call."""
        self._take()
        renamed, self._renamed = self._renamed, set()
        return renamed

    def close(self) -> None:
        """Stop watching."""
        super().close()
        os.close(self._poked)

    def _take(self) -> None:
        for directory, mask, name in self._events():
            if mask & _IN_MOVED_TO:
                self._renamed.add(f"{directory}/{name}")


def _files(path: str) -> list[str]:
    if not Path(path).is_dir():
        return [path]
    return [str(Path(top, name)) for top, _, names in os.walk(path) for name in names]
