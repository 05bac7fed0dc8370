"""DistributedDataParallel wrappers of a script, which follow the default process group.

A wrapper keeps the group that it was made with. It is pickled without that, and when it is read it
takes the present default group and makes its reducer anew; so it is made to follow here, without a
collective, and the script's own reference stays valid.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

#: Attributes that belong to the group.
_OF_GROUP = ("process_group", "reducer", "logger")


def all_wrappers() -> list[DistributedDataParallel]:
    """Return the wrappers of this process."""
    return [o for o in gc.get_objects() if type(o) is DistributedDataParallel]


def follow_group(wrapper: DistributedDataParallel) -> None:
    """Let a wrapper use the present default group, between two steps."""
    kept = {name: value for name, value in vars(wrapper).items() if name not in _OF_GROUP}
    # The former reducer removes its hooks from the parameters when it is deleted.
    for name in _OF_GROUP:
        vars(wrapper).pop(name, None)
    wrapper.__setstate__(kept)


def wrapper_obstacle(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return the code of the reason why the wrappers of this process cannot follow, or ""."""
    wrappers = all_wrappers()
    averaged = {id(p) for wrapper in wrappers for p in wrapper.module.parameters()}
    trained = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    obstacles = {
        # The script averages gradients in another way, or not at all.
        "unwrapped": not trained or any(id(p) not in averaged for p in trained),
        "own-group": any(w.process_group is not distributed.group.WORLD for w in wrappers),
        # A hook may have the former group in its state.
        "comm-hook": any(getattr(w, "_comm_hooks", None) for w in wrappers),
        "ddp-options": any(map(_has_hooks, wrappers)),
        "compiled": any(_compiled(o) for o in gc.get_objects() if type(o).__name__ == _COMPILED),
    }
    return next((code for code, holds in obstacles.items() if holds), "")


#: Type of a module that `torch.compile` returns.
_COMPILED = "OptimizedModule"


def _has_hooks(wrapper: DistributedDataParallel) -> bool:
    """Return whether a wrapper has registered hooks that its successor would register again."""
    names = ("mixed_precision", "_delay_all_reduce_params", "_use_python_reducer", "device_mesh")
    return any(getattr(wrapper, name, None) for name in names)


def _compiled(module: object) -> bool:
    return type(getattr(module, "_orig_mod", None)) is DistributedDataParallel
