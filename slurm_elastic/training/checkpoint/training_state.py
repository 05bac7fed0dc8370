"""State of a training run as one flat dictionary of tensors under global names.

    model.<name>            parameters and buffers
    optim.<key>.<name>      optimizer state, e.g. optim.exp_avg.0.weight
    blob.<what>             plain values, as bytes: optimizer options, scheduler, the user's own

Names are those of the whole model, on all ranks, so that any layout can read
its part from a checkpoint of any other layout. A rank that holds only some
layers contributes only theirs; global values come from part 0.

A user's own state needs two methods (`Stateful`), for example a running mean of the weights:

    class Averaged:
        def __init__(self, model):
            self.mean = {name: p.detach().clone() for name, p in model.named_parameters()}

        def update(self, model):             # after each job.step(batch)
            for name, p in model.named_parameters():
                self.mean[name].lerp_(p.detach(), 0.01)

        def state_dict(self):
            return self.mean

        def load_state_dict(self, state):
            for name, value in state.items():
                self.mean[name].copy_(value)

    job = init(..., extra={"averaged": averaged})
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from slurm_elastic.training.checkpoint import shards
from slurm_elastic.training.checkpoint.checkpoint_directory import CheckpointError

_REMEDY = "choose another checkpoint_dir, or use the former model"
_MODEL, _OPTIM, _OPTIONS = "model.", "optim.", "blob.optim"


class Stateful(Protocol):
    """Object of the script that is saved in checkpoints under a name of its own.

    Rank 0's state is saved, and restored on every rank: it has to be the same on all ranks, or to
    matter on rank 0 only.
    """

    def state_dict(self) -> Any:
        """Return tensors, numbers, text and containers of them."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore a state that `state_dict` returned."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Live objects of a training run, as far as this rank holds them.

    Attributes:
        model: its `state_dict` and `named_parameters` have names of the whole model, also where
            it is only some layers of it.
        optimizer: of its parameters; groups may be empty.
        scheduler: None: there is none.
        extra: the user's own, by name.
        full_shapes: names and shapes of the whole model's `state_dict`; None: `model` is the whole.
        aliases: for tied parameters, a name to the one under which their optimizer state is kept,
            in all layouts the one that comes first in the whole model.
        part: number of this part of the run's state; part 0 includes scheduler and extras.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)
    full_shapes: Mapping[str, Sequence[int]] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    part: int = 0

    def gather(self) -> dict[str, torch.Tensor]:
        """Return the flat dictionary; the tensors are the live ones, not copies.

        Raises:
            CheckpointError: a `state_dict` holds objects that could not be read again.
        """
        flat = {f"{_MODEL}{k}": v.detach() for k, v in self.model.state_dict().items()}
        values: dict[str, dict[str, Any]] = {}
        for name, parameter in self._named():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    flat[f"{_OPTIM}{key}.{name}"] = value.detach()
                else:
                    values.setdefault(name, {})[key] = value
        blob = f"{_OPTIONS}.{self.part}" if self.part else _OPTIONS
        flat[blob] = pack("the optimizer", {"values": values, "options": self._options()})
        if self.part:
            return flat
        if self.scheduler is not None:
            flat["blob.scheduler"] = pack("the scheduler", self.scheduler.state_dict())
        for name, item in self.extra.items():
            flat[f"blob.extra.{name}"] = pack(f"extra {name!r}", item.state_dict())
        return flat

    def fits(self, shapes: Mapping[str, Sequence[int] | None]) -> None:
        """Compare with the whole model, before anything is read.

        Args:
            shapes: of all tensors of a checkpoint, by full name; None where unknown.

        Raises:
            CheckpointError: it is of another model.
        """
        saved_shapes = _part_of(shapes, _MODEL)
        live_shapes = self._shapes()
        for name in sorted(live_shapes.keys() | saved_shapes.keys()):
            if name not in saved_shapes or name not in live_shapes:
                where = "model" if name in live_shapes else "checkpoint"
                raise CheckpointError(
                    f"the checkpoint is of another model: only the {where} has {name}; {_REMEDY}"
                )
            compare(name, saved=saved_shapes[name], live=live_shapes[name])

    def needs(self, names: Iterable[str]) -> list[str]:
        """Return those of a checkpoint's names that `restore` reads."""
        model = self.model.state_dict().keys()
        parameters = {name for name, _ in self._named()}
        return [
            full
            for full in names
            if full.startswith("blob.")
            or (full.startswith(_MODEL) and full.removeprefix(_MODEL) in model)
            or (full.startswith(_OPTIM) and _split(full, parameters) is not None)
        ]

    def restore(self, flat: Mapping[str, torch.Tensor]) -> None:
        """Restore the state that `gather` returned, in place; `flat` may hold more than this part.

        Each tensor is read once, when it is needed.

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
                raise CheckpointError(
                    f"the checkpoint has no {name}; choose another checkpoint_dir, or leave it out"
                )
            item.load_state_dict(unpack(flat[f"blob.{name}"]))

    def _restore_model(self, flat: Mapping[str, torch.Tensor]) -> None:
        live_tensors = self.model.state_dict()
        elsewhere = [f"{_MODEL}{name}" for name in self._shapes() if name not in live_tensors]
        self.fits(dict.fromkeys([*elsewhere, *flat]))
        restored = {}
        for name, live in live_tensors.items():
            saved = flat[f"{_MODEL}{name}"]
            compare(name, saved=saved.shape, live=live.shape)
            restored[name] = shards.like(saved, live)
        self.model.load_state_dict(restored)

    def _restore_optimizer(self, flat: Mapping[str, torch.Tensor]) -> None:
        saved = [unpack(flat[name]) for name in _option_blobs(flat)]
        options, values = _merged(saved)
        keys: dict[str, dict[str, str]] = {}
        for full in flat:
            if full.startswith(_OPTIM) and (parts := _split(full, options)) is not None:
                keys.setdefault(parts[1], {})[parts[0]] = full
        names = {id(p): name for name, p in self._named()}
        for i, group in enumerate(self.optimizer.param_groups):
            held = [names[id(p)] for p in group["params"]]
            for name, parameter in zip(held, group["params"], strict=True):
                if name not in options:
                    raise CheckpointError(
                        f"the checkpoint is of another optimizer: it has no {name}; choose another"
                        " checkpoint_dir, or use the former optimizer"
                    )
                tensors = {key: flat[full] for key, full in keys.get(name, {}).items()}
                if tensors or name in values:
                    merged = values.get(name, {}) | tensors
                    self.optimizer.state[parameter] = _placed(merged, parameter, group)
            if held:
                group.update(options[held[0]])
            elif all(len(blob["options"]) == len(self.optimizer.param_groups) for blob in saved):
                # Another rank holds these parameters; a scheduler still changes this group.
                group.update(_without(saved[0]["options"][i], "names"))

    def _options(self) -> list[dict[str, Any]]:
        names = {id(p): name for name, p in self._named()}
        return [
            _without(group, "params") | {"names": [names[id(p)] for p in group["params"]]}
            for group in self.optimizer.param_groups
        ]

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            yield self.aliases.get(name, name), parameter

    def _shapes(self) -> Mapping[str, Sequence[int]]:
        if self.full_shapes is not None:
            return self.full_shapes
        return {name: tensor.shape for name, tensor in self.model.state_dict().items()}


def check(state: TrainingState) -> None:
    """Check that all parameters can be saved by name.

    Raises:
        ValueError: a parameter of the optimizer is not one of the model's.
    """
    parameter_ids = {id(p) for p in state.model.parameters()}
    for i, group in enumerate(state.optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            if id(parameter) not in parameter_ids:
                raise ValueError(
                    f"optimizer: parameter {j} of group {i} ({_shape(parameter.shape)}) is invalid:"
                    " expected a parameter of the model; register it in a module of the model, so"
                    " that it has a name in checkpoints"
                )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes, shape (bytes,), for comparisons that distinguish NaN and -0."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _part_of(
    shapes: Mapping[str, Sequence[int] | None], prefix: str
) -> dict[str, Sequence[int] | None]:
    return {k.removeprefix(prefix): v for k, v in shapes.items() if k.startswith(prefix)}


def compare(name: str, *, saved: Sequence[int] | None, live: Sequence[int]) -> None:
    """Compare the shapes of a tensor.

    Raises:
        CheckpointError: they differ.
    """
    if saved is not None and tuple(saved) != tuple(live):
        raise CheckpointError(
            f"the checkpoint is of another model: {name} is {_shape(saved)} in the checkpoint"
            f" and {_shape(live)} in the model; {_REMEDY}"
        )


def _option_blobs(names: Iterable[str]) -> list[str]:
    """Return the names of the writers' optimizer options, part 0 first."""
    blob_names = [n for n in names if n == _OPTIONS or n.startswith(f"{_OPTIONS}.")]
    return sorted(blob_names, key=lambda n: int(n.removeprefix(_OPTIONS).lstrip(".") or 0))


