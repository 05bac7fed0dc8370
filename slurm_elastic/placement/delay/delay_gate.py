"""Delay gate: with `[placement] mode = "delay"` a job waits a limited time for a near place.

After Dally's delay timers (arXiv 2401.16492), for elastic jobs under any policy; our definition. A
place is *near* when it is on as few nodes, in as few racks, as its GPUs take. Another one is
accepted at once when the job loses no more than `tolerance` of its speed there by its own model
(configured curve, corrected by measurements), so that jobs that do not suffer never wait. Else
more nodes, or more racks, are accepted after the time that placement/delay/wait_timers.py gives. A
refused place falls back to the policy's next alternative, at last to what the job has. Shrinks,
and moves at the same size, do not pass the gate.

Nothing is reserved for wide jobs that wait here: a job whose wait is over takes any place, so the
gate delays no start for longer than its limit. Whether there are GPUs enough is up to the policy,
which decides anew each round and may take them from other jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slurm_elastic.config.placement_settings import PlacementSettings
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.best_fit import even_splits
from slurm_elastic.placement.delay.wait_timers import NODE, RACK, WaitTimers
from slurm_elastic.placement.eligibility import RoundJob
from slurm_elastic.placement.node_arrays import NodeArrays


@dataclass(frozen=True, slots=True)
class RefusedPlace:
    """Place that a job refused.

    Attributes:
        tier: `node` or `rack`: the job waits for fewer of these.
        since: when its wait began (epoch s).
        gpus: of the place.
        until: when it accepts such a place (epoch s); inf: never.
    """

    tier: str
    since: float
    gpus: int
    until: float


@dataclass(slots=True)
class DelayGate:
    """Timers at the time of one round, and the refusals made with them.

    Attributes:
        state: of the last round (wait_timers.py).
    """

    placement: PlacementSettings
    frame: NodeArrays
    state: Mapping[str, Any] = field(default_factory=dict)
    _timers: WaitTimers = field(init=False)
    _refused: dict[int, RefusedPlace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._timers = WaitTimers(self.placement, self.frame.snapshot.time, self.state)

    @property
    def open(self) -> bool:
        """Whether every place is accepted."""
        return self.placement.mode != "delay"

    def refusal(self, round_job: RoundJob, target: Allocation) -> Reason | None:
        """Return why a job waits instead of taking this place, or None."""
        current = round_job.current
        grows = current is None or (
            target.gpus > current.gpus or target.gpu_type != current.gpu_type
        )
        if self.open or not grows:
            return None
        nodes, racks = self.frame.topology.spread(target.nodes)
        fewest, least = self.nearest(round_job, target)
        if nodes <= fewest and racks <= least:
            return None
        kind, gpus = target.gpu_type, target.gpus
        best = round_job.model.speed(kind, gpus, fewest, least)
        part = round_job.speed(self.frame, target) / best if best > 0 else 1.0
        part = max(part, 1 / (1 + round_job.most_gain(self.frame, target)))
        tier, key = RACK if racks > least else NODE, round_job.job.key
        limit = self._timers.limit_s(tier, gpus, key)
        since = self._since(round_job)
        waited = max(0.0, self.frame.snapshot.time - since)
        if 1 - part <= self._timers.accepted_loss(waited, limit):
            return None
        until = since + self._timers.accepts_at_s(1 - part, limit)
        first = self._refused.get(round_job.job.job_id)
        if first is None:
            self._refused[round_job.job.job_id] = RefusedPlace(tier, since, gpus, until)
        elif until < first.until:
            self._refused[round_job.job.job_id] = RefusedPlace(first.tier, since, first.gpus, until)
        # Numbers of this place, which stay the same, and not of the timers, which change.
        return Reason(
            "place-too-far",
            unit="rack" if racks > least else "node",
            spread=racks if racks > least else nodes,
            nearest=least if racks > least else fewest,
            speed=part,
            waited_s=waited,
            limit_s=until - since,
        )

    def nearest(self, round_job: RoundJob, target: Allocation) -> tuple[int, int]:
        """Return the fewest (nodes, racks) that this number of GPUs takes on this cluster."""
        kind, gpus = target.gpu_type, target.gpus
        most = self.frame.per_node.get(kind, 1)
        unit = round_job.directive.unit_for(kind)
        fewest = next((n for n, _ in even_splits(gpus, most, unit)), len(target.nodes))
        mask = self.frame.of_type(kind) & self.frame.allowed(round_job.job, planned=True)
        largest = int(np.bincount(self.frame.rack[mask]).max()) if mask.any() else 1
        return fewest, -(-fewest // max(1, largest))

    def wake(self, waiting: Iterable[int]) -> float | None:
        """Return when the first waiting job accepts what it refused (epoch s); None: none does."""
        now = self.frame.snapshot.time
        ahead = [self._refused[j].until for j in waiting if j in self._refused]
        return min((at for at in ahead if now < at < np.inf), default=None)

    def next_state(
        self, targets: Iterable[tuple[RoundJob, Allocation | None]]
    ) -> Mapping[str, Any]:
        """Return the state for the next round.

        Args:
            targets: all elastic jobs, each with its target.
        """
        if self.open:
            return {}
        waiting: dict[str, Mapping[str, Any]] = {}
        ended = []
        for round_job, target in targets:
            key, wait = round_job.job.key, self._timers.waiting.get(round_job.job.key)
            refused = self._refused.get(round_job.job.job_id)
            unchanged = target == round_job.current
            if unchanged and refused is not None:
                waiting[key] = {
                    "tier": refused.tier,
                    "since": refused.since,
                    "gpus": refused.gpus,
                    "seen": self.frame.snapshot.time,
                }
            elif unchanged and wait is not None and self._timers.lasts(wait):
                waiting[key] = wait
            elif not unchanged and wait is not None and target is not None:
                seconds = self.frame.snapshot.time - wait["since"]
                tier = self._awaited_tier(round_job, target, wait["tier"])
                if tier:
                    ended.append((tier, key, int(wait["gpus"]), seconds))
        return self._timers.next_state(ended, waiting)

    def _awaited_tier(self, round_job: RoundJob, target: Allocation, tier: str) -> str:
        """Return the tier that a wait counts for: the awaited one; as published, the one found."""
        if self._timers.ages:
            return tier
        nodes, racks = self.frame.topology.spread(target.nodes)
        fewest, least = self.nearest(round_job, target)
        if racks > least:
            return ""
        return NODE if nodes <= fewest else RACK

    def _since(self, round_job: RoundJob) -> float:
        """Return when the job began to wait (epoch s)."""
        job, record = round_job.job, round_job.record
        if round_job.current is None:
            began = job.submit_time
        elif record.last_change is not None:
            began = record.last_change
        else:
            began = job.start_time or 0.0
        running = round_job.current is not None
        return self._timers.since(job.key, began=began, running=running)
