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
        self._guards: list[_Guard] = []

    def send(self, name: str) -> bool:
        """Signal the main process of each rank; return whether each node had at least one."""
        script, helpers = signal_scripts.SIGNAL_SCRIPT, []
        try:
            for job_id, nodes in self._launch.hosts:
                command = srun.helper_command(nodes, script, name, self.mark, job_id=job_id)
                if nodes == [self._launch.allocation.here]:
                    command = ["sh", "-c", script, "esrun", name, self.mark]
                helpers.append(_begin(command, in_companion=job_id is not None))
        except OSError:
            return False
        end = time.monotonic() + _TIMEOUT_S
        return all([_succeeds(helper, end) for helper in helpers])  # noqa: C419 - all are awaited

    def send_here(self, name: str) -> bool:
        """Signal the ranks on this host only, without a step of Slurm; return whether there are."""
        try:
            helper = _begin(["sh", "-c", signal_scripts.SIGNAL_SCRIPT, "esrun", name, self.mark])
        except OSError:
            return False
        return _succeeds(helper, time.monotonic() + _TIMEOUT_S)

    def guard(self) -> None:
        """Start a guard on each node, which after `arm` kills the ranks at Slurm's SIGTERM.

        The guards are a step of their own: when Slurm ends a job, the batch script ends first, and
        with it all processes that it has started.
        """
        if not self._guards:
            self._guards = [_Guard(names, self.mark, i) for i, names in self._launch.hosts]

    def freeze(self) -> bool:
        """Stop all processes of the ranks (SIGSTOP) until `unguard`; return whether all are.

        Guards let them go on by themselves if this process ends or does not call `unguard`.
        """
        frozen = [guard.freeze() for guard in self._guards]
        end = time.monotonic() + _FREEZE_S
        return bool(frozen) and all(f.wait(max(0.0, end - time.monotonic())) for f in frozen)

    def arm(self) -> None:
        """Arm the guards, after `freeze`: the ranks have saved everything."""
        for guard in self._guards:
            guard.signal_when_ready(signal.SIGUSR2)

    def unguard(self) -> None:
        """End the guards; the ranks go on."""
        guards, self._guards = self._guards, []
        for guard in guards:
            # Not SIGTERM: to the guards it means that the job ends.
            guard.signal_when_ready(signal.SIGUSR1)
        if any(guard.has_frozen for guard in guards):  # one that was killed cannot let them go on
            threading.Thread(target=self.send, args=("THAW",), daemon=True).start()


class _Guard:
    """The guards of one job's ranks, and the srun that forwards signals to them.

    Args:
        nodes: of the job.
        mark: of the ranks.
        job_id: of the companion in which they run; None: in the base.

    Attributes:
        has_frozen: whether the ranks were to be frozen.
    """

    def __init__(self, nodes: list[str], mark: str, job_id: int | None = None) -> None:
        self.has_frozen = False
        self._nodes = len(nodes)
        self._requests: queue.SimpleQueue[tuple[int, threading.Event | None]] = queue.SimpleQueue()
        script = signal_scripts.GUARD_SCRIPT
        command = srun.helper_command(nodes, script, "KILL", mark, job_id=job_id)
        self._srun = _begin(command, subprocess.PIPE, in_companion=job_id is not None)
        threading.Thread(target=self._forward_signals, name="guard", daemon=True).start()

    def signal_when_ready(self, number: int) -> None:
        """Queue a signal until all guards have installed their traps: it would end them before."""
        self._requests.put((number, None))

    def freeze(self) -> threading.Event:
        """Freeze the ranks; return an event that is set when they stand on all nodes."""
        self.has_frozen = True
        frozen = threading.Event()
        self._requests.put((signal.SIGUSR2, frozen))
        return frozen

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


def _succeeds(helper: subprocess.Popen[bytes], end: float) -> bool:
    """Wait for a helper until some monotonic time; return whether it has succeeded."""
    try:
        return helper.wait(max(0.0, end - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        helper.terminate()
        return False


def _begin(
    command: list[str], output: int = subprocess.DEVNULL, *, in_companion: bool = False
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=srun.without_job(os.environ) if in_companion else clean(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.DEVNULL,
    )
