"""State of a script's own objects as one flat dictionary of tensors.

    model.<path>           tensors of the object that is named `model`, by their path in its
    optimizer.<path>       `state_dict()`, for example optimizer.state.0.exp_avg
    blob.object.<name>     everything else of that `state_dict()`, and its form

Any object with `state_dict` and `load_state_dict` can be saved. State that all replicas have in
common is saved once, by rank 0, and restored on all ranks; of a DTensor, as `fully_shard` makes
them, each rank saves and reads its part, on any number of ranks. A module is saved without the
wrappers that DistributedDataParallel and `torch.compile` put around it, so that it does not matter
whether a run has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.training.checkpoint import shards
from slurm_elastic.training.checkpoint.checkpoint_coordinator import CheckpointError
from slurm_elastic.training.checkpoint.training_state import Stateful, compare, pack, unpack

_BLOB = "blob.object."
#: Key of the dictionary that stands for a tensor.
_TENSOR = "slurm_elastic.tensor"
_REMEDY = "choose another checkpoint_dir, or use the former one"
_WRAPPERS = ("DistributedDataParallel", "DataParallel")


class UnsavableObjectError(InvalidInputError):
    """An object that cannot be saved in checkpoints."""


class ObjectState:
    """Live objects of a script; see `CheckpointState`.

    Args:
        objects: by name, a Python identifier.
        leads: whether this rank saves what all ranks hold.

    Raises:
        UnsavableObjectError: an object has no `state_dict`, or one that needs all ranks.
    """

    def __init__(self, objects: Mapping[str, Stateful], *, leads: bool) -> None:
        for name, item in objects.items():
            _check(name, item)
        self._objects = {name: unwrapped(item) for name, item in objects.items()}
        self._leads = leads

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """The objects that are modules, by name."""
        return {n: o for n, o in self._objects.items() if isinstance(o, torch.nn.Module)}

    @property
    def sharded(self) -> bool:
        """Whether ranks hold parts of tensors."""
        return any(shards.is_cut(p) for m in self.modules.values() for p in m.parameters())

    def gather(self) -> dict[str, torch.Tensor]:
        """Return the tensors that this rank saves, by name; they are not copied.

        Raises:
            CheckpointError: a `state_dict` fails, or holds what could not be read again.
        """
        flat: dict[str, torch.Tensor] = {}
        for name, item in self._objects.items():
            try:
                state = item.state_dict()
            except Exception as error:
                raise CheckpointError(f"{name}: state_dict() failed: {_line(error)}") from error
            tensors: dict[str, torch.Tensor] = {}
            form = _taken_apart(state, name, tensors)
            if self._leads:
                flat |= tensors
                flat[f"{_BLOB}{name}"] = pack(name, form)
            else:
                flat |= {path: t for path, t in tensors.items() if shards.is_cut(t)}
        return flat

    def fits(self, shapes: Mapping[str, Sequence[int] | None]) -> None:
        """Compare with a checkpoint, before anything is read.

        Raises:
            CheckpointError: it is of other objects, or of another model.
        """
        saved = {name.removeprefix(_BLOB) for name in shapes if name.startswith(_BLOB)}
        for name in sorted(saved ^ self._objects.keys()):
            if name in saved:
                raise CheckpointError(
                    f"the checkpoint has {name}, which the loop was not given; pass it, or choose"
                    " another checkpoint_dir"
                )
            raise CheckpointError(
                f"the checkpoint has no {name}; choose another checkpoint_dir, or leave it out"
            )
        for name, module in self.modules.items():
            live = {f"{name}.{k}": v for k, v in _tensors_of(module).items()}
            held = {path: shape for path, shape in shapes.items() if path.startswith(f"{name}.")}
            for path in sorted(live.keys() ^ held.keys()):
                where = "model" if path in live else "checkpoint"
                raise CheckpointError(
                    f"the checkpoint is of another model: only the {where} has {path}; {_REMEDY}"
                )
            for path, tensor in live.items():
                compare(path, saved=held[path], live=tensor.shape)

    def needs(self, names: Iterable[str]) -> list[str]:
        """Return those of a checkpoint's names that `restore` reads."""
        return list(names)

    def restore(self, flat: Mapping[str, torch.Tensor]) -> None:
        """Restore the state of every object, in place.

        Raises:
            CheckpointError: an object refuses it.
        """
        for name, item in self._objects.items():
            live = _live_tensors(name, item)
            state = _assembled(unpack(flat[f"{_BLOB}{name}"]), flat, live)
            try:
                item.load_state_dict(state)
            except Exception as error:
                raise CheckpointError(
                    f"{name}: load_state_dict() refused the checkpoint: {_line(error)}; {_REMEDY}"
                ) from error


