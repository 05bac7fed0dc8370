"""The option `--complete`: a marker that the script itself writes when a checkpoint is complete."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterable

_FIELDS = ("{}", "{stem}")
_BRACES = re.compile(r"\{[^{}]*\}|[{}]")


def pattern_error(pattern: str) -> str | None:
    """Return the error of a pattern; None if it is valid."""
    if not pattern or "\0" in pattern:
        return "expected a pattern; write one such as 'DONE' or '{}.done'"
    if pattern.startswith("/"):
        return "expected a path relative to the checkpoint"
    for field in _BRACES.findall(pattern):
        if field not in _FIELDS:
            return "expected no braces but {} and {stem}"
    if pattern in ("*", "**", *_FIELDS):
        return "it matches the checkpoint itself"
    return None


class CompleteMarker:
    """Markers of a script's checkpoints.

    Args:
        pattern: glob. `{}` stands for the checkpoint's name, `{stem}` for the name without its
            last suffix. A pattern without them is relative to the checkpoint if that is a
            directory; all others are relative to the directory that contains the checkpoint.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._is_sibling = any(name in pattern for name in _FIELDS)

    def paths(self, checkpoint: str, *, is_directory: bool) -> list[str]:
        """Return the existing markers of a checkpoint."""
        parent, name = os.path.split(checkpoint)
        pattern = self.pattern
        values = dict(zip(_FIELDS, (name, os.path.splitext(name)[0]), strict=True))  # noqa: PTH122
        for key, value in values.items():
            pattern = pattern.replace(key, glob.escape(value))
        base = parent if self._is_sibling or not is_directory else checkpoint
        paths = glob.glob(os.path.join(glob.escape(base), pattern), recursive=True)  # noqa: PTH118, PTH207
        return [path for path in map(os.path.normpath, paths) if path != checkpoint]

    def matches(self, path: str) -> bool:
        """Return whether a path has the name of a marker."""
        name = self.pattern.rpartition("/")[2]
        for key in _FIELDS:
            name = name.replace(key, "*")
        return fnmatch.fnmatchcase(path.rpartition("/")[2], name)

    def written_ns(self, checkpoint: str, *, is_directory: bool) -> int | None:
        """Return when the newest marker of a checkpoint was written; None if there is none."""
        return max(_times(self.paths(checkpoint, is_directory=is_directory)), default=None)


def _times(paths: Iterable[str]) -> Iterable[int]:
    for path in paths:
        try:
            yield os.stat(path).st_mtime_ns  # noqa: PTH116 - called for each file at each scan
        except OSError:
            continue
