"""How long steps take, and how long the start took."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

#: The first steps of an attempt allocate, connect and import; they say nothing about the rest.
WARM_UP = 2


class StepTimer:
    """Times whole steps, from the end of one to the end of the next.

    So it covers the data loader and the script's own code, but no saves.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._seen = 0
        self._times: list[float] = []

    def pause(self) -> None:
        """Something else than steps took time: the step after it is not measured."""
        self._last = None

    def end(self) -> None:
        """A step is done."""
        now = time.monotonic()
        self._seen += 1
        if self._last is not None and self._seen > WARM_UP:
            self._times.append(now - self._last)
        self._last = now

    def take(self) -> tuple[float, int] | None:
        """Median and number of the steps since the last call, if there were any."""
        if not self._times:
            return None
        result = statistics.median(self._times), len(self._times)
        self._times = []
        return result


def process_age() -> float:
    """Seconds since this process was started: interpreter and imports included."""
    # The second field may hold spaces, but ends with the line's last parenthesis.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
