"""Memory that a training uses and needs, in bytes, for reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all parameters; of divided ones, of their whole."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def optimizer_bytes(optimizer: torch.optim.Optimizer, weights: int) -> int | None:
    """Return the bytes of an optimizer's whole state; None: it has no state yet.

    Where it holds some parameters only, the others' state is as large for each byte of weights.

    Args:
        optimizer: of a model of which this rank may hold a part.
        weights: bytes of the whole model.
    """
    state = held = 0
    for parameter, values in optimizer.state.items():
        held += _bytes(parameter)
        state += sum(_bytes(value) for value in values.values() if torch.is_tensor(value))
    return state * weights // held if held else None


def gpu_bytes(device: torch.device) -> int | None:
    """Return the memory of a GPU; None: the device is none."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def peak_memory(device: torch.device) -> int | None:
    """Return the largest memory of this process so far, in bytes; None: unknown.

    On a GPU the memory of tensors, else the resident memory of the process.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return None


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
