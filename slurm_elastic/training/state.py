"""All that a training run is, as one flat dictionary of tensors under global names.

    model.<name>            parameters and buffers
    optim.<key>.<name>      optimizer state, e.g. optim.exp_avg.0.weight
    blob.<what>             plain values, as bytes: optimizer options, scheduler, the user's own

Names are those of the whole model, whoever holds it, so that any layout of
ranks can pick what it needs from what any other layout wrote.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from slurm_elastic.training.checkpoint import CheckpointError


class Stateful(Protocol):
    """What may join a checkpoint under a name of its own."""

    def state_dict(self) -> Any:
        """Tensors, numbers, text and containers of them."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take back what `state_dict` gave."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The live objects behind a checkpoint."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)

    def gather(self) -> dict[str, torch.Tensor]:
        """The flat dictionary; the tensors are the live ones, not copies."""
        flat = {f"model.{k}": v.detach() for k, v in self.model.state_dict().items()}
        values: dict[str, dict[str, Any]] = {}
        for name, parameter in self._named():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    flat[f"optim.{key}.{name}"] = value.detach()
                else:
                    values.setdefault(name, {})[key] = value
        flat["blob.optim"] = _pack("the optimizer", {"values": values, "options": self._options()})
        if self.scheduler is not None:
            flat["blob.scheduler"] = _pack("the scheduler", self.scheduler.state_dict())
        for name, item in self.extra.items():
            flat[f"blob.extra.{name}"] = _pack(f"extra {name!r}", item.state_dict())
        return flat

    def restore(self, flat: Mapping[str, torch.Tensor]) -> None:
        """Take back what `gather` gave, in place.

        Raises:
            CheckpointError: it is of another model, optimizer, or set of extras.
        """
        self._restore_model(flat)
        self._restore_optimizer(flat)
        others = {f"extra.{name}": item for name, item in self.extra.items()}
        if self.scheduler is not None:
            others["scheduler"] = self.scheduler
        for name, item in others.items():
            if f"blob.{name}" not in flat:
                raise CheckpointError(f"the checkpoint has no {name}")
            item.load_state_dict(_unpack(flat[f"blob.{name}"]))

    def _restore_model(self, flat: Mapping[str, torch.Tensor]) -> None:
        there = {k.removeprefix("model."): v for k, v in flat.items() if k.startswith("model.")}
        here = self.model.state_dict()
        for name in sorted(here.keys() | there.keys()):
            if name not in there or name not in here:
                where = "model" if name in here else "checkpoint"
                raise CheckpointError(
                    f"the checkpoint is of another model: only the {where} has {name}"
                )
            if here[name].shape != there[name].shape:
                raise CheckpointError(
                    f"the checkpoint is of another model: {name} is {_shape(there[name])} there"
                    f" and {_shape(here[name])} here"
                )
        self.model.load_state_dict(there)

    def _restore_optimizer(self, flat: Mapping[str, torch.Tensor]) -> None:
        saved = _unpack(flat["blob.optim"])
        options: dict[str, dict[str, Any]] = {}
        for group in saved["options"]:
            values = {k: v for k, v in group.items() if k != "names"}
            options.update(dict.fromkeys(group["names"], values))
        state: dict[str, dict[str, Any]] = {k: dict(v) for k, v in saved["values"].items()}
        for name, key, value in _optimizer_entries(flat, options):
            state.setdefault(name, {})[key] = value
        names = {id(p): name for name, p in self._named()}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                if name not in options:
                    raise CheckpointError(f"the checkpoint's optimizer does not know {name}")
                on_device = group.get("capturable") or group.get("fused")
                if name in state:
                    self.optimizer.state[parameter] = {
                        # Adam's counter stays on the CPU unless its kernel wants it elsewhere.
                        key: _like(value, parameter, keep=key == "step" and not on_device)
                        for key, value in state[name].items()
                    }
            if group["params"]:
                group.update(options[names[id(group["params"][0])]])

    def _options(self) -> list[dict[str, Any]]:
        names = {id(p): name for name, p in self._named()}
        return [
            {k: v for k, v in group.items() if k != "params"}
            | {"names": [names[id(p)] for p in group["params"]]}
            for group in self.optimizer.param_groups
        ]

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self.model.named_parameters()


def check(state: State) -> None:
    """Refuse what could not be saved by name.

    Raises:
        ValueError: a parameter of the optimizer is not one of the model's.
    """
    known = {id(p) for p in state.model.parameters()}
    for i, group in enumerate(state.optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ValueError(
                    f"parameter {j} of the optimizer's group {i} ({_shape(parameter)}) is not one"
                    " of the model's; make it one, so that it has a name to be saved under"
                )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, so that equal means equal, NaN and signed zero included."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _optimizer_entries(
    flat: Mapping[str, torch.Tensor], names: Mapping[str, Any]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(parameter, key, value) of each optimizer tensor; both parts of its name may hold dots."""
    for full, value in flat.items():
        if not full.startswith("optim."):
            continue
        key, _, name = full.removeprefix("optim.").partition(".")
        while name and name not in names:
            more, _, name = name.partition(".")
            key = f"{key}.{more}"
        if name:
            yield name, key, value


def _like(value: Any, parameter: torch.Tensor, *, keep: bool) -> Any:
    if not isinstance(value, torch.Tensor) or keep:
        return value
    return value.to(parameter.device)


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(str(n) for n in tensor.shape) or "scalar"


def _pack(what: str, value: Any) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    packed = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    try:
        _unpack(packed)
    except (OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
        # Better now than when the job has lost its nodes.
        raise CheckpointError(
            f"{what} cannot be saved: its state_dict() may hold tensors, numbers, text and"
            f" containers of them, nothing else ({str(error).splitlines()[0]})"
        ) from None
    return packed


def _unpack(packed: torch.Tensor) -> Any:
    # weights_only: a checkpoint directory is data, and may never run code.
    return torch.load(io.BytesIO(bytes(packed.numpy())), weights_only=True, map_location="cpu")
