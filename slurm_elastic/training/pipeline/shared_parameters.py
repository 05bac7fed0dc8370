"""Parameters that several ranks hold: replicas of a stage, and tied weights.

They begin with the values of the first rank that holds them, and their gradients are
added up over all ranks that do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist

from slurm_elastic.training.exchange.own_parameter import OwnParameter
from slurm_elastic.training.pipeline.gradients import FlatSum
from slurm_elastic.training.pipeline.stage_groups import RankDescription, StageGroups
from slurm_elastic.training.pipeline.stage_layout import LayoutError
from slurm_elastic.training.ranks.link_errors import link_errors


class SharedParameters:
    """Parameters of this rank's stages; the constructor is collective.

    Args:
        modules: of the stages held here.
        groups: all ranks.
        ties: sets of names of parameters that are one.
        holdings: description of each rank.
        device: of the parameters.

    Raises:
        LayoutError: tied parameters that are missing, or differ in type or shape.
        LinkError: another rank has ended.
    """

    def __init__(
        self,
        modules: Mapping[int, torch.nn.Module],
        groups: StageGroups,
        *,
        ties: Sequence[Sequence[str]],
        holdings: Sequence[RankDescription],
        device: torch.device,
    ) -> None:
        self._modules, self._groups, self._device = modules, groups, device
        #: Each parameter of the whole model is in this list on exactly one rank.
        self._counted: list[OwnParameter] = []
        self._stages = self._replicas({id(p) for names in ties for p in self._named(names)})
        self._tied = self._ties(ties, holdings)

    @property
    def bytes(self) -> int:
        """Bytes that this rank contributes to `add_up`."""
        return sum(total.bytes for total in [*self._stages.values(), *self._tied])

    def add_up(self, divisor: float) -> None:
        """Replace the gradients held here by those of the whole batch."""
        for total in [*self._stages.values(), *self._tied]:
            total.reduce(divisor)

    def add_up_stage(self, stage: int, divisor: float) -> None:
        """Replace the gradients of one stage likewise; tied parameters are left out."""
        self._stages[stage].reduce(divisor)

    def norm(self) -> float:
        """Return the norm of the gradient of the whole model; collective."""
        own = [p for p in self._counted if p.divided or self._groups.counts]
        gradients = [p.grad for p in own if p.grad is not None]
        squares = math.fsum(float(g.double().square().sum()) for g in gradients)
        return math.sqrt(self._groups.total([squares])[0])

    def _replicas(self, tied: set[int]) -> dict[int, FlatSum]:
        sums = {}
        for stage, ranks in enumerate(self._groups.layout.stages):
            group = self._groups.group(ranks)
            if stage not in self._modules:
                continue
            module = self._modules[stage]
            if group is not None:
                tensors = [OwnParameter(p).tensor for p in module.parameters()]
                self._equalise([*tensors, *module.buffers()], ranks[0], group)
            own = [OwnParameter(p) for p in module.parameters() if id(p) not in tied]
            self._counted += own if self._groups.rank == ranks[0] else []
            sums[stage] = FlatSum(
                [[p] for p in own], group=group, device=self._device, name=f"stage {stage}"
            )
        return sums

    def _ties(
        self, ties: Sequence[Sequence[str]], holdings: Sequence[RankDescription]
    ) -> list[FlatSum]:
        stages = self._groups.layout.stages
        first = [holdings[ranks[0]].parameters[stage] for stage, ranks in enumerate(stages)]
        sums = []
        for names in ties:
            ranks: list[int] = []
            kinds = []
            for name in names:
                holders = [
                    stage for stage, names_of_stage in enumerate(first) if name in names_of_stage
                ]
                if not holders:
                    raise LayoutError(
                        f"ties: {name!r} is invalid: expected names of parameters; no stage has it"
                    )
                ranks += [rank for stage in holders for rank in stages[stage]]
                kinds.append(first[holders[0]][name])
                if kinds[-1] != kinds[0]:
                    raise LayoutError(
                        f"ties: {names[0]} ({kinds[0]}) and {name} ({kinds[-1]}) are invalid:"
                        " expected equal type and shape"
                    )
            group = self._groups.group(ranks)
            parameters = self._named(names)
            if not parameters:
                continue
            if group is not None:
                self._equalise(parameters[:1], ranks[0], group)
            with torch.no_grad():
                for copy in parameters[1:]:
                    copy.copy_(parameters[0])
            own = [OwnParameter(p) for p in parameters]
            self._counted += own[:1] if self._groups.rank == ranks[0] else []
            name = " = ".join(names)
            sums.append(FlatSum([own], group=group, device=self._device, name=name))
        return sums

    def _equalise(self, tensors: Iterable[torch.Tensor], source: int, group: Any) -> None:
        """Set the tensors of all ranks of a group to the values of one."""
        for tensor in tensors:
            with link_errors(f"taking parameters from rank {source}"):
                dist.broadcast(tensor.detach(), self._groups.process(source), group=group)

    def _named(self, names: Sequence[str]) -> list[torch.nn.Parameter]:
        """Return those of the named parameters that are held here, each once."""
        parameters_by_name = {
            name: parameter
            for module in self._modules.values()
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        return list(
            {
                id(parameters_by_name[n]): parameters_by_name[n]
                for n in names
                if n in parameters_by_name
            }.values()
        )
