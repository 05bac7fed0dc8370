"""Standard input of the program, such as a here-document of the batch script.

It can be read once only, but a program is started again in the same run of its job, and on several
jobs by several sruns. So each start reads it from its beginning: of a file its own descriptor, of a
pipe that nobody writes to any more a copy. A pipe that is still open cannot be read twice.

Part of each start: imports only modules that Python has loaded already.
"""

from __future__ import annotations

import os
import select
import stat

#: Bytes of the input that tell two runs of a job apart.
_COMPARED = 1 << 20


class StandardInput:
    """Input of one esrun.

    Args:
        descriptor: file descriptor that it is read from.

    Attributes:
        is_repeatable: whether each start can read all of it.
    """

    __slots__ = ("_offset", "_source", "is_repeatable")

    def __init__(self, descriptor: int = 0) -> None:
        self.is_repeatable = True
        self._offset = 0
        self._source: int | None = None
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISREG(mode):
                self._offset = os.lseek(descriptor, 0, os.SEEK_CUR)
                self._source = os.dup(descriptor)
            elif stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                self._source = _copy(descriptor)
                self.is_repeatable = self._source is not None
        except OSError:  # it is closed
            self._source = None

    def open(self) -> int | None:
        """Return a new descriptor at its beginning; None: the program inherits that of esrun."""
        if self._source is None:
            return None
        try:
            descriptor = os.open(f"/proc/self/fd/{self._source}", os.O_RDONLY)
        except OSError:  # the file may not be opened any more
            return None
        os.lseek(descriptor, self._offset, os.SEEK_SET)
        return descriptor

    def start(self) -> bytes:
        """Return its first bytes; empty if there is none, or it is not repeatable."""
        descriptor = self.open()
        if descriptor is None:
            return b""
        try:
            return os.read(descriptor, _COMPARED)
        finally:
            os.close(descriptor)


def _copy(descriptor: int) -> int | None:
    """Return a file with all that a pipe holds; None: it is open for more."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    events = dict(poll.poll(0)).get(descriptor, 0)
    if not events & select.POLLHUP:
        return None
    copy = os.memfd_create("standard input")
    while data := os.read(descriptor, 1 << 16):
        os.write(copy, data)
    return copy
