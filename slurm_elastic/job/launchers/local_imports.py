"""Texts of the modules beside a Python file that it imports.

Only names are compared; nothing is imported. Modules that are installed elsewhere are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from slurm_elastic.job.environment.regular_file import read_text

_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+\.*([\w.]*)[ \t]+import[ \t]*(?:\(([\w\s,]*)|([\w, \t]*))"
    r"|import[ \t]+([\w., \t]+))",
    re.MULTILINE,
)
_AS = re.compile(r"\s+as\s+\w+")
#: Larger files, and more than so many, are not read: they are no script's own (our choice).
_MAX_BYTES, _MOST_FILES = 1 << 20, 50


def local_imports(sources: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the text of each module that these files import, directly or through another one.

    Args:
        sources: path and text of each file.
    """
    seen = {os.path.normpath(path) for path, _ in sources}
    folders = [os.path.dirname(path) for path, _ in sources]  # noqa: PTH120 - a text
    texts = list(sources)
    read = 0
    while texts:
        path, text = texts.pop()
        own = os.path.dirname(path)  # noqa: PTH120
        for name in imported_names(text):
            for candidate in _files(name, (own, *folders)):
                if candidate in seen or read == _MOST_FILES:
                    continue
                seen.add(candidate)
                module = read_text(candidate, _MAX_BYTES)
                if module is not None:
                    read += 1
                    texts.append((candidate, module))
                    yield module


def imported_names(text: str) -> list[str]:
    """Return the modules that a Python file may import, in its order.

    >>> imported_names("import os, a.b as c"), imported_names("from d import e")
    (['os', 'a.b'], ['d', 'd.e'])
    """
    names: dict[str, None] = {}
    for match in _IMPORT.finditer(text):
        module, lines, line, modules = match.groups()
        words = [word.strip() for word in _AS.sub("", lines or line or modules or "").split(",")]
        if modules is None:
            prefix = f"{module}." if module else ""
            words = [module, *(f"{prefix}{word}" for word in words if word)]
        names |= dict.fromkeys(word for word in words if word)
    return list(names)


def _files(name: str, folders: Sequence[str]) -> Iterator[str]:
    """Yield the paths that a module may have."""
    relative = name.replace(".", "/")
    for folder in dict.fromkeys(folders):
        for end in (".py", "/__init__.py"):
            yield os.path.normpath(f"{folder or '.'}/{relative}{end}")
