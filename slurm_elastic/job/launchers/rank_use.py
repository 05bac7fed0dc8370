"""CPUs that the ranks on this node keep busy, and their use of storage and memory.

Standard library only. Processes that have ended between two looks are not counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from slurm_elastic.job.launchers.memory_traffic import MemoryTraffic

#: Reports may follow each other in less, which is too coarse: the kernel counts in 10 ms.
_LEAST_S = 8.0


class RankUse(NamedTuple):
    """Use for each GPU since the last look; None: there is nothing new.

    Attributes:
        busy_cpus: CPUs.
        read_bytes_s: bytes a second from storage, not from the page cache.
        memory_bytes_s: bytes a second between memory and the last cache.
    """

    busy_cpus: float | None = None
    read_bytes_s: float | None = None
    memory_bytes_s: float | None = None


class RankUseMeter:
    """Measurement from one call to the next.

    Args:
        processes: returns the ids of the ranks' processes on this node.
        gpus: returns how many GPUs they have.
        clock: monotonic seconds.
        proc: where the kernel shows processes.
        traffic: counter of the bytes between memory and cache.
        least_s: seconds from one look to the next; calls before are none.
    """

    def __init__(
        self,
        processes: Callable[[], Iterable[int]],
        gpus: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
        proc: Path = Path("/proc"),
        traffic: MemoryTraffic | None = None,
        least_s: float = _LEAST_S,
    ) -> None:
        self._processes, self._gpus = processes, gpus
        self._clock, self._proc = clock, proc
        self._traffic, self._least_s = traffic or MemoryTraffic(proc=proc), least_s
        #: Time of the last look, and each counter by process.
        self._last: tuple[float, list[dict[int, float]]] | None = None

    def measure(self) -> RankUse:
        """Return the use since the last call."""
        now = self._clock()
        if self._last is not None and now - self._last[0] < self._least_s:
            return RankUse()
        pids = list(self._processes())
        counts = [self._counts(count, pids) for count in (_cpu_s, _read_bytes)]
        counts.append(self._traffic.counts(pids))
        last, self._last = self._last, (now, counts)
        gpus = self._gpus()
        if last is None or not gpus:
            return RankUse()
        growths = map(_growth, last[1], counts)
        return RankUse(*(None if g is None else g / (now - last[0]) / gpus for g in growths))

    def _counts(self, count: Callable[[Path], float], pids: Iterable[int]) -> dict[int, float]:
        """Return a counter of the processes that live and are not another user's."""
        counts = {}
        for pid in pids:
            try:
                counts[pid] = count(self._proc / str(pid))
            except (OSError, IndexError, KeyError, ValueError):
                continue
        return counts


def _growth(before: Mapping[int, float], after: Mapping[int, float]) -> float | None:
    """Return the growth of a counter; None: the program has started anew."""
    if before.keys().isdisjoint(after):
        return None
    return sum(max(0.0, n - before.get(pid, 0.0)) for pid, n in after.items())


def _cpu_s(process: Path) -> float:
    """Return the CPU seconds of the process with this folder in procfs."""
    text = (process / "stat").read_text("utf-8", "replace")
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _read_bytes(process: Path) -> float:
    """Return the bytes that the process with this folder in procfs has read from storage."""
    lines = (process / "io").read_text("utf-8", "replace").splitlines()
    return float(int(dict(line.split(": ", 1) for line in lines)["read_bytes"]))
