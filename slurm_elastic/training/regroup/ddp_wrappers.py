"""DistributedDataParallel wrappers of a script, which follow the default process group.

A wrapper keeps the group that it was made with. It is pickled without that, and when it is read it
takes the present default group and makes its reducer anew; so it is made to follow here, without a
collective, and the script's own reference stays valid.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import distributed
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

#: Attributes that belong to the group.
_OF_GROUP = ("process_group", "reducer", "logger")
#: Attribute of a module that `torch.compile` returns.
_COMPILED_ATTRIBUTE = "_orig_mod"

_wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_compiled: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def watch_wrappers() -> None:
    """Note each wrapper that is made from now on; those made before are of another group."""
    register_module_module_registration_hook(_note)


def _note(module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
    if type(module) is DistributedDataParallel:
        _wrappers.add(module)
    elif type(submodule) is DistributedDataParallel and name == _COMPILED_ATTRIBUTE:
        _compiled.add(module)


def all_wrappers() -> list[DistributedDataParallel]:
    """Return the wrappers made since `watch_wrappers`."""
    return list(_wrappers)


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
        "compiled": bool(_compiled),
    }
    return next((code for code, holds in obstacles.items() if holds), "")


def _has_hooks(wrapper: DistributedDataParallel) -> bool:
    """Return whether a wrapper has registered hooks that its successor would register again."""
    names = ("mixed_precision", "_delay_all_reduce_params", "_use_python_reducer", "device_mesh")
    return any(getattr(wrapper, name, None) for name in names)
