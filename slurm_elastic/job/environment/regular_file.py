"""Reading files of a user that may be anything: a FIFO, a device, a directory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def regular_file(path: str) -> Iterator[int]:
    """Open a regular file for reading, and close it at the end; yield its descriptor.

    Nothing is read from another file: opening a FIFO does not wait, and what is in it stays there.

    Raises:
        OSError: it cannot be opened, or is no regular file.
        ValueError: the path has a null byte.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_text(path: str, most_bytes: int) -> str | None:
    """Return the beginning of a regular file as text; None if it cannot be read.

    Args:
        path: of the file.
        most_bytes: how much of it is read.
    """
    try:
        with regular_file(path) as descriptor:
            return os.read(descriptor, most_bytes).decode(errors="replace")
    except (OSError, ValueError):
        return None
