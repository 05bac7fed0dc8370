"""Wait timers of jobs in rounds: configured, as published, or tuned.

`[placement] timers` selects one. Each gives two times: seconds of waiting after which a job
accepts more nodes than its GPUs take, and more racks.

- `fixed`: `wait_node_s` and `wait_rack_s`.
- `auto`, `nowait`, `full`, `12,24`: Dally's as published (placement/delay/timers.py), in leases of
  `lease_s`; `auto` is tuned by the waits that found a near place, by size.
- `own` (our definition): never less than the fixed ones, at most 12 and 24 leases, between them

      mean + 2 std of the waits

  for that tier in the job's class of demand (its GPUs rounded up to a power of two; of all
  classes while fewer than three are known of its own). Waits that ended within the last 24
  leases count, whatever ended them, and present ones of other jobs; the job's own does not, since
  its timer would grow with it.

A running job's wait begins when it first refuses a place; with `fixed`, and for a pending job,
when it was submitted or last changed.

*Ageing* (`own` only): the longer a job has waited, the greater the loss that it accepts. After
`waited` of `limit` seconds it accepts a place where it loses

    tolerance + (1 - tolerance) * waited / limit

of its speed, so that jobs that suffer most from distance wait longest, none beyond the limit.

State: `{"waits": {tier: {class: [[time_s, leases], …]}}, "waiting": {job key: {"tier", "since",
"gpus", "seen"}}}`; a job whose last refusal, `seen`, is a lease ago no longer waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from slurm_elastic.config.placement_settings import PlacementSettings
from slurm_elastic.placement.delay.timers import Timers

NODE, RACK = "node", "rack"
#: Upper bound of our own timers, and age up to which waits are remembered, in leases.
MOST = {NODE: 12.0, RACK: 24.0}
_HISTORY = 24.0
#: Waits that a class needs before its own mean counts.
_ENOUGH = 3
#: Shorter waits than this many leases are not remembered.
_NO_WAIT = 0.1

#: Statistics of waits: number, sum, sum of squares.
Sums = tuple[float, float, float]
_NOTHING: Sums = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class WaitTimers:
    """Timers at the beginning of a round; immutable.

    Attributes:
        settings: `[placement]`.
        now: time of the round (epoch s).
        state: what the last round returned, or {}.
    """

    settings: PlacementSettings
    now: float
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ages(self) -> bool:
        """Whether jobs accept a greater loss the longer they wait."""
        return self.settings.timers == "own"

    def since(self, key: str, *, began: float, running: bool) -> float:
        """Return when a job's wait began (epoch s).

        Args:
            key: the job's.
            began: when it was submitted or last changed.
            running: whether it holds GPUs.
        """
        if not running or self.settings.timers == "fixed":
            return began
        return max(began, float(self.waiting.get(key, {}).get("since", self.now)))

    @property
    def waiting(self) -> Mapping[str, Mapping[str, Any]]:
        """Jobs that waited for a near place when the last round ended, by key."""
        waiting: Mapping[str, Mapping[str, Any]] = self.state.get("waiting", {})
        return waiting

    def lasts(self, wait: Mapping[str, Any]) -> bool:
        """Return whether a wait goes on although nothing was refused in this round."""
        return bool(self.now - wait["seen"] <= self.settings.lease_s)

    def limit_s(self, tier: str, gpus: int, key: str) -> float:
        """Return the seconds after which a job of this size accepts more nodes or racks."""
        fixed = self.settings.wait_rack_s if tier == RACK else self.settings.wait_node_s
        if self.settings.timers == "fixed":
            return fixed
        if self.settings.timers == "own":
            return self._own_s(tier, gpus, key, fixed)
        node, rack = self._published.limits_s(gpus, self._waits)
        return rack if tier == RACK else node

    def accepted_loss(self, waited_s: float, limit_s: float) -> float:
        """Return the part of its speed that a job gives up in order not to wait any longer."""
        tolerance = self.settings.tolerance
        if waited_s >= limit_s:
            return 1.0
        return tolerance + (1 - tolerance) * waited_s / limit_s if self.ages else tolerance

    def accepts_at_s(self, loss: float, limit_s: float) -> float:
        """Return the seconds of waiting after which this loss, a part of its speed, is accepted."""
        if not self.ages:
            return limit_s
        tolerance = self.settings.tolerance
        return limit_s * max(0.0, loss - tolerance) / max(1e-9, 1 - tolerance)

    def next_state(
        self,
        ended: Sequence[tuple[str, str, int, float]],
        waiting: Mapping[str, Mapping[str, Any]],
    ) -> Mapping[str, Any]:
        """Return the state for the next round.

        Args:
            ended: (tier waited for, or found with `auto`; job key; GPUs; seconds) of each wait
                that this round has ended.
            waiting: the jobs that wait now, by key, as in the state.
        """
        waits = self._waits
        timers = self.settings.timers
        if timers == "auto":
            for tier, _, gpus, seconds in ended:
                waits = self._published.remember(
                    waits, tier, gpus, now_s=self.now, waited_s=seconds
                )
        elif timers == "own":
            waits = self._remembered(ended)
        return {"waits": waits, "waiting": {k: dict(waiting[k]) for k in sorted(waiting)}}

    @property
    def _waits(self) -> Mapping[str, Any]:
        waits: Mapping[str, Any] = self.state.get("waits", {})
        return waits

    @cached_property
    def _published(self) -> Timers:
        return Timers.parse(self.settings.timers, lease_s=self.settings.lease_s)

    def _own_s(self, tier: str, gpus: int, key: str, least_s: float) -> float:
        statistics, demand_class = self._statistics[tier], demand(gpus)
        sums = self._without(statistics.get(demand_class, _NOTHING), tier, demand_class, key)
        if sums[0] < _ENOUGH:
            sums = self._without(statistics.get("", _NOTHING), tier, "", key)
        tuned = estimate(*sums) * self.settings.lease_s
        return max(least_s, min(MOST[tier] * self.settings.lease_s, tuned))

    def _without(self, sums: Sums, tier: str, name: str, key: str) -> Sums:
        """Return the statistics less the job's own wait."""
        wait = self.waiting.get(key)
        if wait is None or wait["tier"] != tier or name not in ("", demand(wait["gpus"])):
            return sums
        leases = self._leases(wait)
        return _add(sums, -1, leases) if leases >= _NO_WAIT else sums

    def _leases(self, wait: Mapping[str, Any]) -> float:
        return float(self.now - wait["since"]) / self.settings.lease_s

    @cached_property
    def _statistics(self) -> Mapping[str, Mapping[str, Sums]]:
        """Return waits in leases by tier and class, and of all classes as ""."""
        statistics: dict[str, dict[str, Sums]] = {NODE: {}, RACK: {}}
        waits = [
            (tier, name, leases)
            for tier in statistics
            for name, entries in self._waits.get(tier, {}).items()
            for _, leases in self._recent(entries)
        ]
        ongoing = ((w["tier"], demand(w["gpus"]), self._leases(w)) for w in self.waiting.values())
        for tier, own, leases in (*waits, *(w for w in ongoing if w[2] >= _NO_WAIT)):
            for name in (own, ""):
                statistics[tier][name] = _add(statistics[tier].get(name, _NOTHING), 1, leases)
        return statistics

    def _recent(self, entries: Sequence[Sequence[float]]) -> Iterator[tuple[float, float]]:
        oldest = self.now - _HISTORY * self.settings.lease_s
        return ((at, leases) for at, leases in entries if at >= oldest)

    def _remembered(self, ended: Sequence[tuple[str, str, int, float]]) -> Mapping[str, Any]:
        waits = {
            tier: {name: [[*e] for e in self._recent(entries)] for name, entries in by_gpus.items()}
            for tier, by_gpus in self._waits.items()
        }
        for tier, _, gpus, seconds in ended:
            leases = seconds / self.settings.lease_s
            if leases >= _NO_WAIT:
                at = waits.setdefault(tier, {}).setdefault(demand(gpus), [])
                at.append([self.now, leases])
        return {tier: {n: e for n, e in by_gpus.items() if e} for tier, by_gpus in waits.items()}


def demand(gpus: int) -> str:
    """Return a job's class of demand: its GPUs, rounded up to a power of two.

    >>> [demand(g) for g in (1, 2, 3, 8, 9)]
    ['1', '2', '4', '8', '16']
    """
    return str(1 << max(0, gpus - 1).bit_length())


def estimate(count: float, total: float, squares: float) -> float:
    """Return the mean plus two standard deviations of waits, from their sums; 0 of none."""
    if count <= 0:
        return 0.0
    mean = total / count
    return mean + 2 * math.sqrt(max(0.0, squares / count - mean * mean))


def _add(sums: Sums, sign: int, leases: float) -> Sums:
    return sums[0] + sign, sums[1] + sign * leases, sums[2] + sign * leases * leases
