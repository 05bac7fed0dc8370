"""Return of a model that was divided to the modules and parameters that it had before.

torch has no such operation for `fully_shard`, and refuses a module twice. What that adds to a
module is a class, hooks, a state and other parameters; all of them are removed, so that the same
module can be divided for another group of ranks.
"""

from __future__ import annotations

from typing import Any

import torch

#: Begin of the names under which torch's composable functions keep their state in a module.
_STATE = "__composable_api"


def possible() -> bool:
    """Return whether this torch has the table of cut modules that `WholeModel` changes."""
    return _registered_states() is not None


class WholeModel:
    """Modules and parameters of a model that is not divided yet.

    Args:
        model: whole.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [
            (module, type(module), dict(module._parameters), _hooks(module))  # noqa: SLF001
            for module in model.modules()
        ]
        self._shapes = [(p, p.shape) for p in model.parameters()]

    def free(self) -> None:
        """Free the memory of the parameters that the model has no more, once it is divided."""
        kept = {id(p) for module, *_ in self._modules for p in module.parameters(recurse=False)}
        for parameter, _ in self._shapes:
            if id(parameter) not in kept:
                parameter.data = parameter.data.new_empty(0)

    def restore(self) -> None:
        """Undo all changes of the model since then; the values of its parameters are undefined."""
        states = _registered_states()
        for module, kind, parameters, hooks in self._modules:
            module.__class__ = kind
            module._parameters.clear()  # noqa: SLF001
            module._parameters.update(parameters)  # noqa: SLF001
            for name, present in _hook_tables(module):
                for key in present.keys() - hooks.get(name, set()):
                    del present[key]
            for name in [n for n in vars(module) if n.startswith(_STATE)]:
                del vars(module)[name]
            if states is not None:
                states.pop(module, None)
        for parameter, shape in self._shapes:
            if parameter.shape != shape:
                parameter.data = parameter.data.new_empty(shape)
            parameter.grad = None


def _hook_tables(module: torch.nn.Module) -> list[tuple[str, dict[Any, Any]]]:
    named = ((n, v) for n, v in vars(module).items() if "_hooks" in n)
    return [(name, table) for name, table in named if isinstance(table, dict)]


def _hooks(module: torch.nn.Module) -> dict[str, set[Any]]:
    return {name: set(table) for name, table in _hook_tables(module)}


def _registered_states() -> Any:
    """Return torch's table of cut modules, which is not public, or None."""
    try:
        from torch.distributed import _composable_state  # noqa: PLC0415 - slow
    except ImportError:
        return None
    return getattr(_composable_state, "_module_state_mapping", None)
