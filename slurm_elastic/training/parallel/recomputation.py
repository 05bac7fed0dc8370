"""Recomputation of activations: layers keep their input only, and run again in the backward pass.

`torch.utils.checkpoint` of each layer, with the random numbers of its first run, so that results
are the same. A layer whose forward pass changes a buffer, such as the running statistics of batch
normalisation, would change it twice; it keeps its activations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch


def recompute(layers: Iterable[tuple[str, torch.nn.Module]]) -> tuple[int, int]:
    """Make layers run again in the backward pass, those that already do among them.

    Args:
        layers: name and module of each; none within another one.

    Returns:
        The number of layers that do, and of those with parameters that cannot.
    """
    done = left = 0
    for _, layer in layers:
        if any(True for _ in layer.buffers()):
            left += 1
        elif not _runs_again(layer):
            layer.forward = functools.partial(_again, layer.forward)
        if _runs_again(layer):
            done += 1
    return done, left


def keep_activations(layers: Iterable[tuple[str, torch.nn.Module]]) -> None:
    """Undo `recompute`.

    Args:
        layers: name and module of each; those that keep their activations stay as they are.
    """
    for _, layer in layers:
        if not _runs_again(layer):
            continue
        first = layer.forward.args[0]
        if getattr(first, "__func__", None) is type(layer).forward:
            del layer.forward
        else:
            layer.forward = first


def _runs_again(layer: torch.nn.Module) -> bool:
    forward = layer.forward
    return isinstance(forward, functools.partial) and forward.func is _again


def _again(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    from torch.utils.checkpoint import checkpoint  # noqa: PLC0415 - slow: it imports sympy

    return checkpoint(forward, *inputs, use_reentrant=False, **options)
