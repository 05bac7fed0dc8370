"""Which runs a profile needs. Pure.

After STASH (ICDCS 2023) and DS-Analyzer (VLDB 2021), with the same samples per GPU everywhere:

    RUN0   one GPU, synthetic data       computing alone
    RUN1   all GPUs, synthetic data      and the exchange of gradients
    RUN2   all GPUs, cold cache          and preparing and reading data
    RUN3   all GPUs, warm cache          and preparing data

*All* are those of a shape; a node's GPUs on one node and the same number over several tell the
network. Runs of one shape follow each other, and a repeat goes through all shapes before the next
one begins: what is subtracted was measured as close together as can be.

>>> [str(s) for s in default_shapes([4, 4])]
['1', '4', '4@2', '8@2']
>>> missing = needs((ProfiledShape(1, 1), ProfiledShape(1, 4)), repeats=1, blocks=("synthetic",
"warm"))
>>> launch = next_launch(missing)
>>> str(launch.shape), launch.blocks
('1', ('synthetic', 'warm'))
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.job.profile_request import COLD, SYNTHETIC, WARM

_SHAPE = re.compile(r"(\d{1,5})(?:@(\d{1,5}))?", re.ASCII)


class PlanError(InvalidInputError):
    """A shape cannot be; one line that says why."""


@dataclass(frozen=True, slots=True, order=True)
class ProfiledShape:
    """GPUs of all nodes, spread evenly; written `4`, or `8@2` on two nodes."""

    nodes: int
    gpus: int

    def __str__(self) -> str:
        return f"{self.gpus}@{self.nodes}" if self.nodes > 1 else str(self.gpus)

    @property
    def per_node(self) -> int:
        """GPUs of each node."""
        return self.gpus // self.nodes

    @classmethod
    def parse(cls, text: str) -> ProfiledShape:
        """Of `4` or `8@2`.

        Raises:
            PlanError: none of these, or not even.
        """
        match = _SHAPE.fullmatch(text.strip())
        if match is None:
            raise PlanError(f'"{text}" is no shape; write 4, or 8@2 for 8 GPUs on 2 nodes')
        gpus, nodes = int(match[1]), int(match[2] or 1)
        if not gpus or not nodes or gpus % nodes:
            raise PlanError(f"{text}: as many GPUs on each node are needed, at least one")
        return cls(nodes, gpus)


ONE = ProfiledShape(1, 1)


@dataclass(frozen=True, slots=True)
class MissingTime:
    """One number that is to be measured: the time of a step."""

    shape: ProfiledShape
    repeat: int
    block: str


@dataclass(frozen=True, slots=True)
class ProfilingLaunch:
    """One start of the program."""

    shape: ProfiledShape
    repeat: int
    blocks: tuple[str, ...]


def default_shapes(gpus: Sequence[int]) -> tuple[ProfiledShape, ...]:
    """What tells most of an allocation: one GPU, a node, the same over all nodes, everything.

    Args:
        gpus: of each node.
    """
    least, nodes = max(1, min(gpus)), len(gpus)
    found = [ONE, ProfiledShape(1, least)]
    if nodes > 1:
        if least % nodes == 0:
            found.append(ProfiledShape(nodes, least))
        found.append(ProfiledShape(nodes, least * nodes))
    return tuple(dict.fromkeys(found))


def blocks(*, cold: bool, whole: bool) -> tuple[str, ...]:
    """Kinds of data that every shape is run with.

    Args:
        cold: the files are known that are to be read anew.
        whole: the program does not heed what it is asked: its data are what they are.
    """
    real = (COLD, WARM) if cold else (WARM,)
    return real if whole else (SYNTHETIC, *real)


def needs(
    shapes: Sequence[ProfiledShape], *, repeats: int, blocks: Sequence[str]
) -> list[MissingTime]:
    """All numbers, in the order of their runs; one GPU is always among the shapes."""
    every = sorted({ONE, *shapes})
    return [MissingTime(s, r, b) for r in range(1, repeats + 1) for s in every for b in blocks]


def next_launch(missing: Sequence[MissingTime]) -> ProfilingLaunch:
    """The run that gives the first of what is missing, and all of its shape and repeat."""
    first = missing[0]
    alike = [n.block for n in missing if (n.shape, n.repeat) == (first.shape, first.repeat)]
    return ProfilingLaunch(first.shape, first.repeat, tuple(alike))


def fits(shape: ProfiledShape, gpus: Sequence[int]) -> bool:
    """Whether nodes with so many GPUs can run it."""
    return sum(count >= shape.per_node for count in gpus) >= shape.nodes
