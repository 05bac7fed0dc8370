"""The links between a job's GPUs, and the time that one data-parallel step needs to cross them.

A step reduces B bytes of gradients. Hierarchical ring, our definition, as `ClosedForm` of
communication.py with one difference: the link of a node carries what all its GPUs send, and that
of a rack what all its nodes send, so from the node upwards a participant sends all B bytes.
With g GPUs evenly on n nodes in r racks, of which the busiest uplink gives us a share:

    ring(g / n, node) + ring(n / r, rack) + ring(r, spine * share),  ring(p, w) = 2 (p-1)/p B/w

A tier of unknown speed costs nothing here; the caller has a stated loss for it.

>>> links = Links(rack=2e9, spine=1e9)
>>> toll = CommunicationCost(links=links, gradient_bytes=1e9, work=(("a100", 8.0),))
>>> toll.seconds(8, 2, 1).tolist(), toll.seconds(8, 2, 2).tolist()
(0.5, 1.0)
>>> toll.part("a100", 8, 2, 2), toll.part("a100", 1, 1, 1)
(0.5, 1.0)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slurm_elastic.core.plan import JobRecord, Measurement

Floats = NDArray[np.float64]

#: Tiers in the order of distance.
TIERS = ("node", "rack", "spine")
#: bytes/s of a Gbit/s.
GBIT = 1e9 / 8
#: A stall counts at most this many times the predicted one, and at least its inverse.
_MOST_SCALE = 32.0
#: Least scale of a tier that was not measured, which has the scale of the tier before it.
_LEAST_CARRIED = 0.5
#: Least part of a stall that is attributed to the farthest tier.
LEAST_PART = 0.1


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
        """Return the links of `[topology] speeds`, Gbit/s by tier."""
        return cls(**{tier: speed * GBIT for tier, speed in speeds.items()})

    def inside(self, *, linked: bool = False) -> float | None:
        """Return bytes/s between GPUs of a node; `linked`: of one link domain."""
        first, other = (self.domain, self.node) if linked else (self.node, self.domain)
        return other if first is None else first

    def tiers(
        self,
        size: float,
        gpus: ArrayLike,
        nodes: ArrayLike,
        racks: ArrayLike,
        *,
        share: float = 1.0,
        linked: bool = False,
    ) -> tuple[Floats, Floats, Floats]:
        """Return the seconds to reduce gradients in each shape, by tier.

        Args:
            size: bytes.
            gpus: of each shape, evenly on its nodes.
            nodes: of each shape.
            racks: of each shape.
            share: part of the racks' uplinks that is ours, in (0, 1].
            linked: each node's GPUs are in one link domain.

        Returns:
            Inside nodes, inside racks, between racks; 0 where the link is not known.
        """
        g, n, r = (np.asarray(v, dtype=np.float64) for v in (gpus, nodes, racks))
        spine = None if self.spine is None else self.spine * share
        return (
            _ring(size, g / n, self.inside(linked=linked)),
            _ring(size, n / r, self.rack),
            _ring(size, r, spine),
        )

    def seconds(self, size: float, gpus: ArrayLike, nodes: ArrayLike, racks: ArrayLike) -> Floats:
        """Return the seconds over all tiers, of a job alone on all links."""
        inside, rack, spine = self.tiers(size, gpus, nodes, racks)
        return np.asarray(inside + rack + spine, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationCost:
    """Cost of communication of one job; hashable, as models are cached by it.

    Attributes:
        gradient_bytes: reduced in each step.
        work: GPU seconds of computing in one step, by type; the batch stays the same on any
            number of GPUs.
        rates: relative speeds of types, for those that `work` does not name.
        scales: by tier, the job's own stalls over what its links say; above 1 it also waits
            for slower ranks, below 1 it hides some behind computing.
    """

    links: Links
    gradient_bytes: float
    work: tuple[tuple[str, float], ...]
    rates: tuple[tuple[str, float], ...] = ()
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)

    @classmethod
    def of(
        cls, record: JobRecord, links: Links, rates: Mapping[str, float]
    ) -> CommunicationCost | None:
        """Return the cost of a job's communication; None: too little is known, stated losses count.

        Args:
            record: its gradient bytes, measurements, and what it learned.
            links: as configured or measured (link_estimates.py).
            rates: `[speedup] types`.
        """
        size, work = record.gradient_bytes, step_work(record)
        speeds = links.inside(), links.rack, links.spine
        if not size or not 0 < size < math.inf or not work or speeds == (None, None, None):
            return None
        return cls(
            links=links,
            gradient_bytes=size,
            work=tuple(sorted(work.items())),
            rates=tuple(sorted(rates.items())),
            scales=_scales(size, stalls(record), links),
        )

    def seconds(
        self,
        gpus: ArrayLike,
        nodes: ArrayLike,
        racks: ArrayLike,
        *,
        share: float = 1.0,
        linked: bool = False,
    ) -> Floats:
        """Return the seconds that a step stalls in each shape; arguments as in `Links.tiers`."""
        tiers = self.links.tiers(
            self.gradient_bytes, gpus, nodes, racks, share=share, linked=linked
        )
        total = sum(scale * tier for scale, tier in zip(self.scales, tiers, strict=True))
        return np.asarray(total, dtype=np.float64)

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
        """Return the part of its time in which the job computes, in (0, 1], in each shape."""
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
        """Return the part of its time in which the job computes in one shape."""
        return float(self.parts(gpu_type, gpus, nodes, racks, share=share, linked=linked))

    def _work(self, gpu_type: str) -> float:
        work_by_type = dict(self.work)
        if gpu_type in work_by_type:
            return work_by_type[gpu_type]
        rates = dict(self.rates)
        units = [seconds * rates.get(name, 1.0) for name, seconds in self.work]
        return statistics.fmean(units) / rates.get(gpu_type, 1.0)


def step_work(record: JobRecord) -> dict[str, float]:
    """Return the GPU seconds of computing in one step, by type.

    By the parts of its steps; on types without these by its micro-steps, else by the replicas of
    earlier jobs of its application. Computing is taken to be shared evenly.
    """
    work: dict[str, float] = {}
    learned = record.learned
    if learned is not None:
        application = learned.application
        for profile in application.types if application.profiled else ():
            if profile.single:
                work[profile.gpu_type] = application.batch * profile.unit / profile.single
        by_type: dict[str, list[float]] = {}
        for o in learned.observations:
            kind = application.on(o.gpu_type)
            seconds = (
                application.batch * o.micro_step_s / o.micro_batch * (kind.unit if kind else 1)
            )
            by_type.setdefault(o.gpu_type, []).append(seconds)
        work |= {t: statistics.median(seconds) for t, seconds in by_type.items()}
    by_parts: dict[str, list[float]] = {}
    for m in record.measurements:
        if m.compute_s is not None:
            by_parts.setdefault(m.gpu_type, []).append(m.compute_s * m.gpus)
    work |= {t: statistics.median(seconds) for t, seconds in by_parts.items()}
    return {t: seconds for t, seconds in work.items() if 1e-9 < seconds < 1e12}


def stalls(record: JobRecord) -> tuple[Measurement, ...]:
    """Return the measurements of several GPUs that contain the stall of a step."""
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


def _scales(
    size: float, measurements: Sequence[Measurement], links: Links
) -> tuple[float, float, float]:
    """Return measured over predicted stalls: geometric means by tier, less nearer tiers' time.

    The spine goes by the rack where only that was measured, though not below a half: computing
    hides a short reduction, but not a ten times longer one. Nodes say nothing of racks.
    """
    scales: list[float] = []
    for i, tier in enumerate(TIERS):
        logs = []
        for m in (m for m in measurements if tier_of(m) == tier):
            stated = [float(s) for s in links.tiers(size, m.gpus, m.nodes, m.racks)]
            if stated[i] > 0:
                sync_s = max(m.sync_s or 0.0, 1e-9)
                nearer_s = sum(s * scale for s, scale in zip(stated, scales, strict=False))
                logs.append(math.log(max(sync_s - nearer_s, LEAST_PART * sync_s) / stated[i]))
        if logs:
            mean = math.exp(sum(logs) / len(logs))
            scales.append(min(_MOST_SCALE, max(1 / _MOST_SCALE, mean)))
        else:
            scales.append(max(_LEAST_CARRIED, scales[1]) if tier == "spine" else 1.0)
    return scales[0], scales[1], scales[2]


def tier_of(m: Measurement) -> str:
    """Return the farthest tier that a measurement's communication crossed."""
    return "spine" if m.racks > 1 else "rack" if m.nodes > 1 else "node"


def known_tiers(links: Links) -> frozenset[str]:
    """Tiers whose speed is known."""
    speeds = {"node": links.inside(), "rack": links.rack, "spine": links.spine}
    return frozenset(tier for tier, speed in speeds.items() if speed is not None)


def _ring(size: float, count: Floats, speed: float | None) -> Floats:
    return np.zeros(count.shape) if speed is None else ring_bytes(size, count) / speed


def ring_bytes(size: float, count: ArrayLike) -> Floats:
    """Bytes that each participant of a ring sends."""
    share = np.maximum(0.0, 1.0 - 1.0 / np.asarray(count, dtype=np.float64))
    return np.asarray(2.0 * size * share, dtype=np.float64)
