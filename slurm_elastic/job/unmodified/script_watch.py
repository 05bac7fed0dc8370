"""Watch of a script that saves and loads its own checkpoints.

Reports and orders of such scripts (defined in docs/esrun.md):

- `notice`: request a checkpoint by the signal, if there is one; report `saved` when a checkpoint is
  complete; after the signal, only if it has changed since the notice.
- `rehearse`: after the next complete checkpoint end the step and start it again, to check that the
  script resumes.
- proven: a restart has read the newest checkpoint and then written a newer one.

The thread of this module watches; the supervisor restarts.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from slurm_elastic.core.report import Orders
from slurm_elastic.job.launch import log_line
from slurm_elastic.job.report_state import ReportState
from slurm_elastic.job.unmodified.checkpoint_scanner import CheckpointScanner, ScriptCheckpoint
from slurm_elastic.job.unmodified.inotify import ReadWatch
from slurm_elastic.job.unmodified.resume_state import ResumeStateFile

#: Seconds between scans without events: by default, while a checkpoint is incomplete, and while the
#: controller waits for one.
_TICK_S, _SETTLE_TICK_S, _QUICK_TICK_S = 10.0, 0.5, 0.1
_BURST_S = 0.1
#: Files written within these seconds (`last`, `best`) are one save, and a read of any is a resume.
_SAME_SAVE_S = 1.0
_SAME_READ_S = 60.0


class TerminationHandler(Protocol):
    """Interface of `rank_signals.RankSignals`: kills ranks that ignore Slurm's SIGTERM."""

    def guard(self) -> None:
        """Prepare, after a notice."""

    def arm(self) -> None:
        """Kill the ranks from now on: the notice is answered and all is saved."""

    def unguard(self) -> None:
        """Undo `guard` and `arm`: the notice is withdrawn."""