def _merged(
    blobs: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the options, and the plain values, of each parameter."""
    options: dict[str, dict[str, Any]] = {}
    state: dict[str, dict[str, Any]] = {}
    for blob in blobs:
        for group in blob["options"]:
            for name in group["names"]:
                options.setdefault(name, _without(group, "names"))
        for name, values in blob["values"].items():
            state.setdefault(name, {}).update(values)
    return options, state


def _split(full: str, names: Container[str]) -> tuple[str, str] | None:
    """Return (key, parameter) of an optimizer tensor's name; both may contain dots."""
    key, _, name = full.removeprefix(_OPTIM).partition(".")
    while name and name not in names:
        more, _, name = name.partition(".")
        key = f"{key}.{more}"
    return (key, name) if name else None


def _placed(
    state: Mapping[str, Any], parameter: torch.nn.Parameter, group: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a parameter's optimizer state, sharded and placed as the parameter is."""
    on_device = group.get("capturable") or group.get("fused")
    placed = {}
    for key, value in state.items():
        # Adam's counter stays on the CPU unless its kernel needs it on the device.
        if isinstance(value, torch.Tensor) and (key != "step" or on_device):
            value = shards.like(value, parameter).to(parameter.device)  # noqa: PLW2901
        placed[key] = value
    return placed


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k != name}


def _shape(shape: Sequence[int]) -> str:
    return "x".join(str(n) for n in shape) or "scalar"


def pack(name: str, value: Any) -> torch.Tensor:
    """Return a value as a tensor of bytes.

    Raises:
        CheckpointError: it could not be read again.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        packed = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        unpack(packed)
    except (
        AttributeError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
        pickle.PickleError,
    ) as error:
        # Fail at the first save, not when the job has lost its nodes.
        raise CheckpointError(
            f"{name} cannot be saved: expected only tensors, numbers, text and containers of them"
            f" in its state_dict() ({str(error).splitlines()[0]})"
        ) from None
    return packed


def unpack(packed: torch.Tensor) -> Any:
    """Return the value of `pack`."""
    # weights_only: a checkpoint directory is data, and may never run code.
    return torch.load(io.BytesIO(bytes(packed.numpy())), weights_only=True, map_location="cpu")
