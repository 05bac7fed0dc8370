"""Differences between releases of torch."""

from __future__ import annotations

import time
from typing import Any

import torch

#: First release in which destroying a group right after a collective cannot hang; it can in
#: Debian's 2.6.
_SAFE_DESTROY = (2, 7)


def release() -> tuple[int, ...]:
    """Return torch's major and minor version."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def forget_groups(mesh: Any) -> None:
    """Let a mesh go of its process groups: torch keeps meshes for good, with results of theirs."""
    getattr(mesh, "_pg_registry", {}).clear()


def settle_collectives() -> None:
    """Wait until collectives have ended, where torch's release needs it."""
    if release() < _SAFE_DESTROY:
        time.sleep(0.3)
