"""CPUs that the ranks on this node keep busy, from procfs.

Standard library only. Processes that have ended between two looks are not counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

#: Shorter times between two looks are too coarse: the kernel counts in hundredths of a second.
_LEAST_S = 8.0


class ProcessorUse:
    """Measurement from one call to the next.

    Args:
        processes: returns the ids of the ranks' processes on this node.
        gpus: returns how many GPUs they have.
        clock: monotonic seconds.
        proc: where the kernel shows processes.
    """

    def __init__(
        self,
        processes: Callable[[], Iterable[int]],
        gpus: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
        proc: Path = Path("/proc"),
    ) -> None:
        self._processes, self._gpus = processes, gpus
        self._clock, self._proc = clock, proc
        self._last: tuple[float, dict[int, float]] | None = None

    def busy_cpus(self) -> float | None:
        """Return the busy CPUs for each GPU since the last look; None: there is nothing new."""
        now = self._clock()
        if self._last is not None and now - self._last[0] < _LEAST_S:
            return None
        used = {pid: s for pid in self._processes() if (s := self._used_s(pid)) is not None}
        last, self._last = self._last, (now, used)
        gpus = self._gpus()
        if last is None or not gpus or last[1].keys().isdisjoint(used):
            return None  # a first look, or the program has started anew
        busy_s = sum(max(0.0, s - last[1].get(pid, 0.0)) for pid, s in used.items())
        return busy_s / (now - last[0]) / gpus

    def _used_s(self, pid: int) -> float | None:
        """Return the CPU seconds of a process; None: it has ended, or is another user's."""
        try:
            text = (self._proc / str(pid) / "stat").read_text("utf-8", "replace")
            fields = text.rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, IndexError, ValueError):
            return None
