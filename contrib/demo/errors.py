"""What ends the demo with one line."""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot go on; `code` is its exit code. Without a message, all was said already."""

    def __init__(self, message: str = "", code: int = 1) -> None:
        super().__init__(message)
        self.code = code
