"""Plasticity of a layer: the change of its output for a fixed input."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from slurm_elastic.training.freezing.criteria import MOST_SAMPLES, similarity_loss


class PlasticityMeter:
    """Comparison of one module with its state at the last reading, on the present input.

    Dropout and batch-norm are in evaluation mode for both, so that they add no noise and no
    random numbers are drawn. Costs two forward passes of the module, with a few samples, and a
    copy of its state.
    """

    def __init__(self) -> None:
        self._module: torch.nn.Module | None = None
        self._reference: dict[str, torch.Tensor] | None = None
        self._input: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._hook: Any = None

    def record_next_input(self, module: torch.nn.Module) -> None:
        """Keep the module's next input."""
        if module is not self._module:
            self._module, self._reference = module, None
        self._input = None
        self._unhook()
        self._hook = module.register_forward_pre_hook(self._keep, with_kwargs=True)

    def read(self) -> float | None:
        """Return the similarity loss since the last reading; None: first one, or not computable."""
        self._unhook()
        inputs, self._input = self._input, None
        module = self._module
        if module is None or inputs is None:
            return None
        reference = self._reference
        self._reference = {k: v.detach().clone() for k, v in _state(module)}
        if reference is None:
            return None
        # Under autocast, or with further inputs, the module may fail here: no reading.
        with contextlib.suppress(RuntimeError, TypeError, ValueError), _evaluating(module):
            call = torch.func.functional_call
            new_output = _first(call(module, self._reference, *inputs))
            old_output = _first(call(module, reference, *inputs))
            if (
                new_output is not None
                and old_output is not None
                and new_output.dim() > 1
                and len(new_output) > 1
            ):
                return similarity_loss(new_output, old_output)
        return None

    def reset(self) -> None:
        """Discard the state, so that the next reading is a first one."""
        self._unhook()
        self._module = self._reference = self._input = None

    def _keep(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The first micro-batch is enough.
        if self._input is not None:
            return
        # Further samples are not compared; other arguments may belong to all samples.
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and args[0].dim():
            args = (args[0][:MOST_SAMPLES],)
        self._input = (args, kwargs)

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _state(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@contextlib.contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    were_training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m in were_training:
            m.training = True


def _first(value: Any) -> torch.Tensor | None:
    """Return the first tensor of a module's output."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, list | tuple) and value:
        return _first(value[0])
    if isinstance(value, dict) and value:
        return _first(next(iter(value.values())))
    return None
