"""Which torch this is, where one behaves unlike the other."""

from __future__ import annotations

import time

import torch

#: Below this one, destroying a group right after a collective can hang (Debian's 2.6).
_SAFE_DESTROY = (2, 7)


def release() -> tuple[int, ...]:
    """Major and minor number."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def before_destroying() -> None:
    """Give collectives the time to end that an old torch needs."""
    if release() < _SAFE_DESTROY:
        time.sleep(0.3)
