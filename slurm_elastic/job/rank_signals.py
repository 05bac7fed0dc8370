"""Signals to the ranks of a step on all nodes, but not to their child processes."""

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
    """Signals to the ranks of the current step.

    Args:
        launch: starts them.

    Attributes:
        mark: that of the current step.
    """

    def __init__(self, launch: RankLaunch) -> None:
        self.mark = ""
        self._launch = launch
        self._guard: _Guard | None = None

    def send(self, name: str) -> bool:
        """Signal the main process of each rank; return whether each node had at least one."""
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
        """Start a guard on each node, which after `arm` kills the ranks at Slurm's SIGTERM.

        The guards are a step of their own: when Slurm ends a job, the batch script ends first, and
        with it all processes that it has started.
        """
        if self._guard is None:
            self._guard = _Guard(self._launch.nodes, self.mark)

    def arm(self) -> None:
        """Arm the guards: the ranks have saved everything."""
        if self._guard is not None:
            self._guard.signal_when_ready(signal.SIGUSR2)

    def unguard(self) -> None:
        """End the guards."""
        if self._guard is not None:
            # Not SIGTERM: to the guards it means that the job ends.
            self._guard.signal_when_ready(signal.SIGUSR1)
            self._guard = None


class _Guard:
    """The guards of one step, and the srun that forwards signals to them."""

    def __init__(self, nodes: list[str], mark: str) -> None:
        self._nodes = len(nodes)
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        command = srun.helper_command(nodes, srun.GUARD_SCRIPT, "KILL", mark)
        self._srun = _begin(command, subprocess.PIPE)
        threading.Thread(target=self._forward_signals, name="guard", daemon=True).start()

    def signal_when_ready(self, number: int) -> None:
        """Queue a signal until all guards have installed their traps: it would end them before."""
        self._signals.put(number)

    def _forward_signals(self) -> None:
        assert self._srun.stdout is not None
        for _ in range(self._nodes):
            if not self._srun.stdout.readline():
                return
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
