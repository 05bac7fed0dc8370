"""The links between a job's GPUs, and what one step of a data-parallel job pays to cross them.

A step reduces B bytes of gradients. Hierarchical ring, our definition, as `ClosedForm` of
communication.py with one difference: the link of a node carries what all its GPUs send, and that
of a rack what all its nodes send, so from the node upwards a participant sends all B bytes.
With g GPUs evenly on n nodes in r racks, of which the busiest uplink gives us a share:

    ring(g / n, node) + ring(n / r, rack) + ring(r, spine * share),  ring(p, w) = 2 (p-1)/p B/w

A tier whose speed nobody knows costs nothing here; the caller has a stated loss for it.

>>> links = Links(rack=2e9, spine=1e9)
>>> toll = Toll(links=links, gradient_bytes=1e9, work=(("a100", 8.0),))
>>> toll.seconds(8, 2, 1).tolist(), toll.seconds(8, 2, 2).tolist()
(0.5, 1.0)
>>> toll.part("a100", 8, 2, 2), toll.part("a100", 1, 1, 1)
(0.5, 1.0)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slurm_elastic.plan import JobRecord, Measurement

Floats = NDArray[np.float64]

#: Tiers in the order of distance.
TIERS = ("node", "rack", "spine")
#: bytes/s of a Gbit/s.
GBIT = 1e9 / 8
#: Reports that a stall needs before links are judged by it.
LEAST_REPORTS = 3
#: Owners needed before the links that their jobs measured count for others' jobs: a report may
#: lie, and one liar of three does not move a median far.
LEAST_OWNERS = 3
#: A stall counts at most and at least this many times what the links say.
_MOST_SCALE = 32.0
#: Of a stall at least this part is the farthest tier's.
_LEAST_PART = 0.1
#: bytes/s that no link exceeds or falls below.
_SLOWEST, _FASTEST = 1e3, 1e15
#: Measured speeds count in steps of an eighth of a doubling: what trembles would cost all a fit.
_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """bytes/s of one link of each tier; None: not known.

    Attributes:
        domain: inside a link domain of GPUs.
        node: between the GPUs of a node.
        rack: from a node to its rack.
        spine: from a rack upwards.
    """

    domain: float | None = None
    node: float | None = None
    rack: float | None = None
    spine: float | None = None

    @classmethod
    def configured(cls, speeds: Mapping[str, float]) -> Links:
        """From `[topology] speeds`, Gbit/s by tier."""
        return cls(**{tier: speed * GBIT for tier, speed in speeds.items()})

    def inside(self, *, linked: bool = False) -> float | None:
        """Between GPUs of a node; `linked`: that are in one link domain."""
        first, other = (self.domain, self.node) if linked else (self.node, self.domain)
        return other if first is None else first

    def seconds(
        self,
        size: float,
        gpus: ArrayLike,
        nodes: ArrayLike,
        racks: ArrayLike,
        *,
        share: float = 1.0,
        linked: bool = False,
    ) -> Floats:
        """Seconds to reduce gradients in each shape.

        Args:
            size: bytes.
            gpus: of each shape, evenly on its nodes.
            nodes: of each shape.
            racks: of each shape.
            share: part of the racks' uplinks that is ours, in (0, 1].
            linked: each node's GPUs are in one link domain.
        """
        g, n, r = (np.asarray(v, dtype=np.float64) for v in (gpus, nodes, racks))
        spine = None if self.spine is None else self.spine * share
        total = np.zeros(np.broadcast(g, n, r).shape)
        for count, speed in ((g / n, self.inside(linked=linked)), (n / r, self.rack), (r, spine)):
            if speed is not None:
                total = total + _volume(size, count) / speed
        return np.asarray(total, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toll:
    """What its links cost one job; hashable, as models are cached by it.

    Attributes:
        gradient_bytes: reduced in each step.
        work: GPU seconds of computing in one step, by type; the batch stays the same on any
            number of GPUs.
        rates: relative speeds of types, for those that `work` does not name.
        scale: exposed over computed seconds, by the job's own stalls.
    """

    links: Links
    gradient_bytes: float
    work: tuple[tuple[str, float], ...]
    rates: tuple[tuple[str, float], ...] = ()
    scale: float = 1.0

    @classmethod
    def of(cls, record: JobRecord, links: Links, rates: Mapping[str, float]) -> Toll | None:
        """What is known of a job; None: too little, the stated losses count.

        Args:
            record: its gradient bytes, measurements, and what it learned.
            links: as configured or measured; see `Seen.links`.
            rates: `[speedup] types`.
        """
        size, work = record.gradient_bytes, step_work(record)
        known = links.inside(), links.rack, links.spine
        if not size or not 0 < size < math.inf or not work or known == (None, None, None):
            return None
        toll = cls(
            links=links,
            gradient_bytes=size,
            work=tuple(sorted(work.items())),
            rates=tuple(sorted(rates.items())),
        )
        logs = []
        for m in stalls(record):
            stated = float(toll.seconds(m.gpus, m.nodes, m.racks))
            # Where a tier of it is not known, the stall says nothing of the others.
            if stated > 0 and _tier(m) in _known(links):
                logs.append(math.log(max(m.sync_s or 0.0, 1e-9) / stated))
        if not logs:
            return toll
        scale = min(_MOST_SCALE, max(1 / _MOST_SCALE, math.exp(sum(logs) / len(logs))))
        return replace(toll, scale=scale)

    def seconds(
        self,
        gpus: ArrayLike,
        nodes: ArrayLike,
        racks: ArrayLike,
        *,
        share: float = 1.0,
        linked: bool = False,
    ) -> Floats:
        """Seconds that a step stands still in each shape; arguments as in `Links.seconds`."""
        size = self.gradient_bytes * self.scale
        return self.links.seconds(size, gpus, nodes, racks, share=share, linked=linked)

    def parts(
        self,
        gpu_type: str,
        gpus: ArrayLike,
        nodes: ArrayLike,
        racks: ArrayLike,
        *,
        share: float = 1.0,
        linked: bool = False,
    ) -> Floats:
        """The part of its time in which it computes, in (0, 1], in each shape."""
        compute_s = self._work(gpu_type) / np.asarray(gpus, dtype=np.float64)
        stall_s = self.seconds(gpus, nodes, racks, share=share, linked=linked)
        return np.asarray(compute_s / (compute_s + stall_s), dtype=np.float64)

    def part(
        self,
        gpu_type: str,
        gpus: int,
        nodes: int,
        racks: int,
        *,
        share: float = 1.0,
        linked: bool = False,
    ) -> float:
        """The same of one shape."""
        return float(self.parts(gpu_type, gpus, nodes, racks, share=share, linked=linked))

    def _work(self, gpu_type: str) -> float:
        known = dict(self.work)
        if gpu_type in known:
            return known[gpu_type]
        rates = dict(self.rates)
        units = [seconds * rates.get(name, 1.0) for name, seconds in self.work]
        return statistics.fmean(units) / rates.get(gpu_type, 1.0)


def step_work(record: JobRecord) -> dict[str, float]:
    """GPU seconds of computing in one step, by type.

    By the parts of its steps; on types where these were not told by its micro-steps, else by what
    a replica did in earlier jobs of its application. Computing is taken to be shared evenly.
    """
    found: dict[str, float] = {}
    learned = record.learned
    if learned is not None:
        application = learned.application
        for profile in application.types if application.profiled else ():
            if profile.single:
                found[profile.gpu_type] = application.batch * profile.unit / profile.single
        by_type: dict[str, list[float]] = {}
        for o in learned.observations:
            kind = application.on(o.gpu_type)
            seconds = (
                application.batch * o.micro_step_s / o.micro_batch * (kind.unit if kind else 1)
            )
            by_type.setdefault(o.gpu_type, []).append(seconds)
        found |= {t: statistics.median(seconds) for t, seconds in by_type.items()}
    told: dict[str, list[float]] = {}
    for m in record.measurements:
        if m.compute_s is not None:
            told.setdefault(m.gpu_type, []).append(m.compute_s * m.gpus)
    found |= {t: statistics.median(seconds) for t, seconds in told.items()}
    return {t: seconds for t, seconds in found.items() if 1e-9 < seconds < 1e12}


def stalls(record: JobRecord) -> tuple[Measurement, ...]:
    """Measurements of several GPUs that told how long a step stood still."""
    return tuple(
        m
        for m in record.measurements
        if m.gpus > 1
        and 0 < m.racks <= m.nodes <= m.gpus
        and m.compute_s is not None
        and m.compute_s > 0
        and m.sync_s is not None
        and 0 <= m.sync_s < math.inf
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLink:
    """A tier's links as jobs' stalls show them: effective bytes/s, waiting for ranks included.

    Attributes:
        bytes_s: median over owners of the median over their jobs.
        jobs, owners: behind it.
    """

    bytes_s: float
    jobs: int
    owners: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the jobs' stalls say of the links; our definition.

    A job of which `LEAST_REPORTS` reports told its stall says that the farthest tier it crosses
    sends the ring's bytes in that time, less what nearer tiers take. What one owner's jobs say
    counts for his jobs; for others' only from `LEAST_OWNERS` owners on.
    """

    configured: Links = field(default_factory=Links)
    _votes: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[tuple[str, JobRecord]], configured: Links) -> Seen:
        """Gather it.

        Args:
            records: owner and record of each job.
            configured: tiers that are not to be judged.
        """
        samples = [
            (owner, record.gradient_bytes, m)
            for owner, record in records
            if record.gradient_bytes
            for m in stalls(record)
            if m.reports >= LEAST_REPORTS and m.sync_s
        ]
        seen = cls(configured=configured)
        for tier in TIERS:
            if tier in _known(configured):
                continue
            below = seen._all()
            votes: dict[str, list[float]] = {}
            for owner, size, m in samples:
                if _tier(m) == tier:
                    speed = _effective(size, m, below)
                    votes.setdefault(owner, []).append(speed)
            if votes:
                kept = {owner: tuple(speeds) for owner, speeds in votes.items()}
                seen = replace(seen, _votes={**seen._votes, tier: kept})
        return seen

    @property
    def links(self) -> dict[str, SeenLink]:
        """By tier, of those that are not configured."""
        return {
            tier: SeenLink(
                bytes_s=_median(votes.values()),
                jobs=sum(map(len, votes.values())),
                owners=len(votes),
            )
            for tier, votes in self._votes.items()
        }

    def of_owner(self, owner: str) -> Links:
        """The links that this owner's jobs are judged by."""
        found = {}
        for tier, votes in self._votes.items():
            if len(votes) >= LEAST_OWNERS:
                found[tier] = _median(votes.values())
            elif owner in votes:
                found[tier] = _median([votes[owner]])
        return replace(self.configured, **found)

    def _all(self) -> Links:
        found = {tier: link.bytes_s for tier, link in self.links.items()}
        return replace(self.configured, **found)


