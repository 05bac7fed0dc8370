"""Scheduling of gangs by offers: the protocol of Dally and the policies compared with it.

A gang runs on exactly the GPUs that it asked for, or on none, and holds them
for a lease; then it bids again. Whenever GPUs are free, they are offered to
the waiting gangs in the policy's order; each takes some of them, or waits on.
Why that is not the protocol of policy_protocol.py: docs/adr/0006-gangs-by-offers.md.

Policies are pure: the same question and state give the same answer. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slurm_elastic.placement.delay.free_map import FreeMap, GangTier, Place
from slurm_elastic.policies.dally.gang import Gang


@dataclass(frozen=True, slots=True)
class Held:
    """A running gang, and when its lease ends at the latest."""

    gang: Gang
    place: Place
    until_s: float


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Question to a policy: the free GPUs, and the gangs that wait.

    Attributes:
        waiting: in the policy's order (`rank`).
        room: what is free; a copy is the policy's own.
        running: those that hold GPUs.
    """

    now_s: float
    waiting: Sequence[Gang]
    room: FreeMap
    running: Mapping[int, Held] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grant:
    """GPUs that a gang accepts, all at once."""

    job_id: int
    place: Place
    tier: GangTier


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Grants and the next state; `wake_s`: time of the next offer, even without an event."""

    grants: tuple[Grant, ...]
    state: Mapping[str, Any]
    wake_s: float | None = None


class GangPolicy(Protocol):
    """Policy of one system.

    Attributes:
        renews: at the end of its lease a gang bids at once, and pays for a restart only if it
            then runs elsewhere or later; False: as in the author's simulator, GPUs are offered
            again a second per GPU after they were given back, sometimes (docs/dally-published.md).
    """

    renews: bool

    def rank(self, gang: Gang) -> tuple[float, ...]:
        """Return the sort key of a gang, lowest first; fixed while the gang waits."""
        ...

    def decide(self, offer: Offer, state: Mapping[str, Any]) -> Answer:
        """Answer an offer."""
        ...
