"""Texts of the Python files that a program's command line names.

>>> accumulates_itself("accelerator.backward(loss / steps)")
True
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from slurm_elastic.job.environment.regular_file import regular_file

#: Larger files are no scripts.
_MAX_BYTES = 1 << 20
#: With the first and without the second, accelerate only divides the loss by its accumulation.
_BACKWARD, _ACCUMULATE = "accelerator.backward(", ".accumulate("
#: Its learner is such a program.
_FASTAI = "fastai."


def script_sources(program: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield path and text of each Python file that a program names, also within a quoted command.

    Args:
        program: with its arguments.
    """
    for word in " ".join(program).split():
        if word.endswith(".py"):
            try:
                with regular_file(word) as descriptor:
                    text = os.read(descriptor, _MAX_BYTES).decode(errors="replace")
            except (OSError, ValueError):
                continue
            yield word, text


def accumulates_itself(source: str) -> bool:
    """Return whether a script of accelerate counts the micro-batches of a step itself."""
    return (_BACKWARD in source or _FASTAI in source) and _ACCUMULATE not in source
