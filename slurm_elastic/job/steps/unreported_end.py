"""Ends of steps that srun is not told of.

When the last ranks of a step end while their node has no network, its slurmstepd stops trying to
tell srun so after some seconds (`Failed to send MESSAGE_TASK_EXIT`, seen on 24.11.5), and srun
waits for them until the job's time limit. slurmctld is told later, and lists the step no more.
"""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from slurm_elastic.job.launch import log_line
from slurm_elastic.job.steps.step import Step

#: Seconds between looks at the processes of this node, and before the first ones.
_PAUSE_S = 20.0
_FIRST_PAUSES_S = (1.0, 1.0, 2.0, 4.0, 8.0)
#: Seconds without a rank on this node after which slurmctld is asked. srun ends a moment after the
#: last rank; if ranks of other nodes go on, the pauses between the questions grow.
_SILENT_S = 40.0
_LONGEST_PAUSE_S = 300.0
#: Seconds in which the accounting is to say how an unlisted step ended (our choice: slurmctld keeps
#: records while slurmdbd is down).
_ACCOUNTING_S = 300.0
_TIMEOUT_S = 20.0
#: Exit code of a step if the accounting does not say it.
_UNKNOWN_CODE = 1
_LISTED = re.compile(r"^StepId=(\S+) .* SrunHost:Pid=\S*:(\d+)", re.MULTILINE)
_IS_RUNNING = ("RUNNING", "PENDING", "SUSPENDED", "COMPLETING", "CONFIGURING")


def listed_steps(text: str) -> dict[int, str]:
    """Return the steps that `scontrol --oneliner show step` prints, by the process id of its srun.

    >>> listed_steps("StepId=7.0 UserId=1 State=RUNNING SrunHost:Pid=g01:119")
    {119: '7.0'}
    """
    return {int(pid): step for step, pid in _LISTED.findall(text)}


def recorded_code(text: str, step: str) -> int | None:
    r"""Return the exit code of a step, from `sacct -n -P -o JobID,State,ExitCode`.

    128+n for signal n; None if the step is not there or has not ended.

    >>> recorded_code("7|RUNNING|0:0\n7.0|FAILED|3:0\n", "7.0")
    3
    """
    for line in text.splitlines():
        name, state, exit_code = ([*line.split("|"), "", ""])[:3]
        code, _, number = exit_code.partition(":")
        if name == step and code.isdecimal() and number.isdecimal() and state:
            if state.split()[0] in _IS_RUNNING:
                return None
            return 128 + int(number) if int(number) else int(code)
    return None


def ask(command: Sequence[str]) -> str | None:
    """Return the output of a command of Slurm; None if it fails, or does not end in time."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


class UnreportedEndWatch:
    """Watch of the steps of one start, in the background.

    A step is over if slurmctld does not list it while no rank is left on this node. Its srun is
    then killed, and the exit code is that of the accounting.

    Args:
        running: returns (job id, step) of the steps whose srun runs, those in companions included.
        ranks_here: returns the ids of the processes of all ranks on this node.
        ask: returns what a command of Slurm prints, None if it fails.
        pause_s: between two looks.
        silent_s: without ranks on this node, before slurmctld is asked.
        accounting_s: longest wait for the accounting to say how a step has ended.
    """

    def __init__(
        self,
        running: Callable[[], Sequence[tuple[int, Step]]],
        ranks_here: Callable[[], Collection[int]],
        *,
        ask: Callable[[Sequence[str]], str | None] = ask,
        pause_s: float = _PAUSE_S,
        silent_s: float = _SILENT_S,
        accounting_s: float = _ACCOUNTING_S,
    ) -> None:
        self._running, self._ranks_here, self._ask = running, ranks_here, ask
        self._pause_s, self._silent_s, self._accounting_s = pause_s, silent_s, accounting_s
        self._ended = threading.Event()
        self._names: dict[int, str] = {}  # Slurm's name of each step, by the process id of its srun
        self._unlisted_since: dict[int, float] = {}  # by the process id of the srun

    def start(self) -> None:
        """Start the watch."""
        threading.Thread(target=self._run, name="unreported end", daemon=True).start()

    def end(self) -> None:
        """End the watch: the steps have ended."""
        self._ended.set()

    def _run(self) -> None:
        pauses = iter(_FIRST_PAUSES_S)
        while not (ranks := self._ranks_here()):
            if self._ended.wait(min(next(pauses, self._pause_s), self._pause_s)):
                return
        for job_id in {job_id for job_id, _ in self._running()}:
            self._listed(job_id)
        last_seen, pause = time.monotonic(), self._pause_s
        while not self._ended.wait(pause):
            if any(Path(f"/proc/{pid}").exists() for pid in ranks) or (ranks := self._ranks_here()):
                last_seen, pause = time.monotonic(), self._pause_s
            elif time.monotonic() - last_seen >= self._silent_s:
                for job_id, step in self._running():
                    self._look_at(job_id, step)
                if not self._unlisted_since:
                    pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _listed(self, job_id: int) -> Collection[int] | None:
        """Return the process ids of the sruns of a job's steps, and keep the steps' names.

        None without an answer.
        """
        answer = self._ask(("scontrol", "--oneliner", "show", "step", str(job_id)))
        if answer is None or f"StepId={job_id}." not in answer:
            return None
        steps = listed_steps(answer)
        self._names |= steps
        return steps.keys()

    def _look_at(self, job_id: int, step: Step) -> None:
        pid = step.child.pid
        listed = self._listed(job_id)
        if listed is None:
            return
        if pid in listed:
            self._unlisted_since.pop(pid, None)
            return
        if pid not in self._unlisted_since:  # it may just have ended
            self._unlisted_since[pid] = time.monotonic()
            return
        waited = time.monotonic() - self._unlisted_since[pid]
        code, name = None, self._names.get(pid)
        if name is not None:
            words = ("sacct", "-n", "-P", "-j", name, "-o", "JobID,State,ExitCode")
            code = recorded_code(self._ask(words) or "", name)
        if code is None and waited < self._accounting_s:
            return
        of_step = f"step {name}" if name else f"a step of job {job_id}"
        if code is None:
            log_line(f"Slurm's accounting does not say how {of_step} ended: taken for failed")
        log_line(f"{of_step} has ended, as slurmctld says; its srun, which was not told, is ended")
        step.end_srun(_UNKNOWN_CODE if code is None else code)
