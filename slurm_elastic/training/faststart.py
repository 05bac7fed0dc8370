"""Import torch without what eager training never uses.

Nine tenths of a resize are Python's and torch's start. Three parts of it can be
left out (host, torch 2.13: 2.5 s → 1.3 s of CPU):

- the first optimizer imports `torch._dynamo`, the compiler, only to mark some
  functions as not to be compiled, and DistributedDataParallel only to read one
  of its settings. A replacement takes the marks and has the default of the
  setting; any other use of it, `torch.compile` for example, imports the real
  module, which then makes the marks. DTensors read other settings of the
  compiler: its module of settings is loaded alone (the first DTensor, torch
  2.13: 0.55 s → 0.02 s of CPU, torch 2.6: 0.6 s → 0.3 s). Tensor parallelism,
  and with it FSDP, imports the compiler to see whether it is at work (torch
  2.6: 1.0 s → 0.5 s).
- torch.distributed.checkpoint imports FSDP, and with it the compiler, for one
  function that is left from former releases (torch 2.6: 0.65 s → 0.05 s of
  CPU). A replacement of its module `optimizer` has that function, and imports
  the real one when it is called.
- garbage collection runs over the thousand modules of `import torch`, none of
  which can be collected.

`SLURM_ELASTIC_FASTSTART=0` leaves torch alone.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from slurm_elastic.training import excepthook

#: First release of torch that the library works with.
OLDEST_TORCH = (2, 6)
_COMPILER = "torch._dynamo"
_SETTINGS = f"{_COMPILER}.config"
_EXTERNAL = f"{_COMPILER}.external_utils"
_CHECKPOINTS = "torch.distributed.checkpoint"
_OPTIMIZER = f"{_CHECKPOINTS}.optimizer"
#: The one function that the package of checkpoints takes from it.
_LOAD = "load_sharded_optimizer_state_dict"
#: Attribute in which torch's own decorator keeps the marked function.
_MARK = "__dynamo_disable"
#: Functions of the compiler that DistributedDataParallel calls (torch 2.6, 2.13), by module.
_DDP_MODE = {"config": "_get_optimize_ddp_mode", "utils": "get_optimize_ddp_mode"}
#: The answer while the setting is unchanged; a change would import the compiler.
_DEFAULT_DDP_MODE = "ddp_optimizer"


class _LazyPart:
    """Replacement of a part of the compiler, which gives what torch only reads.

    That is the mode of DistributedDataParallel, plain settings, which DTensors read, and whether
    the compiler is at work.
    """

    def __init__(self, compiler: _LazyCompiler, name: str) -> None:
        vars(self).update(_compiler=compiler, _name=name, _settings=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks every module for its state
            raise AttributeError(name)
        if sys.modules.get(_COMPILER) is self._compiler:
            if name == _DDP_MODE.get(self._name):
                return lambda: _DEFAULT_DDP_MODE
            if self._name == "external_utils" and name == "is_compiling":
                return sys.modules["torch"].compiler.is_compiling
            if self._name == "config":
                value = getattr(self._settings_alone(), name, self)
                # Values that can be changed or called must be those of the compiler itself.
                if value is None or isinstance(value, bool | int | float | str):
                    return value
        return getattr(getattr(self._compiler.real(), self._name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(getattr(self._compiler.real(), self._name), name, value)

    def _settings_alone(self) -> ModuleType:
        """Return a module of the compiler's settings, as they are before any change."""
        if self._settings is None:
            path = Path(sys.modules["torch"].__path__[0]) / "_dynamo" / "config.py"
            spec = importlib.util.spec_from_file_location(_SETTINGS, path)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[_SETTINGS] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            finally:
                sys.modules[_SETTINGS] = self  # type: ignore[assignment]
            vars(self)["_settings"] = module
        return self._settings  # type: ignore[no-any-return]


class _LazyCompiler(ModuleType):
    """Replacement of `torch._dynamo` until the compiler is used."""

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        # inspect and importlib probe these on every module; that must not import the compiler.
        self.__file__ = None
        # init_process_group empties a cache of the compiler if it finds the module.
        self.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)
        self.config, self.utils = _LazyPart(self, "config"), _LazyPart(self, "utils")
        self.external_utils = _LazyPart(self, "external_utils")
        self.__marked: list[Any] = []

    def graph_break(self, msg: str = "") -> None:
        """Do nothing, as the real function outside of a compilation."""

    def disable(self, fn: Any = None, *_: Any, **__: Any) -> Any:
        """Return the function itself, as the real one outside of a compilation."""
        self.__marked.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(self.real(), name)

    def real(self) -> ModuleType:
        """Import the compiler, which takes the place of this replacement."""
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
            for name in (_SETTINGS, _EXTERNAL):
                if isinstance(sys.modules.get(name), _LazyPart):
                    del sys.modules[name]
            parent = sys.modules["torch"]
            if vars(parent).get("_dynamo") is self:
                delattr(parent, "_dynamo")
            for fn in self.__marked:
                if hasattr(fn, _MARK):
                    delattr(fn, _MARK)
            self.__marked.clear()
        return importlib.import_module(_COMPILER)


class _LazyOptimizer(ModuleType):
    """Replacement of `torch.distributed.checkpoint.optimizer` until it is used."""

    def __init__(self) -> None:
        super().__init__(_OPTIMIZER)
        self.__file__ = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        package = sys.modules[_CHECKPOINTS]
        if name == _LOAD and not hasattr(package, name):  # while the package is imported
            vars(package)["optimizer"] = self
            return self._load
        return getattr(self.real(), name)

    def _load(self, *args: Any, **kwargs: Any) -> Any:
        """Call the real function."""
        return getattr(self.real(), _LOAD)(*args, **kwargs)

    def real(self) -> ModuleType:
        """Import the module, which takes the place of this replacement."""
        if sys.modules.get(_OPTIMIZER) is self:
            del sys.modules[_OPTIMIZER]
        return importlib.import_module(_OPTIMIZER)


def import_torch() -> None:
    """Import torch, without its compiler, unless it is imported already.

    Raises:
        ImportError: torch is missing or too old; shown as one line if it is not caught.
    """
    fast = os.environ.get("SLURM_ELASTIC_FASTSTART") != "0"
    if fast and "torch" not in sys.modules:
        collecting = gc.isenabled()
        gc.disable()
        try:
            _import_torch()
            gc.freeze()
        finally:
            if collecting:
                gc.enable()
    else:
        _import_torch()
    if fast and _COMPILER not in sys.modules:
        replacement = _LazyCompiler()
        sys.modules[_COMPILER] = replacement
        sys.modules[_SETTINGS] = replacement.config  # type: ignore[assignment]
        sys.modules[_EXTERNAL] = replacement.external_utils  # type: ignore[assignment]
        vars(sys.modules["torch"])["_dynamo"] = replacement
    if fast and _CHECKPOINTS not in sys.modules:
        sys.modules[_OPTIMIZER] = _LazyOptimizer()


def _import_torch() -> None:
    oldest = ".".join(map(str, OLDEST_TORCH))
    problem = ""
    try:
        version = str(importlib.import_module("torch").__version__)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        problem = f"torch is not installed in {sys.prefix}: install {oldest} or newer"
    else:
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TORCH:
            problem = f"torch {version} is invalid: expected {oldest} or newer"
    if problem:
        excepthook.install()
        raise ImportError(
            f"{problem}, in the build for your GPUs (https://pytorch.org);"
            " esrun --checkpoint needs none"
        )
