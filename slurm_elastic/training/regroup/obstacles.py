"""Reasons why the ranks of a training cannot change while it runs.

Of `ElasticLoop` there are more: `own-loop`, `own-group`, `loss-weight`, and those of
`ddp_wrappers`.
"""

from __future__ import annotations

import itertools
import os

import torch

from slurm_elastic.training.ranks import group_forming, nccl_groups

_trainings = itertools.count()


def in_place_obstacle(
    *, spatial: bool, staged: bool, sharded: bool, profile: bool, device: torch.device
) -> str:
    """Return the code of the reason why this training's group cannot change, or "".

    The same on all ranks. Called once for each training of a process.

    Args:
        spatial: ranks share samples in space.
        staged: the model is cut into stages, or may be after a restart in place.
        sharded: ranks hold parts of the parameters.
        profile: the run only measures.
        device: of the model.
    """
    first = next(_trainings) == 0
    obstacles = {
        "profiling": profile,
        "spatial": spatial,
        "stages": staged,
        "shards": sharded,
        "backend": device.type != "cpu" and not nccl_groups.may_change(),
        "launcher": os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        "torch": not group_forming.supported(),
        # Ranks that join run the script from its begin, so that they reach the first one only.
        "second-training": not first,
    }
    return next((code for code, holds in obstacles.items() if holds), "")
