"""How long steps and their parts take, and how long the start took."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

#: The first steps of an attempt allocate, connect and import; they say nothing about the rest.
WARM_UP = 2
#: After so many steps that are looked into, only every `EVERY`th is: for that a GPU must stand
#: still between compute and synchronisation, and gradients are read once more.
CLOSELY = 8
EVERY = 20
#: A step takes at least this part of its time to compute.
_LEAST_COMPUTE = 0.01


@dataclass(frozen=True, slots=True)
class Times:
    """Medians over the steps since the last report.

    Attributes:
        step_s: a whole step, accumulation and data loading included.
        steps: behind that median.
        micro_step_s: one micro-batch without gradient synchronisation: its forward and backward
            pass where a step has several, else the step less the time spent in the all-reduce.
            None: no step was looked into.
    """

    step_s: float
    steps: int
    micro_step_s: float | None


class StepTimer:
    """Times whole steps, from the end of one to the end of the next, and the parts of a few.

    So it covers the data loader and the script's own code, but no saves.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._seen = 0
        self._times: list[float] = []
        self._micro: list[float] = []
        self._sync: list[float] = []

    @property
    def looks(self) -> bool:
        """Whether the step that is about to begin is to be looked into: the same on all ranks."""
        past = self._seen - WARM_UP
        return 0 <= past < CLOSELY or (past > 0 and past % EVERY == 0)

    def parts(self, *, compute_s: float, pieces: int, sync_s: float) -> None:
        """What the present step is made of.

        Args:
            compute_s: forward and backward passes of all its micro-batches.
            pieces: how many those are.
            sync_s: in the all-reduce, waiting for slower ranks included.
        """
        if pieces > 1:
            self._micro.append(compute_s / pieces)
        elif pieces:
            self._sync.append(sync_s)

    def pause(self) -> None:
        """Something else than steps took time: the step after it is not measured."""
        self._last = None

    def restart(self) -> None:
        """Steps will take another time from now on: forget those that have not been told."""
        self._last = None
        self._times, self._micro, self._sync = [], [], []

    def end(self) -> None:
        """A step is done."""
        now = time.monotonic()
        self._seen += 1
        if self._last is not None and self._seen > WARM_UP:
            self._times.append(now - self._last)
        self._last = now

    def take(self) -> Times | None:
        """What the steps since the last call took, if there were any."""
        if not self._times:
            return None
        step_s = statistics.median(self._times)
        result = Times(step_s, len(self._times), self._micro_step_s(step_s))
        self._times, self._micro, self._sync = [], [], []
        return result

    def _micro_step_s(self, step_s: float) -> float | None:
        if self._micro:
            return min(step_s, statistics.median(self._micro))
        if self._sync:
            return max(_LEAST_COMPUTE * step_s, step_s - statistics.median(self._sync))
        return None


def process_age() -> float:
    """Seconds since this process was started: interpreter and imports included."""
    # The second field may hold spaces, but ends with the line's last parenthesis.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
