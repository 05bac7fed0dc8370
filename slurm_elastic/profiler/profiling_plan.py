"""Runs that a profile needs. Pure.

After STASH (ICDCS 2023) and DS-Analyzer (VLDB 2021), with the same samples per GPU everywhere:

    RUN0   one GPU, synthetic data       computing alone
    RUN1   all GPUs, synthetic data      and the exchange of gradients
    RUN2   all GPUs, cold cache          and preparing and reading data
    RUN3   all GPUs, warm cache          and preparing data

*All* are those of a shape; the same number of GPUs on one node and on several gives the network's
part. Runs of one shape follow each other, and a repeat goes through all shapes before the next
one begins, so that values which are subtracted were measured close together.

>>> [str(s) for s in default_shapes([4, 4])]
['1', '4', '4@2', '8@2']
>>> shapes = (ProfiledShape(1, 1), ProfiledShape(1, 4))
>>> missing = needs(shapes, repeats=1, blocks=("synthetic", "warm"))
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
    """An invalid shape; the message is one line."""


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
        """Parse `4` or `8@2`.

        Raises:
            PlanError: another text, or GPUs that cannot be spread evenly.
        """
        match = _SHAPE.fullmatch(text.strip())
        if match is None:
            raise PlanError(f'"{text}" is invalid: expected 4, or 8@2 for 8 GPUs on 2 nodes')
        gpus, nodes = int(match[1]), int(match[2] or 1)
        if not gpus or not nodes or gpus % nodes:
            raise PlanError(f'"{text}" is invalid: expected equally many GPUs on each node')
        return cls(nodes, gpus)


ONE = ProfiledShape(1, 1)


@dataclass(frozen=True, slots=True)
class MissingTime:
    """One time of a step that is to be measured."""

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
    """Return one GPU, one node, as many GPUs spread over all nodes, and all GPUs.

    Args:
        gpus: of each node.
    """
    least, nodes = max(1, min(gpus)), len(gpus)
    shapes = [ONE, ProfiledShape(1, least)]
    if nodes > 1:
        if least % nodes == 0:
            shapes.append(ProfiledShape(nodes, least))
        shapes.append(ProfiledShape(nodes, least * nodes))
    return tuple(dict.fromkeys(shapes))


def blocks(*, cold: bool, whole_runs: bool) -> tuple[str, ...]:
    """Return the kinds of data that every shape is run with.

    Args:
        cold: files are named whose cold reading is to be measured.
        whole_runs: the program ignores the request and always loads its own data.
    """
    real = (COLD, WARM) if cold else (WARM,)
    return real if whole_runs else (SYNTHETIC, *real)


def needs(
    shapes: Sequence[ProfiledShape], *, repeats: int, blocks: Sequence[str]
) -> list[MissingTime]:
    """Return all measurements, in the order of their runs; one GPU is always among the shapes."""
    all_shapes = sorted({ONE, *shapes})
    return [MissingTime(s, r, b) for r in range(1, repeats + 1) for s in all_shapes for b in blocks]


def next_launch(missing: Sequence[MissingTime]) -> ProfilingLaunch:
    """Return the run of the first missing measurement and all others of its shape and repeat."""
    first = missing[0]
    block_names = [n.block for n in missing if (n.shape, n.repeat) == (first.shape, first.repeat)]
    return ProfilingLaunch(first.shape, first.repeat, tuple(block_names))


def fits(shape: ProfiledShape, gpus: Sequence[int]) -> bool:
    """Return whether nodes with these numbers of GPUs can run a shape."""
    return sum(count >= shape.per_node for count in gpus) >= shape.nodes
