"""Signals to the ranks of a step on all nodes, but not to processes that the ranks start."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import subprocess
import threading
import time

from slurm_elastic.job import srun
from slurm_elastic.job.launch import RankLaunch
from slurm_elastic.job.signals import signal_scripts
from slurm_elastic.job.slurm_env import clean

_TIMEOUT_S = 20.0
#: Seconds in which all guards must have frozen the ranks of their nodes.
_FREEZE_S = 10.0


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
            command = ["sh", "-c", signal_scripts.SIGNAL_SCRIPT, "esrun", name, self.mark]
        else:
            command = srun.helper_command(nodes, signal_scripts.SIGNAL_SCRIPT, name, self.mark)
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

    def freeze(self) -> bool:
        """Stop all processes of the ranks (SIGSTOP) until `unguard`; return whether they stand.

        Guards let them go on by themselves if this process ends or does not call `unguard`.
        """
        return self._guard is not None and self._guard.freeze()

    def arm(self) -> None:
        """Arm the guards, after `freeze`: the ranks have saved everything."""
        if self._guard is not None:
            self._guard.signal_when_ready(signal.SIGUSR2)

    def unguard(self) -> None:
        """End the guards; the ranks go on."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        # Not SIGTERM: to the guards it means that the job ends.
        guard.signal_when_ready(signal.SIGUSR1)
        if guard.has_frozen:  # a guard that was killed cannot let them go on
            threading.Thread(target=self.send, args=("THAW",), daemon=True).start()


class _Guard:
    """The guards of one step, and the srun that forwards signals to them.

    Attributes:
        has_frozen: whether the ranks were to be frozen.
    """

    def __init__(self, nodes: list[str], mark: str) -> None:
        self.has_frozen = False
        self._nodes = len(nodes)
        self._requests: queue.SimpleQueue[tuple[int, threading.Event | None]] = queue.SimpleQueue()
        command = srun.helper_command(nodes, signal_scripts.GUARD_SCRIPT, "KILL", mark)
        self._srun = _begin(command, subprocess.PIPE)
        threading.Thread(target=self._forward_signals, name="guard", daemon=True).start()

    def signal_when_ready(self, number: int) -> None:
        """Queue a signal until all guards have installed their traps: it would end them before."""
        self._requests.put((number, None))

    def freeze(self) -> bool:
        """Freeze the ranks; return whether all guards have answered that they stand."""
        self.has_frozen = True
        frozen = threading.Event()
        self._requests.put((signal.SIGUSR2, frozen))
        return frozen.wait(_FREEZE_S)

    def _forward_signals(self) -> None:
        assert self._srun.stdout is not None
        with self._srun.stdout:
            is_ready = self._answered(b"ready", None)
            number = 0
            while number != signal.SIGUSR1:
                number, event = self._requests.get()
                if is_ready:
                    self._srun.send_signal(number)  # does nothing if it has ended
                if event is not None and is_ready and self._answered(b"frozen", _FREEZE_S):
                    event.set()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._srun.wait(_TIMEOUT_S)

    def _answered(self, word: bytes, seconds: float | None) -> bool:
        """Return whether the guards of all nodes print this word in time."""
        assert self._srun.stdout is not None
        end = None if seconds is None else time.monotonic() + seconds
        words: list[bytes] = []
        while words.count(word) < self._nodes:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._srun.stdout], [], [], left)[0]:
                return False
            data = os.read(self._srun.stdout.fileno(), 65536)
            if not data:
                return False
            words += data.split()
        return True


def _begin(command: list[str], output: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=clean(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.DEVNULL,
    )
