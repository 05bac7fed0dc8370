"""How long steps and their parts take, how long the start took, and how much memory was needed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

#: The first steps of an attempt allocate, connect and import; they say nothing about the rest.
WARM_UP = 2
#: After so many steps that are looked into, only every `EVERY`th is, and after `SOON` steps every
#: `SELDOM`th: gradients are read once more for it, and each part of the step is timed.
CLOSELY = 8
EVERY = 20
SOON = 200
SELDOM = 50
#: A step takes at least this part of its time to compute.
_LEAST_COMPUTE = 0.01

#: A moment: seconds of the clock, or an event on a GPU's stream.
Stamp: TypeAlias = Any

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepDurations:
    """Medians over the steps since the last report, in seconds.

    Those of the parts are over the steps that were looked into; None: there were none.

    Attributes:
        step_s: a whole step, accumulation and data loading included.
        steps: behind that median.
        micro_step_s: one micro-batch without gradient synchronisation: its forward and backward
            pass where a step has several, else the step less the time spent in the all-reduce.
        data_s: waiting for the loader, by the clock, over all steps.
        forward_s: forward passes of all micro-batches, losses and the way to the device included.
        backward_s: their backward passes.
        sync_s: the all-reduce, waiting for slower ranks included; 0 for a rank alone. In stages
            also waiting for the neighbours, and what is sent to them.
        optimizer_s: clipping, the optimizer and the schedule of its learning rate.
    """

    step_s: float
    steps: int
    micro_step_s: float | None
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    sync_s: float | None = None
    optimizer_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What one step was made of; seconds as in `StepDurations`.

    Attributes:
        micro_batches: micro-batches.
        staged: passes were not those of a whole model on one rank, and tell no micro-step.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    sync_s: float = 0.0
    optimizer_s: float | None = None
    micro_batches: int = 1
    staged: bool = False


class StepTimer:
    """Times whole steps, from the end of one to the end of the next, and the parts of a few.

    So it covers the data loader and the script's own code, but no saves.

    Attributes:
        on: whether steps are looked into at all; equal on all ranks.
    """

    def __init__(self) -> None:
        self.on = True
        self._last: float | None = None
        self._seen = 0
        self._forget()

    @property
    def sampled(self) -> bool:
        """Whether the step that is about to begin is to be looked into: the same on all ranks."""
        past = self._seen - WARM_UP
        if past < 0 or not self.on:
            return False
        return past < CLOSELY or past % (EVERY if past <= SOON else SELDOM) == 0

    def waiting(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; takes the time that each is waited for."""
        iterator = iter(batches)
        while True:
            begun = time.monotonic()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            if self._seen >= WARM_UP:
                self._data.append(time.monotonic() - begun)
            yield batch

    def parts(self, parts: StepParts) -> None:
        """What a step was made of that was looked into."""
        self._parts.append(parts)

    def pause(self) -> None:
        """Something else than steps took time: the step after it is not measured."""
        self._last = None

    def restart(self) -> None:
        """Steps will take another time from now on: forget those that have not been told."""
        self._last = None
        self._forget()

    def end(self) -> None:
        """A step is done."""
        now = time.monotonic()
        self._seen += 1
        if self._last is not None and self._seen > WARM_UP:
            self._times.append(now - self._last)
        self._last = now

    def take(self) -> StepDurations | None:
        """What the steps since the last call took, if there were any."""
        if not self._times:
            return None
        step_s = statistics.median(self._times)
        full = [p for p in self._parts if p.micro_batches]
        result = StepDurations(
            step_s,
            len(self._times),
            _micro_step_s([p for p in full if not p.staged], step_s),
            data_s=_median(self._data),
            forward_s=_median(p.forward_s for p in full),
            backward_s=_median(p.backward_s for p in full),
            sync_s=_median(p.sync_s for p in self._parts),
            optimizer_s=_median(p.optimizer_s for p in self._parts),
        )
        self._forget()
        return result

    def _forget(self) -> None:
        self._times: list[float] = []
        self._data: list[float] = []
        self._parts: list[StepParts] = []


class Phases:
    """Time by phase, on a CPU by the clock, on a GPU by events, for which nothing stands still.

    >>> phases = Phases(torch.device("cpu"))
    >>> for name in ("forward", "backward", "forward", ""): phases.enter(name)
    >>> sorted(phases.totals())
    ['', 'backward', 'forward']
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._names: list[str] = []
        self._stamps: list[Stamp] = []

    def enter(self, name: str) -> None:
        """From now on time belongs to this phase."""
        self._names.append(name)
        self._stamps.append(stamp(gpu=self._gpu))

    @property
    def ready(self) -> bool:
        """Whether the times can be read at once: a GPU has come as far as the last phase."""
        return not self._gpu or not self._stamps or bool(self._stamps[-1].query())

    def totals(self) -> dict[str, float]:
        """Seconds by phase, up to the begin of the last one; waits for a GPU that is behind."""
        if self._gpu and self._stamps:
            self._stamps[-1].synchronize()
        found = dict.fromkeys(self._names, 0.0)
        for i, name in enumerate(self._names[:-1]):
            found[name] += between(self._stamps[i], self._stamps[i + 1])
        return found


def stamp(*, gpu: bool) -> Stamp:
    """Now, on the clock or on the present stream."""
    if not gpu:
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begin: Stamp, end: Stamp) -> float:
    """Seconds from one stamp to the other; events must have passed."""
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1e3


def process_age() -> float:
    """Seconds since this process was started: interpreter and imports included."""
    # The second field may hold spaces, but ends with the line's last parenthesis.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes this process has used so far; None if that cannot be told.

    On a GPU what tensors took of its memory, else the process's resident memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return None


def _micro_step_s(parts: list[StepParts], step_s: float) -> float | None:
    several = [(p.forward_s + p.backward_s) / p.micro_batches for p in parts if p.micro_batches > 1]
    if several:
        return min(step_s, statistics.median(several))
    if parts:
        sync_s = statistics.median(p.sync_s for p in parts)
        return max(_LEAST_COMPUTE * step_s, step_s - sync_s)
    return None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
