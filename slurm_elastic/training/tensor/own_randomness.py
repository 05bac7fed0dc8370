"""Random numbers of one rank in a group whose ranks otherwise draw the same.

Dropout of features that each rank has for itself: with the numbers of the group every rank would
drop the same places of its part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from slurm_elastic.training.ranks.subgroup import Subgroup


@contextlib.contextmanager
def own_randomness(group: Subgroup, *, used: bool) -> Iterator[None]:
    """Use random numbers of this rank within the block, and afterwards those of the group again.

    Args:
        group: of this rank.
        used: False: the block draws none.
    """
    if not used:
        yield
        return
    seed = int(torch.randint(2**62, ()))
    devices = [group.device] if group.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + group.rank)
        yield
