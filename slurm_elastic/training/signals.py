"""The two signals a training process understands.

SIGUSR2  save and wait (`scancel -s USR2`, `#SBATCH --signal=USR2@120`).
SIGTERM  the end is near: save and leave, within Slurm's KillWait. Before the
         first step and while the job waits at its checkpoint there is nothing
         to save, and the process leaves at once.

Handlers only set flags; all else happens between two steps.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType

#: What a shell calls a process ended by SIGTERM. Slurm shows requeued, cancelled and timed-out jobs
#: as such whatever the code; for any other SIGTERM, 0 would record an unfinished training as
#: COMPLETED and start the jobs that depend on it.
STOPPED = 128 + signal.SIGTERM


#: Ranks hear SIGTERM at slightly different times; one that left breaks the others' connections.
PEERS_END_S = 3.0


class Signals:
    """What has been asked of this process since it last looked.

    Attributes:
        notice: SIGUSR2 came.
        stop: SIGTERM came.
    """

    def __init__(self) -> None:
        self.notice = False
        self.stop = False
        self._at_once = True
        self._linger_s = 0.0
        self._before: dict[int, object] = {}

    def install(self) -> None:
        """Take over both signals; from now on SIGUSR2 no longer kills."""
        with contextlib.suppress(ValueError):  # not the main thread: the script's own affair
            for number in (signal.SIGUSR2, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)

    def exit_at_once(self, at_once: bool, *, linger_s: float = 0.0) -> None:
        """Whether SIGTERM finds nothing worth saving; obeys one that came before."""
        self._at_once = at_once
        self._linger_s = linger_s
        if at_once and self.stop:
            self._leave()

    @contextlib.contextmanager
    def tolerate_ending_peers(self) -> Iterator[None]:
        """A broken connection is no error if the others were told to end just before us."""
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
        """Give both signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR2:
            self.notice = True
            return
        self.stop = True
        if self._at_once:
            self._leave()

    def _leave(self) -> None:
        time.sleep(self._linger_s)
        exit_now(STOPPED)


def ignore_in_worker(_worker: int) -> None:
    """For data-loader workers: both signals reach every process of a Slurm step.

    Their parent ends them. Until this runs they have the parent's handlers, which do no harm.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def exit_now(code: int) -> None:
    """End now, without the interpreter's and torch's tear-down, which may hang."""
    with contextlib.suppress(ValueError):  # not the main thread: no handler runs here
        # torch's data loader raises, from its handler, for every worker that dies.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        worker.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            stream.flush()
    os._exit(code)
