"""The ranks of a pipeline meet: they compare what they hold and form their groups.

Everything here is collective, and fails on all ranks together: a rank that is not
content says so to the others, who would otherwise wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from slurm_elastic.training.parallel.torch_compat import before_destroying
from slurm_elastic.training.pipeline.stage_layout import LayoutError, StageLayout
from slurm_elastic.training.pipeline.stage_links import (
    NextLink,
    NextRank,
    PreviousLink,
    PreviousRank,
    SameRank,
    link_errors,
)


@dataclass(frozen=True, slots=True)
class RankDescription:
    """What a rank tells the others.

    Attributes:
        agreed: what must be equal everywhere, by name.
        parameters: of each stage held, name to (type, shape, trainable).
        complaint: why this rank cannot take part; "" if it can.
    """

    agreed: Mapping[str, str]
    parameters: Mapping[int, Mapping[str, tuple[str, tuple[int, ...], bool]]]
    complaint: str


class StageGroups:
    """This rank among those of a layout.

    Args:
        layout: all ranks of torch.distributed's default group; without one, a single rank.
        device: where tensors live.
        timeout_s: how long a rank waits for another.

    Attributes:
        rank: this one.
        all_ranks: the group of all ranks; None in a world of one.

    Raises:
        LayoutError: the layout is for another number of ranks.
        LinkError: a rank does not come.
    """

    def __init__(self, layout: StageLayout, *, device: torch.device, timeout_s: float) -> None:
        self.layout = layout
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank()
        size = 1 if alone else dist.get_world_size()
        if size != layout.world_size:
            raise LayoutError(
                f"layout {layout} is for {layout.world_size} rank(s), there are {size}"
                + ("; init_process_group comes first" if alone else "")
            )
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise LayoutError(f"a timeout of {timeout_s:g} s; give more than 0")
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: list[Any] = []
        self.all_ranks = self.group(range(size))

    def group(self, ranks: Sequence[int]) -> Any:
        """A process group, for all ranks to ask for in the same order; None for one rank."""
        members = sorted(set(ranks))
        if len(members) == 1:
            return None
        with link_errors(f"forming a group of ranks {', '.join(map(str, members))}"):
            made = dist.new_group(members, timeout=self._timeout)
        if self.rank in members:
            self._groups.append(made)
        return made

    def compare(self, mine: RankDescription) -> list[RankDescription]:
        """What all ranks hold.

        Raises:
            LayoutError: some rank complains, two differ where they must not, or two stages have
                parameters of one name.
        """
        all_of_them: list[Any] = [mine]
        if self.all_ranks is not None:
            all_of_them = [None] * self.layout.world_size
            with link_errors("comparing what ranks hold"):
                dist.all_gather_object(all_of_them, mine, group=self.all_ranks)
        for rank, other in enumerate(all_of_them):
            if other.complaint:
                raise LayoutError(f"rank {rank}: {other.complaint}")
        for rank, other in enumerate(all_of_them):
            for name, value in other.agreed.items():
                if value != all_of_them[0].agreed[name]:
                    raise LayoutError(
                        f"{name} is {value} on rank {rank}, {all_of_them[0].agreed[name]} on rank "
                        "0; all ranks need the same"
                    )
        holder: dict[str, int] = {}
        for stage, ranks in enumerate(self.layout.stages):
            for name in all_of_them[ranks[0]].parameters[stage]:
                if holder.setdefault(name, stage) != stage:
                    raise LayoutError(
                        f"stages {holder[name]} and {stage} both have a parameter {name}; give "
                        "layers names of the whole model, as cut does"
                    )
            for rank in ranks[1:]:
                first = all_of_them[ranks[0]].parameters[stage]
                if all_of_them[rank].parameters[stage] != first:
                    raise LayoutError(
                        f"stage {stage} has other parameters on rank {rank} than on rank "
                        f"{ranks[0]}: {_difference(all_of_them[rank].parameters[stage], first)}"
                    )
        return all_of_them

    def links(self) -> tuple[dict[int, dict[int, NextLink]], dict[int, dict[int, PreviousLink]]]:
        """Of each stage held here, the links to ranks of the following and former stage."""
        following: dict[int, dict[int, NextLink]] = {}
        former: dict[int, dict[int, PreviousLink]] = {}
        for stage in range(self.layout.last):
            these, those = self.layout.stages[stage], self.layout.stages[stage + 1]
            groups = (self.group([*these, *those]), self.group([*these, *those]))
            stride = math.lcm(len(these), len(those))
            met = {
                (these[micro % len(these)], those[micro % len(those)]) for micro in range(stride)
            }
            for one, other in sorted(met):
                if one == other == self.rank:
                    same = SameRank()
                    following.setdefault(stage, {})[other] = same
                    former.setdefault(stage + 1, {})[one] = same
                elif one == self.rank:
                    link = NextRank(other, groups=groups, stride=stride, device=self._device)
                    following.setdefault(stage, {})[other] = link
                elif other == self.rank:
                    back = PreviousRank(one, groups=groups, stride=stride, device=self._device)
                    former.setdefault(stage + 1, {})[one] = back
        return following, former

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks.

        Raises:
            LinkError: a rank is gone.
        """
        if self.all_ranks is None:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64, device=self._device)
        with link_errors("adding up losses over all ranks"):
            dist.all_reduce(summed, group=self.all_ranks)
        return [float(value) for value in summed.tolist()]

    def leave(self) -> None:
        """End the groups made here, together with the other ranks."""
        if self.all_ranks is not None:
            before_destroying()
        for group in reversed(self._groups):
            dist.destroy_process_group(group)
        self._groups.clear()


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    for name in [*one, *other]:
        if one.get(name) != other.get(name):
            return f"{name} is {_words(one.get(name))}, not {_words(other.get(name))}"
    return "in another order"


def _words(parameter: tuple[str, tuple[int, ...], bool] | None) -> str:
    if parameter is None:
        return "missing"
    dtype, shape, trainable = parameter
    return f"{dtype} {list(shape)}" + ("" if trainable else " (frozen)")
