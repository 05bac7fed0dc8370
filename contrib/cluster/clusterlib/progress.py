"""Progress display: one redrawn line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

CLEAR_LINE = "\r\033[K"


class ClusterError(Exception):
    """Failure that ends the command with one line and an exit code."""

    code = 1


class NoEngineError(ClusterError):
    """Failure because Docker is missing; exit code 3, so that tests can skip."""

    code = 3


class Task:
    """One step in progress; `detail` is its state."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._start = time.monotonic()
        self._detail = ""

    def detail(self, text: str) -> None:
        """Show how far it is: at the next redraw on a terminal, elsewhere as a line."""
        if text != self._detail and not sys.stderr.isatty():
            print(f"{self.title}: {text}", file=sys.stderr, flush=True)
        self._detail = text

    def seconds(self) -> float:
        """Return how long the task has been running."""
        return time.monotonic() - self._start

    def redraw_until(self, finished: threading.Event) -> None:
        """Keep a terminal's line up to date, so that a long step does not look frozen."""
        while not finished.wait(0.2):
            line = f"{self.title} {self.seconds():.0f} s  {self._detail}"[:100]
            print(f"{CLEAR_LINE}{line}", end="", file=sys.stderr, flush=True)
        print(CLEAR_LINE, end="", file=sys.stderr, flush=True)


@contextmanager
def task(title: str) -> Iterator[Task]:
    """Show that `title` is being done, and how long it took."""
    current, finished = Task(title), threading.Event()
    redraw = threading.Thread(target=current.redraw_until, args=(finished,), daemon=True)
    if sys.stderr.isatty():
        redraw.start()
    try:
        yield current
    finally:
        finished.set()
        if redraw.is_alive():
            redraw.join()
    print(f"{title}: done in {current.seconds():.1f} s", file=sys.stderr, flush=True)
