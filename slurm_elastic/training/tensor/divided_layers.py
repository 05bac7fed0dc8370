"""Division of a model's layers among the ranks of a tensor-parallel group.

Parameters of divided layers become DTensors, of which each rank has its part; optimizers,
checkpoints and norms see them under their names and whole shapes. The forward pass of such a layer
is replaced on the module itself, so that the model's own code calls it as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from slurm_elastic.training.ranks.subgroup import Subgroup
from slurm_elastic.training.ranks.torch_compat import forget_groups
from slurm_elastic.training.tensor.chunked_products import Chunking, column_product, row_product
from slurm_elastic.training.tensor.divided_attention import DividedAttention
from slurm_elastic.training.tensor.group_operations import OwnPart, WholeActivation
from slurm_elastic.training.tensor.layer_styles import LayerStyle, random_between
from slurm_elastic.training.tensor.own_randomness import own_randomness

#: Dimension along which the parameters of each style are cut, by name; others stay whole.
_CUTS = {
    LayerStyle.COLUMNS: {"weight": 0, "bias": 0},
    LayerStyle.COLLECTED: {"weight": 0, "bias": 0},
    LayerStyle.ROWS: {"weight": 1},
    LayerStyle.HEADS: {"in_proj_weight": 0, "out_proj.weight": 1},
}


class DividedLayers:
    """Divided layers of one model; the constructor replaces parameters and forward passes.

    Args:
        model: whole, the same on all ranks of the group.
        styles: of the layers to divide (`layer_styles`).
        group: of this rank, of more than one.
        name: of the mesh of the group; another one in each division of a process.
        chunking: of the tokens.
        mesh: of the group, part of a larger one; None: a mesh of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        styles: Mapping[str, LayerStyle],
        group: Subgroup,
        *,
        name: str,
        chunking: Chunking,
        mesh: Any = None,
    ) -> None:
        from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - slow

        if mesh is None:
            mesh = DeviceMesh.from_group(
                group.process_group, group.device.type, mesh_dim_names=(name,)
            )
        self._mesh: Any = mesh
        modules = dict(model.named_modules())
        self._changed: list[nn.Module] = []
        # Torch's transformer layers would compute with the weights themselves while they evaluate.
        self._fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        for dropout in random_between(model, styles):
            self._change(dropout, functools.partial(_dropped, dropout.forward, dropout, group))
        for layer_name, style in styles.items():
            module = modules[layer_name]
            for parameter_name, dim in _CUTS[style].items():
                self._cut(module, parameter_name, dim, group)
            self._change(module, _forward(module, style, group, chunking))

    def undo(self) -> None:
        """Give the modules their own forward passes back; their parameters stay as they are."""
        for module in self._changed:
            vars(module).pop("forward", None)
        torch.backends.mha.set_fastpath_enabled(self._fast_path)
        forget_groups(self._mesh)

    def _change(self, module: Any, forward: Callable[..., Any]) -> None:
        module.forward = forward
        self._changed.append(module)

    def _cut(self, module: nn.Module, name: str, dim: int, group: Subgroup) -> None:
        """Replace a parameter by a DTensor of which this rank has one of equal parts."""
        from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415 - slow

        path, _, name = name.rpartition(".")
        holder = module.get_submodule(path)
        whole = getattr(holder, name)
        if whole is None:
            return
        part = whole.detach().chunk(group.size, dim)[group.rank].clone()
        divided = DTensor.from_local(
            part,
            self._mesh,
            (Shard(dim),),
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        holder.register_parameter(name, nn.Parameter(divided, requires_grad=whole.requires_grad))


def _forward(
    module: Any, style: LayerStyle, group: Subgroup, chunking: Chunking
) -> Callable[..., Any]:
    if style is LayerStyle.HEADS:
        return DividedAttention(module, group, chunking)
    forward = _rows if style is LayerStyle.ROWS else _columns
    options = {} if style is LayerStyle.ROWS else {"collect": style is LayerStyle.COLLECTED}
    return functools.partial(forward, module, group, chunking, **options)


def _columns(
    layer: Any, group: Subgroup, chunking: Chunking, inputs: torch.Tensor, *, collect: bool
) -> torch.Tensor:
    """Return the output features of this rank, or of all."""
    bias = None if layer.bias is None else layer.bias.to_local()
    own = column_product(inputs, layer.weight.to_local(), bias, group, chunking)
    return WholeActivation.apply(own, -1, group) if collect else own


def _rows(layer: Any, group: Subgroup, chunking: Chunking, inputs: torch.Tensor) -> torch.Tensor:
    """Return the outputs, from the input features of this rank or from all."""
    if inputs.shape[-1] == layer.in_features:
        inputs = OwnPart.apply(inputs, -1, group)
    output = row_product(inputs, layer.weight.to_local(), group, chunking)
    return output if layer.bias is None else output + layer.bias.to(output.dtype)


def _dropped(
    forward: Callable[..., Any], dropout: nn.Dropout, group: Subgroup, inputs: torch.Tensor
) -> Any:
    with own_randomness(group, used=dropout.training and dropout.p > 0.0):
        return forward(inputs)
