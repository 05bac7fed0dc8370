"""Parts of execution plans that a training can carry out, found without dividing anything.

A part is named only if nothing rules it out that is known before the first step. The computation in
a model's own `forward` is not known, such as products with the weights of a layer that it does not
call; there an ordered plan ends in an error of the library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.core.execution.execution_plan import Sharding
from slurm_elastic.core.execution.supported_options import (
    MAX_STAGES,
    TENSOR_DEGREES,
    SupportedOptions,
)
from slurm_elastic.training.measure.layer_profile import layers_of
from slurm_elastic.training.parallel.fsdp import unsupported
from slurm_elastic.training.parallel.shared_layers import check_separate_updates
from slurm_elastic.training.tensor.layer_styles import LayerStyle, check_styles, layer_styles
from slurm_elastic.training.tied_parameters import ties

#: Optimizers that update divided parameters exactly like whole ones. Rprop, Adafactor and Muon do
#: not; it is not known of other libraries' ones, and of Adagrad, whose state is in some releases
#: that of whole parameters.
_OPTIMIZERS = (
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.SGD,
)  # fmt: skip


def supported_options(
    model: nn.Module,
    layers: Sequence[tuple[str, nn.Module]],
    optimizer: torch.optim.Optimizer,
    *,
    recompute: bool,
    restricted: bool,
    undivided: str,
    styles: Mapping[str, str],
    own_sharding: Sharding = Sharding.NONE,
    own_tensor: int = 1,
) -> SupportedOptions:
    """Return the parts of execution plans that a training can carry out.

    Args:
        model: whole, not divided yet, and without recomputation.
        layers: its layers in order; empty: it cannot be cut. More stages than layers with
            parameters are not worth a try.
        optimizer: of its parameters.
        recompute: the script asks for recomputation.
        restricted: the script has settings or objects that go with whole replicas only.
        undivided: why layers cannot be divided among ranks, or "".
        styles: of the script, for layers that ranks share.
        own_sharding: what replicas divide by the script's own choice.
        own_tensor: ranks that share layers by the script's own choice.
    """
    own = SupportedOptions(
        recompute=recompute,
        recomputable=_recomputable(model),
        own_sharding=own_sharding,
        own_tensor=own_tensor,
    )
    if restricted:
        return own
    with_parameters = sum(any(True for _ in module.parameters()) for _, module in layers)
    parts = type(optimizer) in _OPTIMIZERS and not _compiled(model)
    tensor = parts and not undivided and _divisible(model, optimizer, styles)
    shard = parts and _shardable(model)
    stages = min(max(1, with_parameters), MAX_STAGES)
    return replace(
        own,
        stages=stages,
        tensor=tensor,
        shard=shard,
        mesh=tensor and shard,
        slices=tensor,
        sliced_stages=stages > 1,
    )


def _recomputable(model: nn.Module) -> bool:
    """Return whether most layers with parameters can run again in the backward pass."""
    layers = [m for _, m in layers_of(model) if any(True for _ in m.parameters())]
    able = [m for m in layers if not any(True for _ in m.buffers())]
    return not _compiled(model) and 2 * len(able) > len(layers) > 1


def _divisible(
    model: nn.Module, optimizer: torch.optim.Optimizer, styles: Mapping[str, str]
) -> bool:
    """Return whether groups of each size divide some layer, and nothing is refused."""
    if any(style != LayerStyle.WHOLE.value for style in styles.values()):
        return False  # which sizes its own attention allows, only the script knows
    try:
        check_separate_updates(optimizer)
        check_styles([model], max(TENSOR_DEGREES), styles)
    except InvalidInputError:
        return False
    return all(layer_styles(model, size, styles) for size in TENSOR_DEGREES)


def _shardable(model: nn.Module) -> bool:
    """Return whether FSDP2 takes the model's parameters and layers."""
    parameters = list(model.parameters())
    if unsupported() or any(p.dim() == 0 for p in parameters):
        return False
    if len({p.dtype for p in parameters if p.requires_grad}) != 1:
        return False
    # Parameters are gathered by the calls of layers; modules that are not called only hold others.
    layers = [] if ties(model) else [module for _, module in layers_of(model)]
    return all(
        type(layer).forward is not nn.Module.forward
        for layer in layers
        if any(True for _ in layer.parameters())
    )


def _compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
