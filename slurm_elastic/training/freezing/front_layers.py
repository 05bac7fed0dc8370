"""The layers of a model in order, of which the first few can be frozen and thawed.

A frozen layer computes its forward pass and nothing else: its parameters need no gradient,
so the backward pass ends behind it, the reduction does not carry it, and the optimizer,
finding no gradient, leaves it and its state alone (zeros would not do: momentum and weight
decay would still move it). Its batch-norms use, and keep, their running statistics.

Layers are the entries of an `nn.Sequential` or `nn.ModuleList`, nested ones opened, else the
model's children in the order of their definition, which must be that of the forward pass;
another order would be as correct but save less. A normalisation, and what has no parameters,
belongs to the layer before it. A parameter that several layers share belongs to the last of
them: it freezes with that one.

>>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
>>> prefix = FrontLayers(net)
>>> prefix.names
('0', '2')
>>> prefix.set(1)
>>> [p.requires_grad for p in net.parameters()]
[False, False, True, True]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList)
_NORMS = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
)


@dataclass
class FreezableLayer:
    """Modules that are frozen and thawed as one.

    Attributes:
        name: of the first, within the model.
        modules: in their order; the first has the parameters.
        parameters: those that train and that no later layer shares.
    """

    name: str
    modules: list[torch.nn.Module]
    parameters: list[torch.nn.Parameter] = field(default_factory=list)

    def norms(self) -> Iterator[torch.nn.Module]:
        """Yield the modules with running statistics, such as batch-norms."""
        for module in self.modules:
            for inner in module.modules():
                if getattr(inner, "running_mean", None) is not None:
                    yield inner

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield the buffers, such as running statistics."""
        for module in self.modules:
            yield from module.buffers()


class FrontLayers:
    """Layers of a model, of which the first few can be frozen.

    Args:
        model: parameters without `requires_grad` stay as they are and do not count.

    Attributes:
        layers: those with parameters that train.
        frozen: number of layers, counted from the front, that do not train now.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.layers = _layers(model)
        self.frozen = 0
        self._was_training: dict[torch.nn.Module, bool] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(layer.name for layer in self.layers)

    def set(self, n: int) -> None:
        """Freeze the first `n` layers and thaw the others, between two steps.

        Raises:
            ValueError: a negative number, or too many; the last layer always trains.
        """
        if not 0 <= n < max(1, len(self.layers)):
            raise ValueError(
                f"frozen layers: {n} is invalid: expected 0 to {max(0, len(self.layers) - 1)}; the"
                " last layer always trains"
            )
        for i, layer in enumerate(self.layers):
            for parameter in layer.parameters:
                parameter.requires_grad_(i >= n)
                if i < n:
                    parameter.grad = None
            for norm in layer.norms():
                if i < n:
                    self._was_training.setdefault(norm, norm.training)
                elif norm in self._was_training:
                    norm.train(self._was_training.pop(norm))
        self.frozen = n
        self.hold()

    def hold(self) -> None:
        """Keep frozen batch-norms in evaluation mode, also after a script's `model.train()`."""
        for norm in self._was_training:
            if norm.training:
                norm.eval()

    def buffers(self, first: int, last: int) -> Iterator[torch.Tensor]:
        """Yield the buffers of layers `first` to `last`, the latter excluded."""
        for layer in self.layers[first:last]:
            yield from layer.buffers()

    def gradients(self) -> list[list[torch.Tensor]]:
        """Return the gradients of each layer that trains, from the front."""
        return [
            [p.grad for p in layer.parameters if p.grad is not None]
            for layer in self.layers[self.frozen :]
        ]


def _layers(model: torch.nn.Module) -> list[FreezableLayer]:
    layers: list[FreezableLayer] = []
    owner: dict[torch.nn.Parameter, FreezableLayer] = {}
    for name, module in _units(model):
        trained = [p for p in module.parameters() if p.requires_grad]
        if layers and (not trained or isinstance(module, _NORMS)):
            layers[-1].modules.append(module)
        else:
            layers.append(FreezableLayer(name, [module]))
        for parameter in trained:
            owner[parameter] = layers[-1]
    for parameter, layer in owner.items():
        layer.parameters.append(parameter)
    merged: list[FreezableLayer] = []
    for layer in layers:
        # Modules before the first parameters, or whose parameters later layers share.
        head = merged.pop().modules if merged and not merged[-1].parameters else []
        merged.append(FreezableLayer(layer.name, layer.modules + head, layer.parameters))
    return [layer for layer in merged if layer.parameters]


def _units(model: torch.nn.Module, path: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    children = list(model.named_children())
    for name, child in children:
        # A model around a single module has the layers of that module.
        wrapped = len(children) == 1 and any(True for _ in child.children())
        if isinstance(child, _CONTAINERS) or wrapped:
            yield from _units(child, f"{path}{name}.")
        else:
            yield f"{path}{name}", child
