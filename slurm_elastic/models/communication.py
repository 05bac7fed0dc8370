"""Cost of distance to a gang: the part s of its time in which it computes, by place.

`s = compute / (compute + exposed communication)`, 1 on one GPU. Three sources:
a table (`SlowdownTable`, e.g. of a network simulator), measured stalls of a live job
(`Stalls`), and a closed form from step time, gradient bytes and links (`ClosedForm`, our
definition, after the usual cost models of Thakur et al., IJHPCA 2005).

>>> table = SlowdownTable({("VGG", 2, 1, 1, 1): 0.9})
>>> table.part("VGG", 2, (1, 1, 1)), table.part("VGG", 1, (1, 1, 1))
(0.9, 1.0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from slurm_elastic.core.errors import InvalidInputError

#: (racks, nodes, link domains) that a gang reaches over.
Span = tuple[int, int, int]


class CommunicationError(InvalidInputError):
    """No data for a model on a place, or invalid constants."""


class Communication(Protocol):
    """Source of the part of its time in which a gang computes."""

    def part(self, model: str, gpus: int, span: Span) -> float:
        """Return the part of its time in which a gang computes, in (0, 1].

        Raises:
            CommunicationError: not known.
        """
        ...


@dataclass(frozen=True)
class SlowdownTable:
    """Table of measured parts; places without a row are an error.

    Attributes:
        parts: s by (model, GPUs, racks, nodes, link domains).
    """

    parts: Mapping[tuple[str, int, int, int, int], float]

    def part(self, model: str, gpus: int, span: Span) -> float:
        """See `Communication`."""
        if gpus == 1:
            return 1.0
        part = self.parts.get((model, gpus, *span))
        if part is None:
            raise CommunicationError(
                f"the slowdown table has no row for {model} on {gpus} GPUs over"
                f" {_over(span)}; add one"
            )
        return part

    @cached_property
    def models(self) -> frozenset[str]:
        """Models with at least one row."""
        return frozenset(key[0] for key in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class GangLink:
    """One tier of the network: bytes/s that one GPU can send, and seconds per message."""

    bytes_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.bytes_s < math.inf and 0 <= self.latency_s < math.inf):
            raise CommunicationError(
                f"link: {self.bytes_s} bytes/s, latency {self.latency_s} s is invalid: expected"
                " finite numbers, the first above 0, the second at least 0"
            )


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """All-reduce in a closed form; our definition.

    One all-reduce of B bytes over p equal participants takes

        ring   2 (p - 1) (B / (p w) + a)
        tree   2 ceil(log2 p) (B / w + a)

    with w bytes/s and a seconds of latency of the slowest link between them. *Hierarchical*:
    inside each link domain first, then across the domains of a node, the nodes of a rack and the
    racks, each tier with the bytes that the tier below leaves to one participant (B over the
    product of the participants below) and its own link; a ring at each tier. `overlap` of the
    computing time hides communication.

    Attributes:
        compute_s: seconds per step of each model on one GPU.
        gradient_bytes: bytes that each step reduces.
        domain, node, rack, spine: links of the four tiers.
        method: `ring`, `tree` or `hierarchical`.
        overlap: part of the computing time behind which communication hides, 0 to 1.
        uplink_share: of a rack's uplink, see `contention`; divides the spine's speed.
    """

    compute_s: Mapping[str, float]
    gradient_bytes: Mapping[str, float]
    domain: GangLink
    node: GangLink
    rack: GangLink
    spine: GangLink
    method: str = "hierarchical"
    overlap: float = 0.0
    uplink_share: float = 1.0

    def part(self, model: str, gpus: int, span: Span) -> float:
        """See `Communication`."""
        if gpus == 1:
            return 1.0
        if model not in self.compute_s or model not in self.gradient_bytes:
            raise CommunicationError(
                f"step time or gradient bytes of {model} are not known; add them"
            )
        compute = self.compute_s[model]
        exposed = max(
            0.0, self.seconds(self.gradient_bytes[model], gpus, span) - self.overlap * compute
        )
        return compute / (compute + exposed)

    def seconds(self, size: float, gpus: int, span: Span) -> float:
        """Return the seconds of one all-reduce of `size` bytes."""
        spine = GangLink(
            bytes_s=self.spine.bytes_s * self.uplink_share, latency_s=self.spine.latency_s
        )
        racks, nodes, domains = span
        # Uneven shares count as their mean: the tiers' participants may be fractions.
        tiers = (
            (gpus / domains, self.domain),
            (domains / nodes, self.node),
            (nodes / racks, self.rack),
            (float(racks), spine),
        )
        if self.method == "hierarchical":
            total = 0.0
            for count, link in tiers:
                if count > 1:
                    total += _ring(size, count, link)
                    size /= count
            return total
        slowest = next(link for count, link in reversed(tiers) if count > 1)
        form = {"ring": _ring, "tree": _tree}.get(self.method)
        if form is None:
            raise CommunicationError(
                f'method "{self.method}" is unknown; known: ring, tree, hierarchical'
            )
        return form(size, float(gpus), slowest)


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """Measured parts of a job where it ran, else another source, scaled by what was measured.

    Attributes:
        measured: s by (model, GPUs, racks, nodes, link domains).
        otherwise: asked for places where the model never ran. The odds `(1 - s) / s` of its
            answers are multiplied by the geometric mean of measured over stated odds.
    """

    measured: Mapping[tuple[str, int, int, int, int], float]
    otherwise: Communication
    _known: dict[str, float] = field(default_factory=dict, compare=False)

    def part(self, model: str, gpus: int, span: Span) -> float:
        """See `Communication`."""
        if gpus == 1:
            return 1.0
        part = self.measured.get((model, gpus, *span))
        if part is not None:
            return part
        stated = self.otherwise.part(model, gpus, span)
        if stated >= 1.0:
            return 1.0
        return 1.0 / (1.0 + (1.0 - stated) / stated * self._scale(model))

    def _scale(self, model: str) -> float:
        if model not in self._known:
            logs = []
            for (name, gpus, *span), part in self.measured.items():
                if name != model or gpus == 1 or not 0 < part < 1:
                    continue
                stated = self.otherwise.part(name, gpus, (span[0], span[1], span[2]))
                if 0 < stated < 1:
                    logs.append(math.log((1 - part) / part * stated / (1 - stated)))
            self._known[model] = math.exp(sum(logs) / len(logs)) if logs else 1.0
        return self._known[model]


def uplink_shares(users: Mapping[str, int], *, congestion: float = 1.0) -> dict[str, float]:
    """Return the share of each uplink's speed that one job gets; our definition.

    Jobs that cross the same uplink share it evenly, and what others than us send leaves
    `1 / congestion` of it.

    Args:
        users: how many jobs cross each uplink.
        congestion: 1: no other traffic; 4: a quarter is left.

    Raises:
        CommunicationError: congestion below 1.
    """
    if not 1 <= congestion < math.inf:
        raise CommunicationError(f"congestion: {congestion} is invalid: expected a number >= 1")
    return {link: 1.0 / (max(1, count) * congestion) for link, count in users.items()}


def _ring(size: float, count: float, link: GangLink) -> float:
    return 2 * (count - 1) * (size / (count * link.bytes_s) + link.latency_s)


def _tree(size: float, count: float, link: GangLink) -> float:
    return 2 * math.ceil(math.log2(count)) * (size / link.bytes_s + link.latency_s)


def _over(span: Span) -> str:
    levels = ("rack", "node", "link domain")
    return ", ".join(f"{n} {w}{'s' if n != 1 else ''}" for n, w in zip(span, levels, strict=True))
