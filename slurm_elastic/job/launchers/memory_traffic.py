"""Bytes that processes move between memory and the last cache, from the processor's counters.

Each miss of the last cache counts as one of its lines: our definition, as the counters of memory
controllers are root's. What the processor writes back or fetches ahead is counted on few of them,
so that this is less than the whole traffic; only values of one kind of node are compared. The
kernel counts for a thread, and for all threads and processes that it starts later
(perf_event_open(2)). Standard library only.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Container, Iterable
from pathlib import Path

#: Type and number of an event: misses of the last cache, PERF_COUNT_HW_CACHE_MISSES.
CACHE_MISSES = (0, 3)
#: Number of the system call by machine.
_SYSTEM_CALLS = {"x86_64": 298, "aarch64": 241, "ppc64le": 319}
#: perf_event_attr: its size; the bits inherit, exclude_kernel and exclude_hv; the times in which
#: the event was wanted and in which the processor counted it, as it takes turns.
_SIZE, _BITS, _TIMES = 128, 1 << 1 | 1 << 5 | 1 << 6, 3
#: Close the file when another program is started.
_CLOEXEC = 8
#: Most threads that are counted by themselves, each with an open file.
_MOST = 256
_LINE_BYTES = 64


class MemoryTraffic:
    """Count of the bytes that some processes have moved, from the first call on.

    Processes are to be named as long as they live, with all below them.

    Args:
        event: type and number, as in perf_event_attr.
        line_bytes: bytes of one count.
        proc: where the kernel shows processes.
    """

    def __init__(
        self,
        *,
        event: tuple[int, int] = CACHE_MISSES,
        line_bytes: int | None = None,
        proc: Path = Path("/proc"),
    ) -> None:
        self._line_bytes, self._proc = line_bytes or _cache_line(), proc
        self._open_event = _opener(event)
        #: Open files of each process; empty where those of another process count it, too.
        self._files: dict[int, list[int]] = {}

    def counts(self, pids: Iterable[int]) -> dict[int, float]:
        """Return the bytes of processes so far; that of one may contain those below it.

        Empty where the processor or the kernel does not allow it: then for good.
        """
        alive = set(pids)
        for pid in self._files.keys() - alive:
            self._close(pid)
        known = set(self._files)
        try:
            for pid in alive - known:
                self._begin(pid, known)
            return {
                pid: self._line_bytes * sum(map(_count, files))
                for pid, files in self._files.items()
                if files
            }
        except OSError:
            for pid in list(self._files):
                self._close(pid)
            self._open_event = None
            return {}

    def _begin(self, pid: int, known: Container[int]) -> None:
        """Count the threads of a process, unless one that was counted before has started it.

        Raises:
            OSError: it cannot be counted.
        """
        if self._open_event is None:
            return
        try:
            threads = [int(thread.name) for thread in (self._proc / str(pid) / "task").iterdir()]
            stat = (self._proc / str(pid) / "stat").read_text("utf-8", "replace")
            parent = int(stat.rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # it has ended
            return
        files = self._files[pid] = []
        for thread in threads if parent not in known else ():
            if sum(map(len, self._files.values())) >= _MOST:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            try:
                files.append(self._open_event(thread))
            except ProcessLookupError:
                continue

    def _close(self, pid: int) -> None:
        for file in self._files.pop(pid, ()):
            os.close(file)


def _opener(event: tuple[int, int]) -> Callable[[int], int] | None:
    """Return a function that counts an event for a thread; None: not on this machine.

    The function returns an open file, and raises OSError.
    """
    number = _SYSTEM_CALLS.get(os.uname().machine)
    if number is None:
        return None
    kind, config = event
    attributes = struct.pack("=IIQ16xQQ", kind, _SIZE, config, _TIMES, _BITS).ljust(_SIZE, b"\0")

    def open_event(thread: int) -> int:
        import ctypes  # noqa: PLC0415 - esrun starts without it

        system_call = ctypes.CDLL(None, use_errno=True).syscall
        numbers = map(ctypes.c_long, (thread, -1, -1, _CLOEXEC))
        file: int = system_call(ctypes.c_long(number), attributes, *numbers)
        if file < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return file

    return open_event


def _count(file: int) -> float:
    """Return the events of an open file; where they were counted in turns, the whole estimated."""
    value, wanted, counted = struct.unpack("=QQQ", os.read(file, 24))
    return float(value * wanted / counted if counted else value)


def _cache_line() -> int:
    try:
        return os.sysconf("SC_LEVEL1_DCACHE_LINESIZE") or _LINE_BYTES
    except (OSError, ValueError):
        return _LINE_BYTES
