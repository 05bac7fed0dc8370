"""Kinds of changes of a running job, and which companions a change in place needs.

A job that was grown in place consists of its *base*, the job that the user submitted, and
*companions*, small jobs of the same user that hold further GPUs on one node each. The size of a
running job of Slurm is fixed, so a change in place adds and removes whole companions, and the base
stays as it is; everything else is a requeue.

>>> base = Allocation.of("a100", {"g01": 2})
>>> two, four = Allocation.of("a100", {"g01": 2}), Allocation.of("a100", {"g02": 4})
>>> companion_change(base, (two, four), Allocation.of("a100", {"g01": 4, "g03": 1}))
CompanionChange(leave=(1,), join=(('g03', 1),))
>>> companion_change(base, (two, four), Allocation.of("a100", {"g01": 3})) is None
True
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurm_elastic.core.cluster import Allocation, Job


class ResizeKind(enum.Enum):
    """Kinds of changes from one allocation of a running job to another, the cheapest first."""

    #: Ranks join or leave; the others go on training.
    IN_PLACE = "in-place"
    #: The ranks are started again on the base and companions on other nodes, without a requeue.
    RESTART = "restart"
    #: The job is requeued in another shape.
    REQUEUE = "requeue"


@dataclass(frozen=True, slots=True)
class CompanionChange:
    """Companions to remove and to add.

    Attributes:
        leave: indexes of the companions that leave.
        join: (node, GPUs) of each new companion, sorted by node.
    """

    leave: tuple[int, ...]
    join: tuple[tuple[str, int], ...]


def companion_change(
    base: Allocation,
    companions: Sequence[Allocation],
    target: Allocation,
    *,
    most: int | None = None,
) -> CompanionChange | None:
    """Return the change of companions that leads to a target; None: there is none.

    There is none if the target has another GPU type, lacks GPUs of the base, cuts a companion, or
    on one node removes a companion and adds another: the GPUs of the first are not free yet.
    Companions that are added run before others are removed, so that there is none either if all
    together would be more than `most`.

    Args:
        base: GPUs of the job itself.
        companions: GPUs of each companion, on one node each.
        target: GPUs that the job shall have, base included.
        most: GPUs that the job may hold, also for a moment; None: any number.
    """
    if target.gpu_type != base.gpu_type:
        return None
    rest = dict(target.shares)
    for node, gpus in base.shares:
        rest[node] = rest.get(node, 0) - gpus
        if rest[node] < 0:
            return None
    on_node: dict[str, list[int]] = {}
    for index, companion in enumerate(companions):
        for node, _ in companion.shares:
            on_node.setdefault(node, []).append(index)
    leave: set[int] = set()
    join: list[tuple[str, int]] = []
    for node in sorted(rest.keys() | on_node.keys()):
        indexes, wanted = on_node.get(node, []), rest.get(node, 0)
        missing = wanted - sum(companions[i].on(node) for i in indexes)
        if missing >= 0:
            join += [(node, missing)] if missing else []
            continue
        stay = _subset(((i, companions[i].on(node)) for i in indexes), wanted)
        if stay is None:
            return None
        leave |= set(indexes) - stay
    held = base.gpus + sum(c.gpus for c in companions)
    if join and most is not None and held + sum(gpus for _, gpus in join) > most:
        return None
    return CompanionChange(tuple(sorted(leave)), tuple(join))


def change_in_place(job: Job, target: Allocation) -> CompanionChange | None:
    """Return the change of a running job's companions that leads to a target; None: there is none.

    At no moment does the job hold more GPUs than the MAX of its directive.
    """
    base, directive = job.base_allocation, job.directive
    if base is None:
        return None
    most = directive.max_gpus if directive is not None else None
    return companion_change(base, [c.allocation for c in job.companions], target, most=most)


def change_by_restart(job: Job, target: Allocation) -> CompanionChange | None:
    """Return the change for a program whose ranks are started again; None: there is none.

    As `change_in_place`, and no node has two parts of the job (`shares_node`).
    """
    base, change = job.base_allocation, change_in_place(job, target)
    if base is None or change is None:
        return None
    is_split = shares_node(base, [c.allocation for c in job.companions], change)
    return None if is_split else change


def shares_node(
    base: Allocation, companions: Sequence[Allocation], change: CompanionChange
) -> bool:
    """Return whether new companions hold GPUs of nodes on which the job holds others.

    The ranks of each would be numbered from 0 on that node (LOCAL_RANK), as each sees only its own
    GPUs: a program that is started again on them, and saves where that is 0, would do so twice.

    >>> base = Allocation.of("a100", {"g01": 1})
    >>> shares_node(base, (), CompanionChange((), (("g01", 3),)))
    True
    >>> shares_node(base, (), CompanionChange((), (("g02", 3),)))
    False
    """
    stay = [c for i, c in enumerate(companions) if i not in change.leave]
    nodes = [node for part in (base, *stay) for node in part.nodes]
    return any(node in nodes for node, _ in change.join)


def smaller_sizes(base: Allocation, companions: Sequence[Allocation]) -> frozenset[int]:
    """Return the numbers of GPUs that a job can shrink to by giving companions up.

    >>> base, two = Allocation.of("a100", {"g01": 1}), Allocation.of("a100", {"g02": 2})
    >>> sorted(smaller_sizes(base, (two, Allocation.of("a100", {"g03": 4}))))
    [1, 3, 5]
    """
    sums = {base.gpus}
    for companion in companions:
        sums |= {size + companion.gpus for size in sums}
    return frozenset(sums - {max(sums)})


def _subset(sizes: Iterable[tuple[int, int]], total: int) -> set[int] | None:
    """Return keys whose sizes have this sum, the first ones where there is a choice; or None."""
    reached: dict[int, set[int]] = {0: set()}
    for key, size in sizes:
        for partial, keys in list(reached.items()):
            if partial + size <= total:
                reached.setdefault(partial + size, keys | {key})
    return reached.get(total)
