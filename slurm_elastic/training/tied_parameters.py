"""Parameters that a model has under several names, such as a tied embedding and head."""

from __future__ import annotations

import torch


def ties(model: torch.nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each parameter that has several, in the order of the model."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(aliases) for aliases in names.values() if len(aliases) > 1]
