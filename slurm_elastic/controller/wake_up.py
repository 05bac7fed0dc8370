"""Wake-ups of a thread, by other threads and by the signal handlers that interrupt it."""

from __future__ import annotations

import queue


class WakeUp:
    """Wake-up of the one thread that waits for it; those before a wait end the next one at once.

    A `threading.Event` cannot be used: a signal handler that sets one while the same thread waits
    for it, or sets it, waits for its lock without end. Putting into a `queue.SimpleQueue` is
    reentrant (documentation of Python).
    """

    def __init__(self) -> None:
        self._calls = queue.SimpleQueue[None]()

    def set(self) -> None:
        """Wake the thread."""
        self._calls.put(None)

    def wait(self, timeout_s: float) -> None:
        """Wait for a wake-up, at most this long; several of them end one wait."""
        try:
            self._calls.get(timeout=max(0.0, timeout_s))
            while True:
                self._calls.get_nowait()
        except queue.Empty:
            return
