"""Signals for the ranks of a step, on whatever node they run, and for them alone."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading

from slurm_elastic.job import srun
from slurm_elastic.job.launch import RankLaunch
from slurm_elastic.job.slurm_env import clean

_TIMEOUT_S = 20.0


class RankSignals:
    """The ranks of the present step.

    Args:
        launch: what starts them.

    Attributes:
        mark: of the present step.
    """

    def __init__(self, launch: RankLaunch) -> None:
        self.mark = ""
        self._launch = launch
        self._guard: _Guard | None = None

    def send(self, name: str) -> bool:
        """Signal the main process of every rank; whether any could be found on every node."""
        nodes = self._launch.nodes
        if nodes == [self._launch.allocation.here]:
            command = ["sh", "-c", srun.SIGNAL_SCRIPT, "esrun", name, self.mark]
        else:
            command = srun.helper_command(nodes, srun.SIGNAL_SCRIPT, name, self.mark)
        try:
            helper = _begin(command)
        except OSError:
            return False
        try:
            return helper.wait(_TIMEOUT_S) == 0
        except subprocess.TimeoutExpired:
            helper.terminate()
            return False

    def guard(self) -> None:
        """Place a guard on every node, which sees to it that Slurm's SIGTERM ends the ranks.

        It is a step of its own: when Slurm ends a job, the batch script dies first, and with it
        everything that it has started.
        """
        if self._guard is None:
            self._guard = _Guard(self._launch.nodes, self.mark)

    def arm(self) -> None:
        """From now on the guards act: nothing is lost with the ranks."""
        if self._guard is not None:
            self._guard.signal_when_ready(signal.SIGUSR2)

    def unguard(self) -> None:
        """Take the guards away."""
        if self._guard is not None:
            # Not SIGTERM: it would reach them as the end of the job.
            self._guard.signal_when_ready(signal.SIGUSR1)
            self._guard = None


class _Guard:
    """The guards of one step, behind one srun, which forwards signals to them."""

    def __init__(self, nodes: list[str], mark: str) -> None:
        self._nodes = len(nodes)
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        command = srun.helper_command(nodes, srun.GUARD_SCRIPT, "KILL", mark)
        self._srun = _begin(command, subprocess.PIPE)
        threading.Thread(target=self._attend, name="guard", daemon=True).start()

    def signal_when_ready(self, number: int) -> None:
        """Before it is ready a signal would only end it."""
        self._signals.put(number)

    def _attend(self) -> None:
        assert self._srun.stdout is not None
        ready = 0
        while ready < self._nodes:
            if not self._srun.stdout.readline():
                return
            ready += 1
        while self._srun.poll() is None:
            self._srun.send_signal(self._signals.get())


def _begin(command: list[str], output: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=clean(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.DEVNULL,
    )