class LoopValues:
    """Plain values of a script as an object with a state.

    Args:
        values: the live dictionary.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        """Return the values."""
        return self._values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Replace the values."""
        self._values.clear()
        self._values.update(values)


def unwrapped(item: Any) -> Any:
    """Return a module without DistributedDataParallel and torch.compile around it."""
    while isinstance(item, torch.nn.Module):
        if type(item).__name__ in _WRAPPERS:
            item = item.module
        elif "_orig_mod" in item._modules:  # noqa: SLF001 - its name in checkpoints, too
            item = item._orig_mod  # noqa: SLF001
        else:
            return item
    return item


def _check(name: str, item: Any) -> None:
    if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
        raise UnsavableObjectError(
            f"ElasticLoop: {name}: {type(item).__name__} is invalid: expected an object with"
            " state_dict and load_state_dict; put plain values into loop.state"
        )
    if any(kind.__name__ == "StatefulDataLoader" for kind in type(item).__mro__):
        raise UnsavableObjectError(
            f"ElasticLoop: {name}: StatefulDataLoader is invalid: expected none, as its state is"
            f" that of one rank among a fixed number; use loop.loader({name})"
        )
    if isinstance(item, torch.nn.Module):
        for module in item.modules():
            if type(module).__name__ == "FullyShardedDataParallel":
                raise UnsavableObjectError(
                    f"ElasticLoop: {name}: FullyShardedDataParallel is invalid: expected"
                    " fully_shard (FSDP2), whose parts can be saved by each rank"
                )


def _tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {k: v for k, v in module.state_dict().items() if isinstance(v, torch.Tensor)}


def _taken_apart(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the value with a mark in place of each tensor, which is added to `tensors`."""
    if isinstance(value, torch.Tensor):
        while path in tensors:  # "a.b" of one dictionary and "b" of its "a"
            path += "'"
        tensors[path] = value.detach()
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        return {k: _taken_apart(v, f"{path}.{k}", tensors) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_taken_apart(v, f"{path}.{i}", tensors) for i, v in enumerate(value))
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and not value.shape:
        return value.item()  # a mean by NumPy; its own type could not be read again
    return value


def _assembled(
    form: Any, flat: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]
) -> Any:
    """Return the value that was taken apart, each tensor sharded as the live one of its path."""
    if isinstance(form, dict):
        if form.keys() == {_TENSOR}:
            path = form[_TENSOR]
            return shards.like(flat[path], live[path]) if path in live else flat[path]
        return {key: _assembled(value, flat, live) for key, value in form.items()}
    if type(form) in (list, tuple):
        return type(form)(_assembled(value, flat, live) for value in form)
    return form


def _live_tensors(name: str, item: Any) -> Mapping[str, torch.Tensor]:
    """Return tensors that are sharded as those of a checkpoint have to be, by path."""
    if isinstance(item, torch.nn.Module):
        return {f"{name}.{key}": tensor for key, tensor in _tensors_of(item).items()}
    if isinstance(item, torch.optim.Optimizer):
        return _ParameterOfState(name, item)
    return {}


class _ParameterOfState(Mapping[str, torch.Tensor]):
    """The parameter that a path in an optimizer's state belongs to, as `optimizer.state.0.…`."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._parameters = {f"{name}.state.{i}": p for i, p in enumerate(parameters)}

    def __getitem__(self, path: str) -> torch.Tensor:
        return self._parameters[".".join(path.split(".")[:3])]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]
