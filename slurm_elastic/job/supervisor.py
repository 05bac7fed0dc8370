"""Stands by a running step: signals, threads, restarts in place, the end."""

from __future__ import annotations

import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from slurm_elastic.core.report import Report
from slurm_elastic.job.controller_client import ControllerClient
from slurm_elastic.job.in_place_restart import InPlaceRestart
from slurm_elastic.job.launch import SIGNALS, RankLaunch, SrunProcess, say
from slurm_elastic.job.rank_signals import RankSignals
from slurm_elastic.job.rank_socket_server import RankSocketServer
from slurm_elastic.job.report_state import ReportState
from slurm_elastic.job.step import Step
from slurm_elastic.job.unmodified.resume_state import ResumeStateFile
from slurm_elastic.job.unmodified.script_watch import ScriptWatch
from slurm_elastic.rpc import frames

_FORWARDED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
#: Slurm sends SIGCONT directly before the SIGTERM that ends a job.
_SLURM_TERM_S = 2.0
_SLURM_CONT_S = 0.5
#: From SIGTERM until a step that is to be restarted gets SIGKILL.
_STOP_S = 10.0
_FAREWELL_S = 2.0


class Supervisor:
    """Runs one job's steps to their end.

    Args:
        launch: what to start.
        child: the first start, if it has been made already.
    """

    def __init__(self, launch: RankLaunch, child: SrunProcess | None = None) -> None:
        self._launch = launch
        self._ranks = RankSignals(launch)
        job = launch.allocation
        self._desk = ReportState(
            Report(
                job_id=job.job_id,
                run=job.run,
                phase="starting",
                kind="script",
                gpus=sum(launch.tasks) if launch.gpus else 0,
                nodes=sum(1 for count in launch.tasks if count),
            )
        )
        self._library = False
        self._script = self._watch(launch.options.checkpoint) if launch.options.checkpoint else None
        self._step = self._stand_by(child) if child else self._start()
        self._stopping = threading.Lock()
        self._stopped = False
        self._all_told = False
        self._ending = False
        self._continued_at = -math.inf
        self._courier: ControllerClient | None = None

    def run(self) -> int:
        """Stand by until the program has ended; its exit code."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        # Before any thread starts: helpers that threads start must not inherit the block.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        listener = socket.socket(fileno=self._launch.listener.detach())
        address = frames.controller_address()
        if address:
            self._desk.expect()
        server = RankSocketServer(self._desk, listener, joined=self._library_joined)
        server.start()
        again = InPlaceRestart(self._desk, server)
        if address:
            self._courier = ControllerClient(self._desk, address)
            self._courier.start()
        if self._script:
            self._script.start()
        else:
            self._desk.tell({"phase": "training"})
        code = self._step.wait()
        while self._rehearsed(code) or (not self._ending and again.wanted(code)):
            self._step = self._start()
            code = self._step.wait()
        self._ranks.unguard()
        self._leave(code)
        return code

    def _watch(self, pattern: str) -> ScriptWatch:
        name = self._launch.options.signal
        return ScriptWatch(
            pattern=pattern,
            desk=self._desk,
            memory=ResumeStateFile(self._launch.allocation.run_id),
            ask=(lambda: self._in_background(self._ask, name)) if name else None,
            restart=lambda: self._in_background(self._stop),
            guard=self._ranks,
        )

    def _start(self) -> Step:
        if self._script and not self._library:
            restarted = self._launch.allocation.run > 0 or self._launch.attempt > 0
            self._script.begin_attempt(restarted=restarted)
        return self._stand_by(self._launch.start())

    def _stand_by(self, child: SrunProcess) -> Step:
        self._ranks.mark = child.mark
        return Step(child)

    def _library_joined(self) -> None:
        if self._library:
            return
        self._library = True
        self._desk.tell({"kind": "library"})
        if self._script:
            self._script.retire()
            say("the program uses slurm_elastic.training: --checkpoint is not needed")

    def _leave(self, code: int) -> None:
        if self._ending:
            return  # Slurm waits for this process, and knows the outcome
        self._desk.tell({"phase": "ended", "exit_code": code})
        if self._courier:
            self._courier.stop(farewell_s=_FAREWELL_S, failed=code != 0)
        if code:
            say(f"the program ended with exit code {code}")

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGCONT:
            self._continued_at = time.monotonic()
        elif number in _FORWARDED:
            self._step.send(number)
        elif number == signal.SIGINT and sys.stdin.isatty():
            pass  # the terminal has sent it to srun as well
        else:
            self._on_end()

    def _on_end(self) -> None:
        """SIGTERM: from Slurm, which has told the ranks too, or from somebody who has not."""
        first, self._ending = not self._ending, True
        if first:
            self._in_background(self._end_unless_slurm_does, time.monotonic())
        elif not self._slurm_ends(time.monotonic()):
            self._step.send(signal.SIGTERM)

    def _end_unless_slurm_does(self, at: float) -> None:
        # Python runs the handlers of two signals that came together in the order of their numbers.
        time.sleep(_SLURM_CONT_S)
        if not self._slurm_ends(at):
            self._stop()

    def _slurm_ends(self, at: float) -> bool:
        return abs(at - self._continued_at) < _SLURM_TERM_S

    def _ask(self, name: str) -> None:
        if not self._ranks.send(name) and not self._step.ends_within(0):
            say(f"the ranks could not be sent {name}")

    def _stop(self) -> None:
        """End the step: the ranks may react to SIGTERM, then srun kills them."""
        step = self._step
        with self._stopping:
            if step.ends_within(0):
                return
            self._stopped = True
            self._all_told = self._ranks.send("TERM")
        if not step.ends_within(_STOP_S):
            step.send(signal.SIGTERM)  # "srun: forcing job termination"

    def _rehearsed(self, code: int) -> bool:
        """Whether the step has ended because a rehearsal ended it."""
        with self._stopping:
            stopped, self._stopped = self._stopped, False
        # Success although the signal did not reach all ranks: they had finished on their own.
        if not stopped or self._ending or not (self._all_told or code != 0):
            return False
        say("rehearsal: starting the step again")
        return True

    @staticmethod
    def _in_background(work: Callable[..., object], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()
