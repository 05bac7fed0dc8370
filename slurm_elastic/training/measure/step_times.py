"""Durations of steps, of their parts and of the start, and peak memory."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from slurm_elastic.core.report import LEAST_STEPS

#: The first steps of an attempt allocate, connect and import; they are not measured.
WARM_UP = 2
#: The parts of the first `CLOSELY` steps are measured, then those of every `EVERY`th step, after
#: `SOON` steps those of every `SELDOM`th: it costs another pass over the gradients.
CLOSELY = 8
EVERY = 20
SOON = 200
SELDOM = 50
#: A step takes at least this part of its time to compute.
_LEAST_COMPUTE = 0.01

#: A point in time: seconds of the clock, or an event on a GPU's stream.
Stamp: TypeAlias = Any

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepDurations:
    """Medians over the steps since the last report that had any, in seconds.

    Those of the parts are over the steps whose parts were measured; None: there were none.

    Attributes:
        step_s: a whole step, accumulation and data loading included.
        steps: number of steps of that median.
        micro_step_s: one micro-batch without gradient synchronisation: its forward and backward
            pass where a step has several, else the step less the time spent in the all-reduce.
            In stages the step less the reduction that follows the last pass.
        data_s: waiting for the loader, by the clock, over all steps.
        forward_s: forward passes of all micro-batches, losses and copies to the device included.
        backward_s: their backward passes.
        sync_s: the all-reduce, waiting for slower ranks included; 0 for a single rank. In stages
            also sending to the neighbours and waiting for them.
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
    """Durations of the parts of one step; seconds as in `StepDurations`.

    Attributes:
        micro_batches: their number.
        reduce_s: of a pipeline: from the last pass here to the end of the reduction of gradients
            on all ranks; None: each rank has the whole model.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    sync_s: float = 0.0
    optimizer_s: float | None = None
    micro_batches: int = 1
    reduce_s: float | None = None


class StepTimer:
    """Durations of whole steps, from the end of one to the end of the next, and of some's parts.

    They include the data loader and the script's own code, but no saves.

    Attributes:
        on: whether parts are measured at all; equal on all ranks.
        exchange: name of the schedule by which gradients are exchanged, or "".
        exposed: the part of the exchange that lengthens a step; None: not known.
        exchange_s: seconds of the exchange alone; None: not measured.
    """

    def __init__(self) -> None:
        self.on = True
        self.exchange = ""
        self.exposed: float | None = None
        self.exchange_s: float | None = None
        self._last: float | None = None
        self._steps_done = 0
        self._forget()

    @property
    def sampled(self) -> bool:
        """Whether the parts of the next step are to be measured; the same on all ranks."""
        measurable = self._steps_done - WARM_UP
        if measurable < 0 or not self.on:
            return False
        return measurable < CLOSELY or measurable % (EVERY if measurable <= SOON else SELDOM) == 0

    def waiting(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the same batches, and measure how long each is waited for."""
        iterator = iter(batches)
        while True:
            begun = time.monotonic()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            if self._steps_done >= WARM_UP:
                self._data.append(time.monotonic() - begun)
            yield batch

    def parts(self, parts: StepParts) -> None:
        """Add the parts of a measured step."""
        self._parts.append(parts)

    def pause(self) -> None:
        """Do not measure the next step, which includes other work such as a save."""
        self._last = None

    def restart(self) -> None:
        """Discard the steps that are not reported yet, as later ones will take another time."""
        self._last = None
        self._forget()

    def begin_again(self) -> None:
        """Measure as from the begin of an attempt, so that all ranks measure the same steps."""
        self.restart()
        self._steps_done = 0

    def end(self) -> None:
        """Record the end of a step."""
        now = time.monotonic()
        self._steps_done += 1
        if self._last is not None and self._steps_done > WARM_UP:
            self._times.append(now - self._last)
        self._last = now

    def take(self) -> StepDurations | None:
        """Return the durations of the steps since the last result.

        None: there are fewer than `LEAST_STEPS`, which count with the next ones. So steps that take
        longer than the time between two reports are measured, too.
        """
        if len(self._times) < LEAST_STEPS:
            return None
        step_s = statistics.median(self._times)
        full = [p for p in self._parts if p.micro_batches]
        result = StepDurations(
            step_s,
            len(self._times),
            _micro_step_s(full, step_s),
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
    """Time by phase, on a CPU by the clock, on a GPU by events, without synchronisation.

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
        """Count the time from now on to this phase."""
        self._names.append(name)
        self._stamps.append(stamp(gpu=self._gpu))

    @property
    def ready(self) -> bool:
        """Whether the times can be read without waiting: a GPU has reached the last phase."""
        return not self._gpu or not self._stamps or bool(self._stamps[-1].query())

    def totals(self) -> dict[str, float]:
        """Return seconds by phase, up to the begin of the last one; waits for a GPU."""
        if self._gpu and self._stamps:
            self._stamps[-1].synchronize()
        seconds = dict.fromkeys(self._names, 0.0)
        for i, name in enumerate(self._names[:-1]):
            seconds[name] += between(self._stamps[i], self._stamps[i + 1])
        return seconds


def stamp(*, gpu: bool) -> Stamp:
    """Return the present time, of the clock or of the present stream."""
    if not gpu:
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begin: Stamp, end: Stamp) -> float:
    """Return the seconds from one stamp to the other; events must have passed."""
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1e3


def process_age() -> float:
    """Return the seconds since this process was started, interpreter and imports included."""
    # The second field may contain spaces, but ends with the line's last parenthesis.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def _micro_step_s(parts: list[StepParts], step_s: float) -> float | None:
    reduce_s = _median(p.reduce_s for p in parts)
    if reduce_s is not None:
        return max(_LEAST_COMPUTE * step_s, step_s - reduce_s)
    if several := [p for p in parts if p.micro_batches > 1]:
        of_each = statistics.median((p.forward_s + p.backward_s) / p.micro_batches for p in several)
        # All of them together are no longer than the step.
        return min(of_each, step_s / statistics.median(p.micro_batches for p in several))
    if parts:
        sync_s = statistics.median(p.sync_s for p in parts)
        return max(_LEAST_COMPUTE * step_s, step_s - sync_s)
    return None


def _median(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None
