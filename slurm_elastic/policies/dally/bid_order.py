"""Orders of the policy `dally`: ours by default, or the published one with its timers.

*Ours* (docs/dally.md): least GPU time left first; a place at most 2 % worse than the best is taken
at once, a worse one never; after waiting T a gang is due, and nodes are kept for it. *Published*
(arXiv 2401.16492): lowest network sensitivity first; anything within a node, more only
after the timers. Places are best-fit in both, since Slurm wants even shares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slurm_elastic.config.policy_settings import DallySettings
from slurm_elastic.config.section_reader import ConfigError
from slurm_elastic.placement.delay.free_map import GangTier, NodeLayout
from slurm_elastic.placement.delay.timers import Timers, TimersError
from slurm_elastic.policies.dally.gang import Gang

#: A place may be this much worse than the best one, as a part.
TOLERANCE = 0.02
#: The timer of our order, in leases: least and most; shorter waits do not count.
LEAST, MOST = 3.0, 96.0
_NO_WAIT = 1.0


@dataclass(frozen=True, slots=True)
class Start:
    """A gang that began to run at `at_s` on a place of a tier, after `waited_s`."""

    at_s: float
    gpus: int
    tier: GangTier
    waited_s: float


class Order(Protocol):
    """Order of gangs, and the places that they accept.

    Attributes:
        name: what the order is by, a word of the reasons.
        reserves: whether nodes are kept for gangs that are due.
    """

    name: str
    reserves: bool

    def rank(self, gang: Gang) -> tuple[float, ...]:
        """Return the sort key of a gang, lowest first."""
        ...

    def begin(
        self,
        now_s: float,
        *,
        waiting: Iterable[Gang],
        waits: Mapping[str, Any],
        starts: Iterable[Start],
    ) -> None:
        """Set the timers of a round from waiting gangs, past waits, and new starts."""
        ...

    def farthest(self, gpus: int, sites: NodeLayout, waited_s: float) -> GangTier:
        """Return the highest tier that a gang accepts at a size after a wait."""
        ...

    def accepts(self, part: float, best: float) -> bool:
        """Return whether a gang takes a place where it computes `part` of its time, of `best`."""
        ...

    def limit_s(self, gpus: int, tier: GangTier) -> float:
        """Return the seconds for which a gang waits for a place nearer than this tier."""
        ...

    @property
    def waits(self) -> Mapping[str, Any]:
        """State of the timers, JSON-serialisable."""
        ...


def order_of(settings: DallySettings) -> Order:
    """Return the order that a configuration names.

    Raises:
        config.ConfigError: its timers are invalid.
    """
    if settings.timers == "own":
        return OwnOrder(settings)
    try:
        timers = Timers.parse(settings.timers, lease_s=settings.lease_s)
    except TimersError as error:
        raise ConfigError(f"[dally] {error}; or own") from None
    return PublishedOrder(timers, settings.history)


class OwnOrder:
    """See the module."""

    name = "remaining-time"
    reserves = True

    def __init__(self, settings: DallySettings) -> None:
        self._lease_s = settings.lease_s
        self._history_s = settings.history * settings.lease_s
        self._limit_s = 0.0
        self._ended: list[list[float]] = []

    def rank(self, gang: Gang) -> tuple[float, ...]:
        """Rank by GPU time left."""
        return gang.left_s * gang.gpus, gang.since_s, gang.job_id

    def begin(
        self,
        now_s: float,
        *,
        waiting: Iterable[Gang],
        waits: Mapping[str, Any],
        starts: Iterable[Start],
    ) -> None:
        """Tune the timer."""
        oldest = now_s - self._history_s
        self._ended = [list(w) for w in waits.get("ended", ()) if w[0] >= oldest]
        for start in starts:
            self._started(start)
        leases = [w[1] for w in self._ended]
        lasting = ((now_s - g.since_s) / self._lease_s for g in waiting)
        leases += [w for w in lasting if w >= _NO_WAIT]
        self._limit_s = tuned_s(leases, lease_s=self._lease_s, most=MOST)

    def farthest(self, gpus: int, sites: NodeLayout, waited_s: float) -> GangTier:  # noqa: ARG002
        """Return the highest tier: only the loss at a place counts."""
        return GangTier.NETWORK

    def accepts(self, part: float, best: float) -> bool:
        """Return whether the place is nearly the best."""
        return part >= (1 - TOLERANCE) * best

    def limit_s(self, gpus: int, tier: GangTier) -> float:  # noqa: ARG002
        """Return the seconds of waiting after which a gang is due."""
        return self._limit_s

    def _started(self, start: Start) -> None:
        """Remember a wait of a lease or more."""
        leases = start.waited_s / self._lease_s
        if leases >= _NO_WAIT:
            self._ended.append([start.at_s, leases])

    @property
    def waits(self) -> Mapping[str, Any]:
        """Ended waits: [time, leases]."""
        return {"ended": self._ended}


class PublishedOrder:
    """See the module."""

    name = "network-sensitivity"
    reserves = False

    def __init__(self, timers: Timers, history: float) -> None:
        self._timers = Timers(
            mode=timers.mode,
            lease_s=timers.lease_s,
            node=timers.node,
            rack=timers.rack,
            history=history,
            published_pruning=False,
        )
        self._waits: Mapping[str, Any] = {}

    def rank(self, gang: Gang) -> tuple[float, ...]:
        """Rank by network sensitivity."""
        return gang.network_sensitivity, gang.since_s, gang.job_id

    def begin(
        self,
        now_s: float,  # noqa: ARG002
        *,
        waiting: Iterable[Gang],  # noqa: ARG002
        waits: Mapping[str, Any],
        starts: Iterable[Start],
    ) -> None:
        """Take over the waits of the state."""
        self._waits = {k: v for k, v in waits.items() if k in ("node", "rack")}
        for start in starts:
            self._started(start)

    def farthest(self, gpus: int, sites: NodeLayout, waited_s: float) -> GangTier:
        """Return the tier that the timers allow; no gang waits for an impossible place."""
        node_s, rack_s = self._timers.limits_s(gpus, self._waits)
        if waited_s >= rack_s or gpus > sites.per_rack:
            return GangTier.NETWORK
        if waited_s >= node_s or gpus > sites.per_node:
            return GangTier.RACK
        return GangTier.NODE

    def accepts(self, part: float, best: float) -> bool:  # noqa: ARG002
        """Return True: tiers decide."""
        return True

    def limit_s(self, gpus: int, tier: GangTier) -> float:
        """Return the timer of a tier."""
        node_s, rack_s = self._timers.limits_s(gpus, self._waits)
        return rack_s if tier is GangTier.NETWORK else node_s

    def _started(self, start: Start) -> None:
        """Remember a wait for the tuner."""
        if start.tier is not GangTier.NETWORK:
            name = "rack" if start.tier is GangTier.RACK else "node"
            self._waits = self._timers.remember(
                self._waits, name, start.gpus, now_s=start.at_s, waited_s=start.waited_s
            )

    @property
    def waits(self) -> Mapping[str, Any]:
        """Waits by tier and size."""
        return self._waits


def tuned_s(leases: Sequence[float], *, lease_s: float, most: float) -> float:
    """Return the timer in seconds for waits of so many leases: min(most, max(3, mean + 2 std)).

    Source: our definition (docs/dally.md).
    """
    if not leases:
        return min(most, LEAST) * lease_s
    mean = sum(leases) / len(leases)
    std = math.sqrt(sum((w - mean) ** 2 for w in leases) / len(leases))
    return min(most, max(LEAST, mean + 2 * std)) * lease_s
