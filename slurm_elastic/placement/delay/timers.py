"""Delay timers: how long a gang waits for near GPUs before it accepts distant ones.

After Dally (arXiv 2401.16492). A gang that finds no node with room for it
takes GPUs of one rack only when it has waited `node_s` since it last held any,
and of several racks only after `rack_s`: both count from the same moment. One
that is larger than a node (rack) does not wait for one.

Modes: `nowait` (both 0), `full` (both endless), manual (two numbers of
leases), and `auto`, the published tuner: for each size of gang the waits, in
leases, after which such gangs found a node (rack) within the last H leases,

    node = min(ceil(0.8 H), max(6, ceil(mean + 2 std)))
    rack = min(H, max(12, ceil(mean + 2 std)))      mean + 2 std = 1 of no waits

>>> timers = Timers.parse("12,24", lease_s=3600)
>>> timers.limits_s(4, {})
(43200.0, 86400.0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_elastic.core.errors import InvalidInputError

#: State of the published tuner, `{"node": {size: [[time_s, leases], …]}, "rack": …}`;
#: serialisable.
Waits = Mapping[str, Any]

_LEAST_NODE = 6
_LEAST_RACK = 12
_NODE_SHARE = 0.8
#: Waits shorter than this (leases) are not remembered.
_NO_WAIT = 1.0


class TimersError(InvalidInputError):
    """Timers are invalid; the message names culprit and remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timers:
    """Times after which a gang gives up waiting for a nearer place.

    Attributes:
        mode: `manual` or `auto`.
        node, rack: manual timers, in leases.
        lease_s: seconds of a lease.
        history: the tuner's H, in leases.
        published_pruning: forget old waits as the author's code does: it skips the neighbour of
            each entry that it removes.
    """

    mode: str
    lease_s: float
    node: float = 0.0
    rack: float = 0.0
    history: float = 24.0
    published_pruning: bool = True

    @classmethod
    def parse(cls, text: str, *, lease_s: float) -> Timers:
        """Read `auto`, `nowait`, `full`, or two numbers of leases like `12,24`.

        Raises:
            TimersError: something else, or the second is below the first.
        """
        if text == "auto":
            return cls(mode="auto", lease_s=lease_s)
        pair = {"nowait": "0,0", "full": "inf,inf"}.get(text, text)
        node, _, rack = pair.partition(",")
        try:
            limits = float(node), float(rack)
        except ValueError:
            limits = (math.nan, math.nan)
        if not 0 <= limits[0] <= limits[1]:
            raise TimersError(
                f'timers: "{text[:40]}" is invalid: expected auto, nowait, full, or NODE,RACK in'
                " leases with NODE not above RACK, e.g. 12,24"
            )
        return cls(mode="manual", lease_s=lease_s, node=limits[0], rack=limits[1])

    def limits_s(self, gpus: int, waits: Waits) -> tuple[float, float]:
        """Return the seconds after which a gang of this size accepts a rack, and any place."""
        if self.mode != "auto":
            return self.node * self.lease_s, self.rack * self.lease_s
        most = self.history
        node = math.ceil(_estimate(_of(waits, "node", gpus)))
        rack = math.ceil(_estimate(_of(waits, "rack", gpus)))
        return (
            min(math.ceil(_NODE_SHARE * most), max(_LEAST_NODE, node)) * self.lease_s,
            min(most, max(_LEAST_RACK, rack)) * self.lease_s,
        )

    def remember(
        self, waits: Waits, tier: str, gpus: int, *, now_s: float, waited_s: float
    ) -> Waits:
        """Return the waits with one more that just found a place of this tier ("node", "rack")."""
        leases = waited_s / self.lease_s
        if self.mode != "auto" or leases < _NO_WAIT:
            return waits
        entries = [*_of(waits, tier, gpus), [now_s, leases]]
        oldest = now_s - self.history * self.lease_s
        if self.published_pruning:
            at = 0
            while at < len(entries):
                if entries[at][0] < oldest:
                    del entries[at]
                at += 1
        else:
            entries = [e for e in entries if e[0] >= oldest]
        return {**waits, tier: {**waits.get(tier, {}), str(gpus): entries}}


def _of(waits: Waits, tier: str, gpus: int) -> Sequence[Sequence[float]]:
    entries: Sequence[Sequence[float]] = waits.get(tier, {}).get(str(gpus), ())
    return entries


def _estimate(entries: Sequence[Sequence[float]]) -> float:
    values = [leases for _, leases in entries]
    if not values:
        return 1.0
    mean = sum(values) / len(values)
    return mean + 2 * math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
