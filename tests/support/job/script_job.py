"""One run of a job with an unmodified script, whose part the test plays."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from slurm_elastic.core.report import Orders, Report
from slurm_elastic.job.report_state import ReportState
from slurm_elastic.job.unmodified.checkpoints.settle_time import FIRST_S
from slurm_elastic.job.unmodified.fixed_accumulation import FixedAccumulation
from slurm_elastic.job.unmodified.resume_state import ResumeStateFile
from slurm_elastic.job.unmodified.script_watch import ScriptWatch


class RecordingGuard:
    """Guard that records its calls.

    Attributes:
        on_freeze: what the script does before it stands.
        can_freeze: whether ranks can be frozen.
        is_frozen: whether they are.
        is_guarded: whether guards run.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.on_freeze: Callable[[], object] = lambda: None
        self.can_freeze = True
        self.is_frozen = False
        self.is_guarded = False

    def guard(self) -> None:
        if not self.is_guarded:
            self.calls.append("guard")
        self.is_guarded = True

    def freeze(self) -> bool:
        self.on_freeze()
        self.is_frozen = self.can_freeze
        return self.can_freeze

    def arm(self) -> None:
        self.calls.append("arm")

    def unguard(self) -> None:
        self.calls.append("unguard")
        self.is_frozen = self.is_guarded = False


class ScriptJob:
    """One run of a job whose script is the test; a later run shares the files.

    Attributes:
        runs: all of the present test.
        ended: how often its ranks were ended, as each trained alone.
    """

    runs: ClassVar[list["ScriptJob"]] = []

    def __init__(
        self,
        home: Path,
        *,
        run: int = 0,
        has_signal: bool = False,
        world: int = 1,
        hosts: int = 1,
        pattern: str = "*.pt",
        complete: str | None = None,
        command: str = "",
        directories: Sequence[str] | None = None,
        accumulation: FixedAccumulation | None = None,
        are_alone: Callable[[int], bool | None] = lambda _: False,
        job_id: int = 7,
    ) -> None:
        self.runs.append(self)
        self.ended = 0
        self.home = home
        self.now = 100.0 + 1000 * run
        self.state = ReportState(
            Report(job_id=job_id, run=run, phase="starting"), clock=lambda: self.now
        )
        self.memory = ResumeStateFile(f"r-{job_id}", directories or [str(home / "memory")])
        self.signals = 0
        self.guard = RecordingGuard()
        self.watch = ScriptWatch(
            pattern=f"{home}/{pattern}",
            state=self.state,
            resume_file=self.memory,
            send_signal=self._send_signal if has_signal else None,
            run_id=f"r-{job_id}",
            guard=self.guard,
            world=world,
            hosts=hosts,
            complete=complete,
            command=command,
            accumulation=accumulation,
            are_alone=are_alone,
            end_ranks=self._end_ranks,
            clock=lambda: self.now,
        )
        self.state.subscribe(self.watch.apply_orders)
        self.watch.begin_attempt(restarted=run > 0)
        self._seq = 0
        self._saves = 0

    def _send_signal(self) -> None:
        self.signals += 1

    def _end_ranks(self) -> None:
        self.ended += 1

    def order(self, action: str, notice: int | None = None, *, rehearsal: bool = False) -> None:
        self._seq += 1
        orders = Orders(seq=self._seq, action=action, notice=notice, rehearsal=rehearsal)
        self.state.receive(orders, authoritative=True)

    def write(self, name: str = "") -> Path:
        self._saves += 1
        path = self.home / (name or f"s{self._saves}-{self.state.report().run}.pt")
        path.write_text("x" * self._saves)
        os.utime(path, (self.now, self.now))
        return path

    def settle(self) -> Report:
        """Scan twice, with `FIRST_S` between, and return the report."""
        self.watch.check()
        self.now += FIRST_S + 0.1
        self.watch.check()
        return self.state.report()

    def save(self, name: str = "") -> Report:
        self.write(name)
        return self.settle()

    def finish_copies(self) -> Report:
        """Wait for the threads that keep checkpoints, and return the report."""
        while copies := [t for t in threading.enumerate() if t.name in ("keep", "remove")]:
            for thread in copies:
                thread.join(10)
        return self.state.report()

    @classmethod
    def close_all(cls) -> None:
        """Give back the inotify instances of this test's runs: a user has few of them."""
        for run in cls.runs:
            run.watch._reads.close()
            run.watch._scanner.close()
        cls.runs.clear()
