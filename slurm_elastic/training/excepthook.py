"""Uncaught errors of the library as one line without a traceback.

Errors that it raises itself name the wrong value and the remedy; a traceback of
the library would not help a user. SLURM_ELASTIC_TRACEBACK=1 shows it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

_HOME = str(Path(__file__).parents[1])
_VARIABLE = "SLURM_ELASTIC_TRACEBACK"


def install() -> None:
    """Show uncaught errors of this package as one line; all others as before."""
    former_hook = sys.excepthook
    if getattr(former_hook, "of_slurm_elastic", False):
        return

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if raised_by_library(error) and not os.environ.get(_VARIABLE):
            sys.stderr.write(f"slurm-elastic: {error}\n")
        else:
            former_hook(kind, error, trace)

    show.of_slurm_elastic = True  # type: ignore[attr-defined]
    sys.excepthook = show


def raised_by_library(error: BaseException) -> bool:
    """Return whether a module of this project raised the error itself."""
    trace = error.__traceback__
    if trace is None or not isinstance(error, ImportError | ValueError | RuntimeError):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename.startswith(_HOME)
