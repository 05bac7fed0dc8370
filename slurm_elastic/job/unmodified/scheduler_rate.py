"""Learning rate in a saved scheduler of PyTorch, without unpickling it.

The instructions of the pickle are listed, never executed: the file is a user's, and may contain
anything.
"""

from __future__ import annotations

import os
import pickletools
import stat
import zlib
from zipfile import BadZipFile, ZipFile

#: Files of a checkpoint with the state of a scheduler: of accelerate, and of transformers.
_NAMES = ("scheduler.bin", "scheduler.pt")
_KEY = "_last_lr"
#: Larger files are not read; that of a scheduler has some kilobytes.
_MAX_BYTES = 1 << 20
#: Instructions between the key and the first rate in its list.
_MOST_BETWEEN = 8


def read_rate(checkpoint: str) -> float | None:
    """Return the learning rate of the first group of parameters; None if there is none.

    Args:
        checkpoint: directory in which `torch.save` has written a scheduler's `state_dict`.
    """
    for name in _NAMES:
        try:
            rate = _rate(_pickle(f"{checkpoint}/{name}"))
        except (OSError, ValueError, LookupError, RuntimeError, EOFError, BadZipFile, zlib.error):
            continue
        if rate is not None:
            return rate
    return None


def _pickle(path: str) -> bytes:
    """Return the pickled object in a file of `torch.save`.

    Raises:
        OSError, ValueError, LookupError, RuntimeError, EOFError, BadZipFile, zlib.error: there is
            none.
    """
    # O_NONBLOCK: opening a FIFO must not wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise ValueError("it is no file of a scheduler")
        with ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if archive.getinfo(names[0]).file_size > _MAX_BYTES:
                raise ValueError("it is too large")
            return archive.read(names[0])


def _rate(data: bytes) -> float | None:
    """Return the number that follows the key in a pickle.

    Raises:
        ValueError: it is no pickle.
    """
    left = 0
    for _, argument, _ in pickletools.genops(data):
        if argument == _KEY:
            left = _MOST_BETWEEN
        elif left and isinstance(argument, float):
            return argument
        left = max(0, left - 1)
    return None