class ScriptWatch:
    """Watch of one script through all attempts of one run.

    Args:
        pattern: glob pattern of its checkpoints.
        state: gets reports, has the orders.
        resume_file: state of earlier runs.
        send_signal: sends the user's signal to the ranks; None without one.
        restart: ends the step, to be started again in place.
        guard: kills ranks that have saved and ignore SIGTERM.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        pattern: str,
        state: ReportState,
        resume_file: ResumeStateFile,
        send_signal: Callable[[], None] | None,
        restart: Callable[[], None],
        guard: TerminationHandler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._file = resume_file
        self._resume = resume_file.load()
        self._send_signal = send_signal
        self._restart = restart
        self._guard = guard
        self._clock = clock
        self._scanner = CheckpointScanner(pattern, clock=clock)
        self._lock = threading.Lock()
        self._orders = Orders()
        self._notice_at = 0.0
        self._signalled_notice: int | None = None
        self._answered_notice: int | None = None
        self._rehearsing = False
        self._read_watch: ReadWatch | None = None
        self._candidates: frozenset[str] = frozenset()
        self._written = 0
        self._last_complete: float | None = None
        self._last_changed_at = -math.inf
        self._several_files = False
        self._is_stopped = False

    def begin_attempt(self, *, restarted: bool) -> None:
        """Take the existing checkpoints as complete and watch for reads; before each start.

        Args:
            restarted: whether this job has run before and may resume.
        """
        with self._lock:
            self._scanner.accept_existing()
            self._written = 0
            self._last_complete = None
            self._close_read_watch()
            existing = self._scanner.complete
            if restarted and existing and self._resume.count:
                newest = existing[0].written
                candidates = [c.path for c in existing if c.written >= newest - _SAME_READ_S]
                self._candidates = frozenset(candidates)
                self._read_watch = ReadWatch(candidates)
                if not self._read_watch.is_active:
                    log_line("inotify: no watch on the checkpoints: a resume cannot be detected")
                    self._close_read_watch()
        self._state.update(
            {
                "kind": "script",
                "step": self._resume.count,
                "checkpoint_step": self._resume.count or None,
                "proven": self._resume.proven,
            }
        )

    def start(self) -> None:
        """Start the watch in the background."""
        self._state.subscribe(self.apply_orders)
        threading.Thread(target=self._run, name="checkpoints", daemon=True).start()

    @property
    def has_answered_notice(self) -> bool:
        """Whether a notice has been answered; what the script does after that is lost."""
        return self._answered_notice is not None

    def apply_orders(self, orders: Orders) -> None:
        """Act on new orders."""
        if self._is_stopped:
            return
        with self._lock:
            old_orders, self._orders = self._orders, orders
            if orders.action == "notice" and orders.notice != old_orders.notice:
                self._notice_at = self._clock()
                self._last_complete = None
                self._guard.guard()
                request = "requesting a" if self._can_signal() else "waiting for the next"
                reason = orders.reason or "a resize"
                log_line(f"notice {orders.notice}: {reason}; {request} checkpoint")
            elif orders.action != "notice" and old_orders.action == "notice":
                self._guard.unguard()
                self._answered_notice = None
                reason = orders.reason or "the job continues"
                log_line(f"notice {old_orders.notice} is withdrawn: {reason}")
                self._state.update({"phase": "training", "notice": None})
        if orders.action == "notice" and orders.notice != self._answered_notice:
            self._state.update({"phase": "saving", "notice": orders.notice})
            self._signal_once(orders)
        self._scanner.wake()

    def _can_signal(self) -> bool:
        # Before its first checkpoint a script may not have installed its handler: it would die.
        return self._send_signal is not None and self._written > 0

    def _signal_once(self, orders: Orders) -> None:
        if self._send_signal and self._can_signal() and self._signalled_notice != orders.notice:
            self._signalled_notice = orders.notice
            self._send_signal()

    def stop(self) -> None:
        """Stop the watch: the program reports by itself."""
        self._is_stopped = True

    def _run(self) -> None:
        while not self._is_stopped:
            self._scanner.wait(self._interval_s())
            # Events come in bursts, and each scan costs the file server a stat per checkpoint.
            time.sleep(_BURST_S)
            self.check()

    def _interval_s(self) -> float:
        """Return the seconds until the next scan if no event comes."""
        if self._orders.action == "notice" and not self.has_answered_notice:
            return _QUICK_TICK_S
        return _SETTLE_TICK_S if self._scanner.unsettled else _TICK_S

    def check(self) -> None:
        """Scan the checkpoints once, report, and restart the step for a rehearsal."""
        restart = False
        with self._lock:
            for checkpoint in self._scanner.scan():
                restart = self._count(checkpoint) or restart
        if restart:
            self._restart()

    def _count(self, checkpoint: ScriptCheckpoint) -> bool:
        """Count and report a complete checkpoint; return whether to restart the step now."""
        gap = checkpoint.changed_at - self._last_changed_at
        self._last_changed_at = checkpoint.changed_at
        if gap < _SAME_SAVE_S:
            self._several_files = True
            self._scanner.trust_renames = False
            self._state.update(self._notice_fields(checkpoint))
            return False
        self._scanner.trust_renames = self._written > 0 and not self._several_files
        self._written += 1
        self._resume.count += 1
        self._record_resume()
        self._file.save(self._resume)
        fields = {
            "phase": "training",
            "step": self._resume.count,
            "checkpoint_step": self._resume.count,
            "checkpoint_age_s": self._clock() - checkpoint.changed_at,
            "proven": self._resume.proven,
        }
        if self._last_complete is not None:
            fields |= {"step_time_s": checkpoint.written - self._last_complete}
            fields |= {"steps_measured": 1}
        self._last_complete = checkpoint.written
        self._state.update(fields | self._notice_fields(checkpoint))
        ordered = self._orders.action == "rehearse" and not self._rehearsing
        if not ordered or self._resume.proven or self._resume.refuted:
            return False
        self._rehearsing = True
        name = Path(checkpoint.path).name
        log_line(f"rehearsal: ending the step after {name}, to check that the script resumes")
        return True

    def _notice_fields(self, checkpoint: ScriptCheckpoint) -> dict[str, Any]:
        """Return the fields of a report that a complete checkpoint changes under a notice."""
        orders = self._orders
        if orders.action != "notice":
            return {}
        signalled = self._signalled_notice == orders.notice
        too_early = signalled and checkpoint.changed_at < self._notice_at
        if too_early or (self._scanner.unsettled and not self.has_answered_notice):
            return {"phase": "saving", "notice": orders.notice}
        if self._answered_notice != orders.notice:
            self._answered_notice = orders.notice
            self._guard.arm()
            log_line(f"notice {orders.notice}: {Path(checkpoint.path).name} is complete")
        return {"phase": "saved", "notice": orders.notice}

    def _record_resume(self) -> None:
        """Decide at the first new checkpoint of a restart whether the script has resumed."""
        if self._read_watch is None:
            return
        resumed = bool(self._read_watch.paths_read() & self._candidates)
        self._close_read_watch()
        if resumed:
            self._resume.proven = True
            self._resume.refuted = False
            self._state.update({"resumed_from": self._resume.count - 1})
            log_line("resumed: the script has read its newest checkpoint and written a newer one")
        else:
            self._resume.refuted = True
            log_line(
                "the restarted script has written a checkpoint without reading an earlier one:"
                " it does not resume, and will not be resized"
            )

    def _close_read_watch(self) -> None:
        if self._read_watch is not None:
            self._read_watch.close()
            self._read_watch = None
