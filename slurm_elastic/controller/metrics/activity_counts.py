"""Counts of the activities of selasticd since its start, for metrics.

The counts begin at 0 with the process and only rise. A transition is counted when it ends, also
one that an earlier process has begun.

>>> counts = ActivityCounts()
>>> counts.round_done(0.2, cpu_s=0.1)
>>> counts.values(metrics.ROUND_CPU)
{(): 0.1}
>>> counts.histograms(metrics.ROUND_SECONDS)[()].total
1
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from slurm_elastic.controller.metrics import metric_definitions as metrics
from slurm_elastic.controller.metrics.metric_definitions import MetricDefinition
from slurm_elastic.controller.state.transition import Transition
from slurm_elastic.rpc.protocol import CODES
from slurm_elastic.rpc.requests import OPERATIONS

_Labels = tuple[str, ...]


class HistogramCounts(NamedTuple):
    """Observed values of one histogram: how many are in each bucket and above, and their sum."""

    counts: tuple[int, ...]
    sum: float

    @property
    def total(self) -> int:
        """Number of values."""
        return sum(self.counts)


class ActivityCounts:
    """Counters and histograms of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, Counter[_Labels]] = {}
        self._histograms: dict[str, dict[_Labels, HistogramCounts]] = {}
        for definition in metrics.COUNTED:
            if definition.kind == "counter":
                initial = definition.initial or ((),)
                self._counters[definition.name] = Counter(dict.fromkeys(initial, 0))
            else:
                empty = HistogramCounts((0,) * (len(definition.buckets) + 1), 0.0)
                self._histograms[definition.name] = dict.fromkeys(definition.initial, empty)

    def values(self, definition: MetricDefinition) -> Mapping[_Labels, float]:
        """Return the values of a counter by the values of its labels."""
        with self._lock:
            return dict(self._counters[definition.name])

    def histograms(self, definition: MetricDefinition) -> Mapping[_Labels, HistogramCounts]:
        """Return the values of a histogram by the values of its labels."""
        with self._lock:
            return dict(self._histograms[definition.name])

    def _add(self, definition: MetricDefinition, *labels: str, amount: float = 1) -> None:
        with self._lock:
            # Counter is typed for integers only.
            self._counters[definition.name][labels] += amount  # type: ignore[assignment]

    def _observe(self, definition: MetricDefinition, *labels: str, value: float) -> None:
        with self._lock:
            counts, total = self._histograms[definition.name][labels]
            place = bisect.bisect_left(definition.buckets, value)
            raised = (*counts[:place], counts[place] + 1, *counts[place + 1 :])
            self._histograms[definition.name][labels] = HistogramCounts(raised, total + value)

    # --- events ---

    def transition_ended(self, transition: Transition) -> None:
        """Count a transition that is not live any more, and its parts that are known then."""
        outcome = transition.state.value.lower()
        self._add(metrics.TRANSITIONS, transition.action.value, outcome, transition.kind.value)
        at = transition.entered
        if "NOTIFY" in at and "saved" in at:
            # A save shorter than a report takes is seen only when it has ended.
            saving = at.get("saving", at["saved"])
            self._phase("notice", saving - at["NOTIFY"])
            self._phase("save", at["saved"] - saving)
        self._phase("slurm", transition.seconds()["slurm"])

    def training_again(self, transition: Transition) -> None:
        """Count the parts of a transition that end with the first step after it."""
        seconds = transition.seconds()
        self._phase("start", seconds["startup"])
        self._phase("restore", seconds["restore"])
        self._phase("total", seconds["total"])

    def _phase(self, phase: str, seconds: float | None) -> None:
        if seconds is not None:
            self._observe(metrics.TRANSITION_SECONDS, phase, value=max(0.0, seconds))

    def change_failed(self) -> None:
        """Count an attempt that failed on trial."""
        self._add(metrics.CHANGES_FAILED)

    def job_held(self) -> None:
        """Count a hold of the crash-loop guard."""
        self._add(metrics.HOLDS)

    def steps_lost(self, steps: int, *, by_change: bool) -> None:
        """Count steps that a job computes again."""
        self._add(metrics.LOST_STEPS, "change" if by_change else "other", amount=steps)

    def speed_changed(self, *, promised: float, delivered: float) -> None:
        """Count a change with its speeds, each over the speed before."""
        self._observe(metrics.SPEEDUP, "promised", value=promised)
        self._observe(metrics.SPEEDUP, "delivered", value=delivered)

    def request(self, operation: object, reply: Mapping[str, Any]) -> None:
        """Count a request.

        Args:
            operation: as it arrived; hostile.
            reply: the answer; a refusal has a code.
        """
        known = isinstance(operation, str) and operation in OPERATIONS
        name = str(operation) if known else metrics.OTHER_OPERATION
        result = metrics.ANSWERED
        if "error" in reply and "code" in reply:
            code = str(reply["code"])
            result = code if code in (*CODES, metrics.UNAUTHENTICATED) else "internal"
        self._add(metrics.REQUESTS, name, result)

    def round_done(self, seconds: float, *, cpu_s: float) -> None:
        """Count a round."""
        self._observe(metrics.ROUND_SECONDS, value=seconds)
        self._add(metrics.ROUND_CPU, amount=cpu_s)