def _effective(size: float, m: Measurement, below: Links) -> float:
    """bytes/s of the farthest tier of a measurement."""
    sync_s = m.sync_s or 0.0
    count = {"spine": m.racks, "rack": m.nodes / m.racks, "node": m.gpus / m.nodes}[_tier(m)]
    rest_s = sync_s - float(below.seconds(size, m.gpus, m.nodes, m.racks))
    speed = float(_volume(size, np.float64(count))) / max(rest_s, _LEAST_PART * sync_s)
    return min(_FASTEST, max(_SLOWEST, speed))


def _tier(m: Measurement) -> str:
    """The farthest tier that it crosses."""
    return "spine" if m.racks > 1 else "rack" if m.nodes > 1 else "node"


def _known(links: Links) -> frozenset[str]:
    known = {"node": links.inside(), "rack": links.rack, "spine": links.spine}
    return frozenset(tier for tier, speed in known.items() if speed is not None)


def _median(votes: Iterable[Iterable[float]]) -> float:
    middle = statistics.median(statistics.median(speeds) for speeds in votes)
    return float(2.0 ** (round(_STEPS * math.log2(middle)) / _STEPS))


def _volume(size: float, count: ArrayLike) -> Floats:
    """Bytes that each participant of a ring sends."""
    share = np.maximum(0.0, 1.0 - 1.0 / np.asarray(count, dtype=np.float64))
    return np.asarray(2.0 * size * share, dtype=np.float64)
