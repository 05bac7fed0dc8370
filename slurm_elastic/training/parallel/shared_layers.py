"""Layers whose weights the ranks of a group share: of a model or of a rank's stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.training.parallel import unsharding
from slurm_elastic.training.parallel.rank_mesh import RankMesh
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.ranks.subgroup import subgroup
from slurm_elastic.training.tensor.chunked_products import Chunking
from slurm_elastic.training.tensor.divided_layers import DividedLayers
from slurm_elastic.training.tensor.layer_styles import LayerStyle, check_styles, layer_styles

#: Error of torch if a model computes with a DTensor and a plain tensor.
_MIXED = "got mixed torch.Tensor and DTensor"


class SharedLayers:
    """Division of layers among groups of consecutive ranks; the constructor is collective.

    Args:
        stages: of the whole model, in order; without stages the model.
        held: numbers of those that this rank holds. Their parameters take the values of the
            group's first rank, and are replaced.
        optimizer: of these parameters; afterwards of this rank's.
        size: ranks of a group, more than one.
        styles: of the script, by name or pattern of layers.
        tied: names of parameters that several stages have.
        rank_group: all ranks, connected.
        chunking: of the products.
        mesh: of replicas and groups, where both divide parameters; None: groups only do.
        log: takes one line for the job's log, on rank 0.

    Attributes:
        group: the ranks that share weights with this one.

    Raises:
        InvalidInputError: styles that do not fit the model, or an optimizer that cannot update it.
    """

    def __init__(
        self,
        stages: Sequence[torch.nn.Module],
        held: Sequence[int],
        optimizer: torch.optim.Optimizer,
        *,
        size: int,
        styles: Mapping[str, str],
        tied: Sequence[str] = (),
        rank_group: RankGroup,
        chunking: Chunking,
        mesh: RankMesh | None = None,
        log: Callable[[str], None],
    ) -> None:
        check_separate_updates(optimizer)
        check_styles(stages, size, styles)
        chosen = [layer_styles(stage, size, styles, tied=tied) for stage in stages]
        _check_ends(stages, chosen)
        if rank_group.rank == 0:
            count = sum(map(len, chosen))
            log(f"tensor={size}: {count} layers are divided among {size} ranks")
        world = range(rank_group.size)
        self.group = (
            mesh.group
            if mesh
            else subgroup(rank_group, [world[i : i + size] for i in world[::size]])
        )
        for number in held:
            values = stages[number].state_dict().values()
            self.group.broadcast(values, "copying the values of the first rank of a group")
        self._wholes = [unsharding.WholeModel(stages[number]) for number in held]
        whole_parameters = {number: dict(stages[number].named_parameters()) for number in held}
        self._divided = [
            DividedLayers(
                stages[number],
                chosen[number],
                self.group,
                name=f"tensor{number}{rank_group.prefix}",
                chunking=chunking,
                mesh=mesh.group_mesh if mesh else None,
            )
            for number in held
        ]
        replaced: dict[int, torch.nn.Parameter] = {}
        for number, parameters in whole_parameters.items():
            now = dict(stages[number].named_parameters())
            replaced |= {id(p): now[name] for name, p in parameters.items()}
        for options in optimizer.param_groups:
            options["params"] = [replaced[id(p)] for p in options["params"]]
        for whole in self._wholes:
            whole.free()

    def undo(self) -> None:
        """Give the modules their own forward passes and parameters back, with undefined values."""
        for divided in reversed(self._divided):
            divided.undo()
        for whole in self._wholes:
            whole.restore()


@contextlib.contextmanager
def weights_used_by_layers() -> Iterator[None]:
    """Run passes of a model with divided layers.

    Raises:
        InvalidInputError: the model computes with the weights of such a layer itself.
    """
    try:
        yield
    except RuntimeError as error:
        if _MIXED not in str(error):
            raise
        raise InvalidInputError(
            "tensor: the model computes with the weights of a divided layer itself: expected that"
            " it calls the layer; leave the layer out, by"
            " tensor_styles={'name of the layer': 'whole'}"
        ) from error


def _check_ends(
    stages: Sequence[torch.nn.Module], chosen: Sequence[Mapping[str, LayerStyle]]
) -> None:
    """Check that stages pass whole values on.

    Raises:
        InvalidInputError: a script's style leaves a part of the features at the end of one.
    """
    for stage, styles in zip(stages[:-1], chosen, strict=False):
        name = [child for child, _ in stage.named_children()][-1]
        if styles.get(name) is LayerStyle.COLUMNS:
            raise InvalidInputError(
                f"tensor_styles: {name!r} is the last layer of a stage: expected"
                f" {LayerStyle.COLLECTED.value!r} in place of {LayerStyle.COLUMNS.value!r}"
            )


def check_separate_updates(optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer updates parameters one by one.

    Raises:
        InvalidInputError: it updates several at once, which torch cannot do with divided ones.
    """
    for option in ("foreach", "fused"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise InvalidInputError(
                f"tensor: {type(optimizer).__name__}(..., {option}=True) is invalid with divided"
                f" layers: expected {option}=None; leave it out"
            )
