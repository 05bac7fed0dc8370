"""Texts of the Python files that a program's command line names.

>>> accumulates_itself("accelerator.backward(loss / steps)")
True
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from slurm_elastic.job.environment.regular_file import read_text

#: Larger files are no scripts.
_MAX_BYTES = 1 << 20
#: Packages whose modules start other programs.
_LAUNCHERS = ("torch", "accelerate", "deepspeed")
#: With the first and without the second, accelerate only divides the loss by its accumulation.
_BACKWARD, _ACCUMULATE = "accelerator.backward(", ".accumulate("
#: Its learner is such a program.
_FASTAI = "fastai."


def script_sources(program: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield path and text of each Python file that a program names, also within a quoted command.

    That of a module (`python -m a.b`) is sought where Python would find it.

    Args:
        program: with its arguments.
    """
    words = " ".join(program).split()
    for previous, word in zip(["", *words], words):  # noqa: B905 - one longer
        paths = [word] if word.endswith(".py") else []
        if previous == "-m":
            paths = _module_files(word, words[0])
        for path in paths:
            text = read_text(path, _MAX_BYTES)
            if text is not None:
                yield path, text
                break


def _module_files(name: str, python: str) -> list[str]:
    """Return the paths that a module may have.

    Args:
        name: of the module.
        python: name of the program that runs it, beside which packages are installed.
    """
    if name.partition(".")[0] in _LAUNCHERS:
        return []
    import glob  # noqa: PLC0415 - slow to load, as the next one
    import shutil  # noqa: PLC0415

    relative = name.replace(".", "/")
    variable = os.environ.get("PYTHONPATH", "").split(":")
    prefix = os.path.dirname(os.path.dirname(shutil.which(python) or python))  # noqa: PTH120
    installed = glob.glob(f"{glob.escape(prefix)}/lib/python3*/site-packages") if prefix else []  # noqa: PTH207
    folders = [".", *filter(None, variable), *installed]
    return [f"{folder}/{relative}{end}" for folder in folders for end in (".py", "/__main__.py")]


def accumulates_itself(source: str) -> bool:
    """Return whether a script of accelerate counts the micro-batches of a step itself."""
    return (_BACKWARD in source or _FASTAI in source) and _ACCUMULATE not in source
