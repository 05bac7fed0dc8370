"""What the library has to say to people when it ends a script: one line, no traceback.

Errors that it raises itself name culprit and remedy. Where in the library they
were raised helps nobody but its authors, who set SLURM_ELASTIC_TRACEBACK=1.
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
    before = sys.excepthook
    if getattr(before, "of_slurm_elastic", False):
        return

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if ours(error) and not os.environ.get(_VARIABLE):
            sys.stderr.write(f"slurm-elastic: {error}\n")
        else:
            before(kind, error, trace)

    show.of_slurm_elastic = True  # type: ignore[attr-defined]
    sys.excepthook = show


def ours(error: BaseException) -> bool:
    """Whether the project raised the error itself, on purpose."""
    trace = error.__traceback__
    if trace is None or not isinstance(error, ValueError | RuntimeError):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename.startswith(_HOME)
