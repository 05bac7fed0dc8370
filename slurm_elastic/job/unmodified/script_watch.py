"""Scripts that save and load their own checkpoints: watched, not changed.

What the controller learns of them, and what orders mean for them (the whole
definition is in docs/esrun.md):

- `notice`: ask for a save with the signal, if there is one; `saved` once a
  checkpoint has become complete, after asking one that was still changing.
- `rehearse`: after the next complete checkpoint end the step and start it
  again, to see whether the script resumes.
- proven: a restart has read the newest checkpoint and then written a newer.

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
from slurm_elastic.job.launch import say
from slurm_elastic.job.report_state import ReportState
from slurm_elastic.job.unmodified.checkpoint_scanner import CheckpointScanner, ScriptCheckpoint
from slurm_elastic.job.unmodified.inotify import ReadWatch
from slurm_elastic.job.unmodified.resume_state import ResumeStateFile

#: Looks at the checkpoints: while one is being written on another host, after a change, and while
#: the controller waits.
_TICK_S, _SETTLE_TICK_S, _QUICK_TICK_S = 10.0, 0.5, 0.1
_BURST_S = 0.1
#: Files that a script writes together (`last`, `best`) are one save, and reading any is resuming.
_SAME_SAVE_S = 1.0
_SAME_READ_S = 60.0


class TerminationHandler(Protocol):
    """Who makes ranks leave at Slurm's SIGTERM (`ranks.Ranks`)."""

    def guard(self) -> None:
        """Get ready: a notice has come."""

    def arm(self) -> None:
        """It has been answered: nothing is lost with the ranks any more."""

    def unguard(self) -> None:
        """It has been withdrawn."""


