"""Parameters that a model has under several names, as an embedding and a head that shares it."""

from __future__ import annotations

import torch


def ties(model: torch.nn.Module) -> list[tuple[str, ...]]:
    """Sets of names of one parameter, as a tied embedding and head have; the first is its own."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(found) for found in names.values() if len(found) > 1]
