"""Trainings that `init` does not support, detected before the first step or at the first batch.

Each case is one line that names `ElasticLoop`, which leaves forward and backward
pass, optimizers and data to the script.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sized
from typing import Any

import torch

from slurm_elastic.core.errors import InvalidInputError

OWN_LOOP = "keep your own loop, with slurm_elastic.training.ElasticLoop"
_PAIRS = "pairs (inputs, targets); for others"
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")
_SCALERS = ("GradScaler", "ShardedGradScaler")


class UnsupportedTrainingError(InvalidInputError):
    """A training that `init` cannot run; the message names the other interface."""


def check_arguments(
    model: Any, loss_fn: Any, dataset: Any, extra: Mapping[str, Any] | None
) -> None:
    """Check what a script passes to `init`, before anything is made of it.

    Raises:
        UnsupportedTrainingError: something that needs `ElasticLoop`.
    """
    check_dataset(dataset)
    check_model(model)
    check_loss(loss_fn)
    check_extra(extra or {})


def check_dataset(dataset: Any) -> None:
    """Check that samples can be read by index.

    Raises:
        UnsupportedTrainingError: an iterable or streaming dataset.
    """
    streams = isinstance(dataset, torch.utils.data.IterableDataset)
    if streams or not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise _unsupported(
            "dataset", _kind(dataset), "a dataset with len() and [index]; for streams"
        )


def check_model(model: Any) -> None:
    """Check a model as given.

    Raises:
        UnsupportedTrainingError: it is wrapped for several ranks, or takes several inputs.
    """
    if not isinstance(model, torch.nn.Module):
        return
    for module in model.modules():
        for name in (kind.__name__ for kind in type(module).__mro__):
            if name in _WRAPPERS:
                raise _unsupported(
                    "model", f"{name}(…)", "the bare module, which init itself spreads; or"
                )
    if not _accepts(model.forward, 1):
        raise _unsupported(
            "model",
            f"forward{_signature(model.forward)}",
            "a module of one input; for several",
        )


def check_optimizer(optimizer: Any) -> None:
    """Check the optimizer itself, not a function that makes it.

    Raises:
        UnsupportedTrainingError: several ones, or one whose step needs a closure.
    """
    if isinstance(optimizer, list | tuple | Mapping):
        raise _unsupported(
            "optimizer", f"a {type(optimizer).__name__} of {len(optimizer)}", "one; for several"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _unsupported(
            "optimizer",
            _kind(optimizer),
            "a torch.optim.Optimizer, or a function that makes one; for others",
        )
    # Of the class: schedulers replace the object's own by a wrapper.
    if not _accepts(type(optimizer).step, 1):
        raise _unsupported(
            "optimizer",
            _kind(optimizer),
            "one whose step() takes no closure; for those with one",
        )


def check_loss(loss_fn: Any) -> None:
    """Check the loss function.

    Raises:
        UnsupportedTrainingError: there is none.
    """
    if not callable(loss_fn):
        raise _unsupported(
            "loss_fn",
            repr(loss_fn),
            "a function of (output, targets); for a model that returns its loss",
        )


def check_scheduler(scheduler: Any) -> None:
    """Check that the scheduler can be stepped without a metric.

    Raises:
        UnsupportedTrainingError: its `step` needs one.
    """
    if scheduler is None:
        return
    if not hasattr(scheduler, "step") or not _accepts(scheduler.step, 0):
        raise _unsupported(
            "scheduler",
            _kind(scheduler),
            "one whose step() takes no argument; for those that read a metric",
        )


def check_extra(extra: Mapping[str, Any]) -> None:
    """Check the script's own objects.

    Raises:
        UnsupportedTrainingError: one that cannot be saved, or has no effect.
    """
    for name, item in extra.items():
        if type(item).__name__ in _SCALERS:
            raise _unsupported(
                f"extra {name!r}", _kind(item), "no scaler of gradients; for float16"
            )
        if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
            raise UnsupportedTrainingError(
                f"init: extra {name!r}: {_kind(item)} is invalid: expected an object with"
                " state_dict and load_state_dict"
            )


def epoch_schedule_warning(scheduler: Any, *, epochs: int, steps_per_epoch: int) -> str:
    """Return a line for the log if a schedule seems to be meant per epoch, or "".

    A schedule whose length, counted in steps, is at most the number of epochs would be over
    within the first of them (our choice of a rule).
    """
    lengths = (getattr(scheduler, name, None) for name in ("step_size", "T_max", "total_iters"))
    length = next((n for n in lengths if isinstance(n, int)), None)
    if milestones := getattr(scheduler, "milestones", None):
        length = max(milestones)
    if length is None or steps_per_epoch <= 1 or length > epochs:
        return ""
    return (
        f"scheduler: {_kind(scheduler)} is stepped after every optimisation step, here"
        f" {steps_per_epoch} times per epoch, and its length is {length}; for a schedule per epoch"
        f" multiply the length by {steps_per_epoch}, or {OWN_LOOP}"
    )


def pair(part: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a micro-batch.

    Raises:
        UnsupportedTrainingError: it is no pair.
    """
    if not isinstance(part, list | tuple):
        raise _unsupported("dataset", f"samples of {_kind(part)}", _PAIRS)
    if len(part) != 2:
        raise _unsupported("dataset", f"samples of {len(part)} values", _PAIRS)
    return part[0], part[1]


def loss_of(loss_fn: Callable[[Any, Any], torch.Tensor], output: Any, targets: Any) -> torch.Tensor:
    """Return the loss of a micro-batch.

    Raises:
        UnsupportedTrainingError: the model returns something that the loss function cannot take,
            or the function returns no tensor.
    """
    try:
        loss = loss_fn(output, targets)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(output, torch.Tensor):
            raise
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise UnsupportedTrainingError(
            f"init: model: its output, {_kind(output)}, is invalid: loss_fn cannot take it"
            f" ({reason}); for a model that returns its loss or several outputs {OWN_LOOP}"
        ) from error
    if not isinstance(loss, torch.Tensor):
        raise _unsupported(
            "loss_fn", f"its result, {_kind(loss)},", "a tensor; for a model that returns its loss"
        )
    return loss


def _unsupported(where: str, value: str, expected: str) -> UnsupportedTrainingError:
    return UnsupportedTrainingError(
        f"init: {where}: {value} is invalid: expected {expected} {OWN_LOOP}"
    )


def _accepts(function: Callable[..., Any], values: int) -> bool:
    """Return whether a function can be called with this number of values; True if unknown."""
    try:
        inspect.signature(function).bind(*range(values))
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def _signature(function: Callable[..., Any]) -> str:
    return f"({', '.join(inspect.signature(function).parameters)})"


def _kind(value: Any) -> str:
    name = type(value).__name__
    return name if name[:1].isupper() else f"a {name}"
