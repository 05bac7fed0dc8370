"""Handling of SIGUSR2 and SIGTERM in a training process.

SIGUSR2  save and wait (`scancel -s USR2`, `#SBATCH --signal=USR2@120`).
SIGTERM  save and exit, within Slurm's KillWait. Before the first step and while
         the job waits at its checkpoint there is nothing to save, and the
         process exits at once.

Handlers only set flags; the job acts between two steps.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType

#: Exit code after SIGTERM, as of shells. Slurm shows requeued, cancelled and timed-out jobs as such
#: whatever the code; for any other SIGTERM, 0 would record an unfinished training as COMPLETED and
#: start the jobs that depend on it.
STOPPED = 128 + signal.SIGTERM

#: Ranks get SIGTERM at slightly different times; one that exits breaks the others' connections.
PEERS_END_S = 3.0


class Signals:
    """Signals that this process has received and not yet acted on.

    Attributes:
        notice: SIGUSR2 was received.
        stop: SIGTERM was received.
    """

    def __init__(self) -> None:
        self.notice = False
        self.stop = False
        self._exit_at_once = True
        self._linger_s = 0.0
        self._former_handlers: dict[int, object] = {}
        self._pid = os.getpid()

    def install(self) -> None:
        """Install both handlers; from now on SIGUSR2 no longer kills."""
        with contextlib.suppress(ValueError):  # not the main thread: handlers are the script's
            for number in (signal.SIGUSR2, signal.SIGTERM):
                self._former_handlers[number] = signal.signal(number, self._handle)
        # After the import of multiprocessing, which would wait without end for such workers.
        atexit.register(_kill_workers)

    def exit_at_once(self, at_once: bool, *, linger_s: float = 0.0) -> None:
        """Choose whether SIGTERM, also an earlier one, ends the process at once.

        Args:
            at_once: True while there is nothing to save.
            linger_s: delay of the exit.
        """
        self._exit_at_once = at_once
        self._linger_s = linger_s
        if at_once and self.stop:
            self._leave()

    @contextlib.contextmanager
    def tolerate_ending_peers(self) -> Iterator[None]:
        """Exit on a broken connection if SIGTERM follows: other ranks got it earlier."""
        try:
            yield
        except RuntimeError:
            end = time.monotonic() + PEERS_END_S
            while time.monotonic() < end:
                if self.stop:
                    exit_now(STOPPED)
                time.sleep(0.05)
            raise

    def restore(self) -> None:
        """Reinstall the handlers that were there before `install`."""
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._former_handlers.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a data-loader worker of the script, which its parent ends
        if number == signal.SIGUSR2:
            self.notice = True
            return
        self.stop = True
        if self._exit_at_once:
            self._leave()

    def _leave(self) -> None:
        time.sleep(self._linger_s)
        exit_now(STOPPED)


def ignore_in_worker(_worker: int) -> None:
    """Ignore both signals in a data-loader worker: they reach every process of a Slurm step.

    The parent ends its workers. Until this runs they have its handlers, which only set flags.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _kill_workers() -> None:
    """End the workers that ignore SIGTERM, by which Python ends them with the process."""
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()


def exit_now(code: int) -> None:
    """End the process now, without the interpreter's and torch's tear-down, which may hang."""
    with contextlib.suppress(ValueError):  # not the main thread: no handler runs here
        # torch's data loader raises, from its handler, for every worker that dies.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        worker.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            stream.flush()
    os._exit(code)
