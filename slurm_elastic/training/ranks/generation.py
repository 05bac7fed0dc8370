"""Generations: process groups of one attempt, each with a fixed list of members.

A member is a rank process, `4711.0` for the first one of job 4711: that of the training (the
base), or a companion job. Numbers of generations rise and are never used again.

>>> generation = Generation(1, ("17.0", "4711.0", "4711.1"))
>>> generation.companions
{'4711': 2}
>>> next_members(generation, desired={"4711": 2, "4712": 1}, present={"4712.0"})
('17.0', '4711.0', '4711.1', '4712.0')
>>> next_members(generation, desired={}, present=())
('17.0',)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


def job_of(member: str) -> str:
    """Return the id of a member's job."""
    return member.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Generation:
    """One process group.

    Attributes:
        number: 0 for the group that an attempt begins with.
        members: their names in the order of their ranks; the first is of the base.
        newcomers: members that do not have the state of the training yet.
    """

    number: int
    members: tuple[str, ...]
    newcomers: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        """Id of the job that the training belongs to."""
        return job_of(self.members[0])

    @property
    def companions(self) -> dict[str, int]:
        """Numbers of ranks by the id of their companion job."""
        ranks: dict[str, int] = {}
        for member in self.members:
            if job_of(member) != self.base:
                ranks[job_of(member)] = ranks.get(job_of(member), 0) + 1
        return ranks

    def to_wire(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"number": self.number, "members": self.members, "newcomers": self.newcomers}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Generation:
        """Return the generation of a JSON object."""
        return cls(data["number"], tuple(data["members"]), tuple(data["newcomers"]))


def next_members(
    now: Generation, *, desired: Mapping[str, int], present: Collection[str]
) -> tuple[str, ...] | None:
    """Return the members of the generation that should follow; None: this one is right.

    Members leave at once. Others join when all that are desired are present.

    Args:
        now: the present generation.
        desired: companions that should belong to it, with their numbers of ranks.
        present: names of the processes that wait to join.
    """
    staying = tuple(m for m in now.members if job_of(m) in {now.base, *desired})
    if staying != now.members:
        return staying
    joining = sorted(desired.keys() - now.companions.keys(), key=int)
    newcomers = tuple(f"{job}.{k}" for job in joining for k in range(desired[job]))
    if not newcomers or not all(m in present for m in newcomers):
        return None
    return now.members + newcomers
