"""Process groups of a pipeline, and the comparison of what its ranks hold.

Everything here is collective, and fails on all ranks together: a rank with an error
sends it to the others, which would otherwise wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from slurm_elastic.training.pipeline.stage_layout import LayoutError, StageLayout
from slurm_elastic.training.pipeline.stage_links import (
    NextLink,
    NextRank,
    PreviousLink,
    PreviousRank,
    SameRank,
)
from slurm_elastic.training.ranks.link_errors import link_errors
from slurm_elastic.training.ranks.subgroup import Subgroup
from slurm_elastic.training.ranks.torch_compat import settle_collectives


@dataclass(frozen=True, slots=True)
class RankDescription:
    """Arguments and parameters of one rank, for the comparison with the others.

    Attributes:
        agreed: values that must be equal on all ranks, by name.
        parameters: of each stage held, name to (type, shape, trainable).
        error: an invalid argument of this rank, or "".
    """

    agreed: Mapping[str, str]
    parameters: Mapping[int, Mapping[str, tuple[str, tuple[int, ...], bool]]]
    error: str


class StageGroups:
    """Process groups of a layout, on one of its ranks.

    Args:
        layout: of all ranks of torch.distributed's default group; without one, a single rank.
        device: of the tensors.
        timeout_s: how long a rank waits for another.
        tensor_group: ranks that share the weights of this stage; None: this one alone. Each rank of
            the layout then stands for as many consecutive ranks, and every group made here is one
            of ranks with the same part of the weights.

    Attributes:
        rank: this one, as the layout counts.
        all_ranks: the group of all ranks; None for a single rank.

    Raises:
        LayoutError: the layout is for another number of ranks.
        LinkError: another rank has ended, or the timeout has passed.
    """

    def __init__(
        self,
        layout: StageLayout,
        *,
        device: torch.device,
        timeout_s: float,
        tensor_group: Subgroup | None = None,
    ) -> None:
        self.layout, self._tensor_group = layout, tensor_group
        self.tensor_size = tensor_group.size if tensor_group else 1
        alone = not (dist.is_available() and dist.is_initialized())
        world_size = 1 if alone else dist.get_world_size()
        process: int = 0 if alone else dist.get_rank()
        self.rank, self._part = divmod(process, self.tensor_size)
        size = world_size // self.tensor_size
        if size != layout.world_size:
            raise LayoutError(
                f"layout {layout} is invalid: expected one for {size} rank(s), not"
                f" {layout.world_size}" + ("; call init_process_group first" if alone else "")
            )
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise LayoutError(f"timeout_s: {timeout_s:g} is invalid: expected a number above 0")
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: list[Any] = []
        self._one_part = self.group(range(size))
        self.all_ranks = self._one_part
        if self.tensor_size > 1:
            self.all_ranks = self._new_group(range(world_size))

    @property
    def counts(self) -> bool:
        """Whether this rank is the first of those that share the weights of its stage."""
        return self._part == 0

    def process(self, rank: int) -> int:
        """Return the rank of torch's default group that a rank of the layout is here."""
        return rank * self.tensor_size + self._part

    def group(self, ranks: Sequence[int]) -> Any:
        """Return a process group, None for one rank; all ranks call this in the same order."""
        members = sorted(set(ranks))
        if len(members) == 1:
            return None
        own = None
        for part in range(self.tensor_size):
            group = self._new_group([rank * self.tensor_size + part for rank in members])
            own = group if part == self._part else own
        return own

    def _new_group(self, processes: Sequence[int]) -> Any:
        with link_errors(f"forming a group of ranks {', '.join(map(str, processes))}"):
            group = dist.new_group(list(processes), timeout=self._timeout)
        if self.process(self.rank) in processes:
            self._groups.append(group)
        return group

    def compare(self, own: RankDescription) -> list[RankDescription]:
        """Return the descriptions of all ranks.

        Raises:
            LayoutError: a rank has an error, two differ where they must not, or two stages have
                parameters of one name.
        """
        descriptions: list[Any] = [own]
        if self._one_part is not None:
            descriptions = [None] * self.layout.world_size
            with link_errors("comparing what ranks hold"):
                dist.all_gather_object(descriptions, own, group=self._one_part)
        for rank, other in enumerate(descriptions):
            if other.error:
                raise LayoutError(f"rank {rank}: {other.error}")
        for rank, other in enumerate(descriptions):
            for name, value in other.agreed.items():
                if value != descriptions[0].agreed[name]:
                    raise LayoutError(
                        f"{name}: {value} on rank {rank} is invalid: expected "
                        f"{descriptions[0].agreed[name]} as on rank 0; pass the same on all ranks"
                    )
        holder: dict[str, int] = {}
        for stage, ranks in enumerate(self.layout.stages):
            for name in descriptions[ranks[0]].parameters[stage]:
                if holder.setdefault(name, stage) != stage:
                    raise LayoutError(
                        f"stage {stage}: parameter name {name!r} is invalid: expected names that "
                        f"no other stage has, but stage {holder[name]} has it; name layers as "
                        "`cut` does"
                    )
            for rank in ranks[1:]:
                first = descriptions[ranks[0]].parameters[stage]
                if descriptions[rank].parameters[stage] != first:
                    raise LayoutError(
                        f"stage {stage}: parameters of rank {rank} are invalid: expected those of "
                        f"rank {ranks[0]}: "
                        f"{_difference(descriptions[rank].parameters[stage], first)}"
                    )
        return descriptions

    def links(self) -> tuple[dict[int, dict[int, NextLink]], dict[int, dict[int, PreviousLink]]]:
        """Return, for each stage held here, the links to ranks of the next and previous stage."""
        following: dict[int, dict[int, NextLink]] = {}
        former: dict[int, dict[int, PreviousLink]] = {}
        for stage in range(self.layout.last):
            senders, receivers = self.layout.stages[stage], self.layout.stages[stage + 1]
            groups = (self.group([*senders, *receivers]), self.group([*senders, *receivers]))
            stride = math.lcm(len(senders), len(receivers))
            pairs = {
                (senders[micro % len(senders)], receivers[micro % len(receivers)])
                for micro in range(stride)
            }
            for sender, receiver in sorted(pairs):
                if sender == receiver == self.rank:
                    link_to_self = SameRank()
                    following.setdefault(stage, {})[receiver] = link_to_self
                    former.setdefault(stage + 1, {})[sender] = link_to_self
                elif sender == self.rank:
                    link = NextRank(
                        self.process(receiver),
                        groups=groups,
                        stride=stride,
                        device=self._device,
                        tensor_group=self._tensor_group,
                    )
                    following.setdefault(stage, {})[receiver] = link
                elif receiver == self.rank:
                    back = PreviousRank(
                        self.process(sender),
                        groups=groups,
                        stride=stride,
                        device=self._device,
                        tensor_group=self._tensor_group,
                    )
                    former.setdefault(stage + 1, {})[sender] = back
        return following, former

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of the values over all ranks.

        Raises:
            LinkError: a rank has ended.
        """
        if self.all_ranks is None:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64, device=self._device)
        with link_errors("adding up losses over all ranks"):
            dist.all_reduce(summed, group=self.all_ranks)
        return [float(value) for value in summed.tolist()]

    def leave(self) -> None:
        """End the groups made here; collective."""
        if self.all_ranks is not None:
            settle_collectives()
        for group in reversed(self._groups):
            dist.destroy_process_group(group)
        self._groups.clear()


def _difference(own: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    for name in [*own, *expected]:
        if own.get(name) != expected.get(name):
            return f"{name} is {_described(own.get(name))}, not {_described(expected.get(name))}"
    return "in another order"


def _described(parameter: tuple[str, tuple[int, ...], bool] | None) -> str:
    if parameter is None:
        return "missing"
    dtype, shape, trainable = parameter
    return f"{dtype} {list(shape)}" + ("" if trainable else " (frozen)")