class ScriptWatch:
    """Watches one script through all attempts of one run.

    Args:
        pattern: of its checkpoints.
        desk: where to report and what was ordered.
        memory: what is known from earlier runs.
        ask: sends the user's signal to the ranks; None without one.
        restart: ends the step, to be started again in place.
        guard: sees to it that nobody waits for ranks that have nothing to lose.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        pattern: str,
        desk: ReportState,
        memory: ResumeStateFile,
        ask: Callable[[], None] | None,
        restart: Callable[[], None],
        guard: TerminationHandler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._desk = desk
        self._file = memory
        self._memory = memory.load()
        self._ask = ask
        self._restart = restart
        self._guard = guard
        self._clock = clock
        self._scanner = CheckpointScanner(pattern, clock=clock)
        self._lock = threading.Lock()
        self._orders = Orders()
        self._noticed_at = 0.0
        self._asked: int | None = None
        self._acknowledged: int | None = None
        self._rehearsing = False
        self._reads: ReadWatch | None = None
        self._candidates: frozenset[str] = frozenset()
        self._written = 0
        self._last_complete: float | None = None
        self._last_seen = -math.inf
        self._several_files = False
        self._retired = False

    def begin_attempt(self, *, restarted: bool) -> None:
        """Before each start of the step: all that is there is complete, and reading it counts.

        Args:
            restarted: this job has run before and may have something to resume from.
        """
        with self._lock:
            self._scanner.adopt()
            self._written = 0
            self._last_complete = None
            self._close_reads()
            found = self._scanner.complete
            if restarted and found and self._memory.count:
                newest = found[0].written
                together = [c.path for c in found if c.written >= newest - _SAME_READ_S]
                self._candidates = frozenset(together)
                self._reads = ReadWatch(together)
                if not self._reads.works:
                    say("reads of checkpoints cannot be watched here: no proof is possible")
                    self._close_reads()
        self._desk.tell(
            {
                "kind": "script",
                "step": self._memory.count,
                "checkpoint_step": self._memory.count or None,
                "proven": self._memory.proven,
            }
        )

    def start(self) -> None:
        """Watch, in the background."""
        self._desk.subscribe(self.obey)
        threading.Thread(target=self._run, name="checkpoints", daemon=True).start()

    @property
    def parked(self) -> bool:
        """Whether a notice has been answered: whatever the script does now is lost anyway."""
        return self._acknowledged is not None

    def obey(self, orders: Orders) -> None:
        """Take new orders."""
        if self._retired:
            return
        with self._lock:
            before, self._orders = self._orders, orders
            if orders.action == "notice" and orders.notice != before.notice:
                self._noticed_at = self._clock()
                self._last_complete = None
                self._guard.guard()
                how = "asking for a checkpoint" if self._can_ask() else "at the next checkpoint"
                say(f"notice {orders.notice}: {orders.reason or 'a resize'}; {how}")
            elif orders.action != "notice" and before.action == "notice":
                self._guard.unguard()
                self._acknowledged = None
                say(f"notice {before.notice} is withdrawn: {orders.reason or 'going on'}")
                self._desk.tell({"phase": "training", "notice": None})
        if orders.action == "notice" and orders.notice != self._acknowledged:
            self._desk.tell({"phase": "saving", "notice": orders.notice})
            self._ask_once(orders)
        self._scanner.poke()

    def _can_ask(self) -> bool:
        # Before its first checkpoint a script may not have installed its handler: it would die.
        return self._ask is not None and self._written > 0

    def _ask_once(self, orders: Orders) -> None:
        if self._ask and self._can_ask() and self._asked != orders.notice:
            self._asked = orders.notice
            self._ask()

    def retire(self) -> None:
        """Stop: the program reports for itself."""
        self._retired = True

    def _run(self) -> None:
        while not self._retired:
            self._scanner.wait(self._patience())
            # Events come in bursts, and each look costs the file server a stat per checkpoint.
            time.sleep(_BURST_S)
            self.look()

    def _patience(self) -> float:
        """How long nothing needs to be looked at if nothing happens on this host."""
        if self._orders.action == "notice" and not self.parked:
            return _QUICK_TICK_S
        return _SETTLE_TICK_S if self._scanner.unsettled else _TICK_S

    def look(self) -> None:
        """One look at the checkpoints and what follows from it."""
        restart = False
        with self._lock:
            for checkpoint in self._scanner.scan():
                restart = self._complete(checkpoint) or restart
        if restart:
            self._restart()

    def _complete(self, checkpoint: ScriptCheckpoint) -> bool:
        """A checkpoint is complete; whether the step is to be restarted now."""
        gap, self._last_seen = checkpoint.changed_at - self._last_seen, checkpoint.changed_at
        if gap < _SAME_SAVE_S:
            self._several_files = True
            self._scanner.trust_renames = False
            self._desk.tell(self._answer(checkpoint))
            return False
        self._scanner.trust_renames = self._written > 0 and not self._several_files
        self._written += 1
        self._memory.count += 1
        self._judge()
        self._file.save(self._memory)
        fields = {
            "phase": "training",
            "step": self._memory.count,
            "checkpoint_step": self._memory.count,
            "checkpoint_age_s": self._clock() - checkpoint.changed_at,
            "proven": self._memory.proven,
        }
        if self._last_complete is not None:
            fields |= {"step_time_s": checkpoint.written - self._last_complete}
            fields |= {"steps_measured": 1}
        self._last_complete = checkpoint.written
        self._desk.tell(fields | self._answer(checkpoint))
        wanted = self._orders.action == "rehearse" and not self._rehearsing
        if not wanted or self._memory.proven or self._memory.refuted:
            return False
        self._rehearsing = True
        say(f"rehearsal: ending the step after {Path(checkpoint.path).name}, to see it resume")
        return True

    def _answer(self, checkpoint: ScriptCheckpoint) -> dict[str, Any]:
        """What a complete checkpoint means for a notice, as fields of a report."""
        orders = self._orders
        if orders.action != "notice":
            return {}
        asked = self._asked == orders.notice
        early = asked and checkpoint.changed_at < self._noticed_at
        if early or (self._scanner.unsettled and not self.parked):
            return {"phase": "saving", "notice": orders.notice}
        if self._acknowledged != orders.notice:
            self._acknowledged = orders.notice
            self._guard.arm()
            say(f"notice {orders.notice}: {Path(checkpoint.path).name} is complete")
        return {"phase": "saved", "notice": orders.notice}

    def _judge(self) -> None:
        """The first new checkpoint of a restart tells whether the script has resumed."""
        if self._reads is None:
            return
        resumed = bool(self._reads.seen() & self._candidates)
        self._close_reads()
        if resumed:
            self._memory.proven = True
            self._memory.refuted = False
            self._desk.tell({"resumed_from": self._memory.count - 1})
            say("resumed: the script has read its newest checkpoint and written a newer one")
        else:
            self._memory.refuted = True
            say(
                "the restarted script has written a checkpoint without reading any of the earlier "
                "ones: it does not resume, and will not be resized"
            )

    def _close_reads(self) -> None:
        if self._reads is not None:
            self._reads.close()
            self._reads = None
