"""Stream of the controller's log: what cannot be written is left out, and does not end it."""

from __future__ import annotations

import os


class LogStream:
    """Text stream on a file descriptor that drops lines which cannot be written, and counts them.

    The disk under the log may be full, or the reader of a pipe gone. Once lines can be written
    again, one of them says how many are missing.

    Args:
        descriptor: to write to.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._line = ""
        self._missing = 0
        self._why = ""
        #: Whether the last line that was written is cut short.
        self._is_cut = False

    def write(self, text: str) -> None:
        """Add a part of a line."""
        self._line += text

    def flush(self) -> None:
        """Write the line, or drop it."""
        note = "\n" if self._is_cut else ""
        if self._missing:
            note += f"warning: lines of this log are missing: {self._missing} ({self._why})\n"
        data = (note + self._line).encode("utf-8", "backslashreplace")
        self._line = ""
        try:
            while data:
                written = os.write(self._descriptor, data)
                self._is_cut = data[written - 1 : written] != b"\n"
                data = data[written:]
        except OSError as error:
            self._missing += 1
            self._why = error.strerror or str(error)
        else:
            self._missing = 0
