"""Parameters that several ranks hold: replicas of a stage, and tied weights.

They begin with the values of the first rank that holds them, and their gradients are
added up over all ranks that do. Replicas of a stage may divide the state of the optimizer; tied
parameters are updated by all ranks that hold them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist

from slurm_elastic.training.exchange.own_parameter import OwnParameter
from slurm_elastic.training.exchange.sliced_exchange import SlicedExchange
from slurm_elastic.training.pipeline.gradients import FlatSum, GradientSum, SlicedSum
from slurm_elastic.training.pipeline.stage_groups import RankDescription, StageGroups
from slurm_elastic.training.pipeline.stage_layout import LayoutError
from slurm_elastic.training.ranks.link_errors import link_errors
from slurm_elastic.training.ranks.subgroup import Subgroup

#: Makes the subgroup of these ranks of torch's default group, which have this process group.
MakeSubgroup = Callable[[Sequence[int], Any], Subgroup]


class SharedParameters:
    """Parameters of this rank's stages; the constructor is collective.

    Args:
        modules: of the stages held here.
        groups: all ranks.
        ties: sets of names of parameters that are one.
        holdings: description of each rank.
        device: of the parameters.
        make_subgroup: of the replicas of a stage, which divide the state of the optimizer; None:
            each replica has all of it.

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
        make_subgroup: MakeSubgroup | None = None,
    ) -> None:
        self._modules, self._groups, self._device = modules, groups, device
        #: Each gradient of the whole model is that of a parameter in this list on exactly one rank.
        self._counted: list[OwnParameter] = []
        self._stages = self._replicas(tied_ids(modules, ties), make_subgroup)
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

    def begin_last_pass(self, stage: int) -> None:
        """Begin the backward pass after which this rank's gradients of a stage are complete."""
        total = self._stages[stage]
        if isinstance(total, SlicedSum):
            total.exchange.begin_last_pass()

    def send_weights(self) -> None:
        """Begin to send what this rank has updated to the replicas that do not."""
        for exchange in self._exchanges():
            exchange.send_weights()

    def receive_weights(self) -> None:
        """Wait for all weights that other replicas have updated."""
        for exchange in self._exchanges():
            exchange.receive_weights()

    def close(self) -> None:
        """Wait for these weights, and remove the hooks of the exchange."""
        for exchange in self._exchanges():
            exchange.close()

    def _exchanges(self) -> list[SlicedExchange]:
        return [total.exchange for total in self._stages.values() if isinstance(total, SlicedSum)]

    def _replicas(
        self, tied: set[int], make_subgroup: MakeSubgroup | None
    ) -> dict[int, GradientSum]:
        sums: dict[int, GradientSum] = {}
        for stage, ranks in enumerate(self._groups.layout.stages):
            group = self._groups.group(ranks)
            if stage not in self._modules:
                continue
            module = self._modules[stage]
            if group is not None:
                tensors = [OwnParameter(p).tensor for p in module.parameters()]
                self._equalise([*tensors, *module.buffers()], ranks[0], group)
            own = [OwnParameter(p) for p in module.parameters() if id(p) not in tied]
            if make_subgroup and group is not None:
                processes = [self._groups.process(rank) for rank in sorted(ranks)]
                sums[stage] = SlicedSum(module, make_subgroup(processes, group), excluded=tied)
                self._counted += own  # each has a gradient at its owner only
                continue
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
            parameters = _named(self._modules, names)
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


def tied_ids(modules: Mapping[int, torch.nn.Module], ties: Iterable[Sequence[str]]) -> set[int]:
    """Return the ids of the tied parameters of some stages.

    Args:
        modules: the stages.
        ties: sets of names of parameters that are one.
    """
    return {id(p) for names in ties for p in _named(modules, names)}


def _named(
    modules: Mapping[int, torch.nn.Module], names: Sequence[str]
) -> list[torch.nn.Parameter]:
    """Return those of the named parameters that some stages have, each once."""
    by_name = {
        name: parameter
        for module in modules.values()
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    return list({id(by_name[n]): by_name[n] for n in names if n in by_name}.values())
