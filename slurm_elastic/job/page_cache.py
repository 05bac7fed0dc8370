"""Removal of files from this node's page cache, so that the next read comes from storage.

Needs only the right to read the files. Pages that a process has mapped stay, and so does the cache
of a file server. As a program it is run once on each node:

    python -m slurm_elastic.job.page_cache PATH...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path


def drop(paths: Iterable[str | Path]) -> tuple[int, int]:
    """Drop the cached pages of these files, and of the files below these directories.

    Returns:
        Number of files and of bytes; files that cannot be read are not counted.
    """
    count = size = 0
    for path in _files(paths):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            os.fsync(handle)  # unwritten pages cannot be dropped
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            size += os.fstat(handle).st_size
            count += 1
        except OSError:
            continue
        finally:
            os.close(handle)
    return count, size


def _files(paths: Iterable[str | Path]) -> Iterator[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            for directory, _, names in os.walk(path):
                yield from (Path(directory, name) for name in names if _is_regular(directory, name))
        elif path.is_file():
            yield path


def _is_regular(directory: str, name: str) -> bool:
    """Return whether it is a regular file: opening a pipe or a device may block."""
    return Path(directory, name).is_file()


if __name__ == "__main__":
    sys.exit(0 if drop(sys.argv[1:])[0] else 1)
