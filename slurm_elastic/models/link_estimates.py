"""Speeds of links, estimated from the stalls of jobs, where none are configured.

They are *effective* speeds: a stall also contains waiting for slower ranks, and whatever others
sent over the same links meanwhile; what computing hides is not in it.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from slurm_elastic.core.plan import JobRecord, Measurement
from slurm_elastic.models.links import (
    LEAST_PART,
    TIERS,
    Links,
    known_tiers,
    ring_bytes,
    stalls,
    tier_of,
)

#: Reports of a stall that are needed before it counts.
LEAST_REPORTS = 3
#: Tiers whose measured speed counts in decisions: inside a node a stall is mostly waiting for
#: slower ranks, which grows and shrinks with computing; there it only takes its part away from
#: what farther tiers are measured at.
DECIDING = ("rack", "spine")
#: Owners needed before the links that their jobs measured count for others' jobs: a report may
#: be false, and one of three does not move a median far.
LEAST_OWNERS = 3
#: bytes/s that no link exceeds or falls below.
_SLOWEST, _FASTEST = 1e3, 1e15
#: Measured speeds are rounded to an eighth of a doubling, so that noise triggers no new fits.
_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEstimate:
    """Estimated speed of a tier's links: effective bytes/s, waiting for ranks included.

    Attributes:
        bytes_s: median over owners of the median over their jobs.
        jobs, owners: behind it.
    """

    bytes_s: float
    jobs: int
    owners: int


@dataclass(frozen=True, kw_only=True)
class LinkEstimates:
    """Speeds of links by the jobs' stalls; our definition.

    After `LEAST_REPORTS` reports of a job's stall, the farthest tier that it crosses is taken to
    send the ring's bytes in that time, less the time of nearer tiers. An owner's measurements
    count for that owner's jobs; for others only from `LEAST_OWNERS` owners on.
    """

    configured: Links = field(default_factory=Links)
    _votes: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[tuple[str, JobRecord]], configured: Links) -> LinkEstimates:
        """Estimate the links from the records of jobs.

        Args:
            records: owner and record of each job.
            configured: speeds of tiers that need no estimate.
        """
        samples = [
            (owner, i, record.gradient_bytes, m)
            for i, (owner, record) in enumerate(records)
            if record.gradient_bytes
            for m in stalls(record)
            if m.reports >= LEAST_REPORTS and m.sync_s
        ]
        estimates = cls(configured=configured)
        for tier in TIERS:
            if tier in known_tiers(configured):
                continue
            below = estimates._all()
            jobs: dict[tuple[str, int], list[float]] = {}
            for owner, i, size, m in samples:
                if tier_of(m) == tier:
                    jobs.setdefault((owner, i), []).append(_effective(size, m, below))
            votes: dict[str, tuple[float, ...]] = {}
            for (owner, _), speeds in jobs.items():
                votes[owner] = (*votes.get(owner, ()), statistics.median(speeds))
            if votes:
                estimates = replace(estimates, _votes={**estimates._votes, tier: votes})
        return estimates

    @property
    def links(self) -> dict[str, LinkEstimate]:
        """Estimates by tier, of tiers that are not configured."""
        return {
            tier: LinkEstimate(
                bytes_s=_median(votes.values()),
                jobs=sum(map(len, votes.values())),
                owners=len(votes),
            )
            for tier, votes in self._votes.items()
        }

    def counts(self, tier: str) -> str:
        """Return for which jobs a measured tier counts: `all`, `own` (of its owners) or `none`."""
        if tier not in DECIDING:
            return "none"
        return "all" if len(self._votes.get(tier, ())) >= LEAST_OWNERS else "own"

    def of_owner(self, owner: str) -> Links:
        """Return the links that count for this owner's jobs."""
        speeds = {}
        for tier, votes in self._votes.items():
            if tier not in DECIDING:
                continue
            if len(votes) >= LEAST_OWNERS:
                speeds[tier] = _median(votes.values())
            elif owner in votes:
                speeds[tier] = _median([votes[owner]])
        return replace(self.configured, **speeds)

    def _all(self) -> Links:
        speeds = {tier: link.bytes_s for tier, link in self.links.items()}
        return replace(self.configured, **speeds)


def _effective(size: float, m: Measurement, below: Links) -> float:
    """Return bytes/s of the farthest tier of a measurement."""
    sync_s = m.sync_s or 0.0
    count = {"spine": m.racks, "rack": m.nodes / m.racks, "node": m.gpus / m.nodes}[tier_of(m)]
    rest_s = sync_s - float(below.seconds(size, m.gpus, m.nodes, m.racks))
    rest_s = max(rest_s, LEAST_PART * sync_s, sys.float_info.min)  # a product of denormals is 0
    speed = float(ring_bytes(size, np.float64(count))) / rest_s
    return min(_FASTEST, max(_SLOWEST, speed))


def _median(votes: Iterable[Iterable[float]]) -> float:
    middle = statistics.median(statistics.median(speeds) for speeds in votes)
    return float(2.0 ** (round(_STEPS * math.log2(middle)) / _STEPS))
