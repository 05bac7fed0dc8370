"""Sizes of new companions: the steps in which the job may shrink in place later. Pure.

A change in place removes whole companions, so one companion of seven GPUs is all or nothing. GPUs
that join are cut where the job reaches sizes of its directive, each at least twice the one before:
with few companions most sizes between remain within reach, on a range of MIN-MAX all of them.

>>> companion_sizes(Directive.parse("1-8"), "a100", 1, (("n1", 7),))
(('n1', 1), ('n1', 2), ('n1', 4))
>>> companion_sizes(Directive.parse("2-16,unit=2"), "a100", 2, (("n1", 2), ("n2", 4)))
(('n1', 2), ('n2', 4))

A companion may be lost at any time. What is left has to be a size of the directive, so nothing is
cut where that would be another one:

>>> companion_sizes(Directive.parse("1-8,sizes=1:2:4:8"), "a100", 1, (("n1", 7),))
(('n1', 7),)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from slurm_elastic.core.directive import Directive


def companion_sizes(
    directive: Directive, gpu_type: str, held: int, joins: Sequence[tuple[str, int]]
) -> tuple[tuple[str, int], ...]:
    """Return node and GPUs of each new companion.

    Args:
        directive: in force.
        gpu_type: of the job's GPUs.
        held: GPUs that the job has without the new ones.
        joins: GPUs that it gets on each node.
    """
    cuts = _steps(directive, gpu_type, held, held + sum(gpus for _, gpus in joins))
    parts, size = list[tuple[str, int]](), held
    for node, gpus in joins:
        edges = [size, *(s for s in cuts if size < s < size + gpus), size + gpus]
        parts += [(node, high - low) for low, high in pairwise(edges)]
        size += gpus
    present = _sums(held, joins)
    fresh = _sums(held, parts) - present
    safe = all(directive.allows(size, gpu_type) for size in fresh)
    return tuple(parts if safe else joins)


def _steps(directive: Directive, gpu_type: str, held: int, target: int) -> list[int]:
    """Return sizes between two others, each at least twice the one before."""
    steps, least = [], 2 * held
    for size in directive.sizes(gpu_type):
        if least <= size < target:
            steps.append(size)
            least = 2 * size
    return steps


def _sums(held: int, parts: Sequence[tuple[str, int]]) -> set[int]:
    """Return the sizes that a job may have with some of its new companions."""
    sums = {held}
    for _, gpus in parts:
        sums |= {size + gpus for size in sums}
    return sums
