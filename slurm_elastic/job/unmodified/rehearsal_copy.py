"""Copy of the newest save that is made before a rehearsal, in a thread of its own.

The notice of a rehearsal is answered when the copy is complete and the script has not saved again
meanwhile (docs/esrun-proven.md).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from slurm_elastic.core.report import Orders
from slurm_elastic.job.report_state import ReportState
from slurm_elastic.job.unmodified.checkpoints.checkpoint_scanner import ScriptCheckpoint
from slurm_elastic.job.unmodified.checkpoints.inotify import ReadWatch
from slurm_elastic.job.unmodified.kept_checkpoint import KeepError, KeptCheckpoint
from slurm_elastic.job.unmodified.rehearsal import Rehearsal

#: A rehearsal may begin at a checkpoint that was shown to be complete so many seconds before its
#: notice: what was trained since its last change is lost (our choice).
_FRESH_S = 120.0
#: Times that a checkpoint is copied which the script replaces meanwhile.
_MOST_COPIES = 3
#: Seconds that the end of an attempt waits for a copy under way to be removed.
_END_COPY_S = 5.0


class NoticeHandler(Protocol):
    """Interface of `script_watch.ScriptWatch` for the copy; all but `orders` under its lock."""

    @property
    def orders(self) -> Orders:
        """The present orders; no notice, once the watch has stopped."""

    def count_new(self) -> bool:
        """Scan and count what has become complete; return whether no save is under way."""

    def freeze(self) -> bool:
        """Freeze the ranks; return False if a save had begun before they stood."""

    def thaw(self) -> None:
        """Let the ranks go on."""

    def answer(self, checkpoint: ScriptCheckpoint) -> None:
        """Answer the notice: all is saved, in this checkpoint."""

    def copy_ended(self) -> None:
        """Look whether another copy is due; called without the lock."""


class RehearsalCopy:
    """Copies for the rehearsal of one script.

    Args:
        rehearsal: keeps the files.
        handler: has the notice, and answers it.
        state: gets the refusals.
        lock: of the handler.
        clock: monotonic seconds.

    Attributes:
        declined: notice that was refused last.
    """

    def __init__(
        self,
        rehearsal: Rehearsal,
        handler: NoticeHandler,
        state: ReportState,
        *,
        lock: threading.Lock,
        clock: Callable[[], float],
    ) -> None:
        self._rehearsal, self._handler, self._state = rehearsal, handler, state
        self._lock, self._clock = lock, clock
        self._save: list[ScriptCheckpoint] = []
        self._saved_at = -math.inf
        self._thread: threading.Thread | None = None
        self._is_copying = self._has_ended = False
        self._count = 0
        self.declined: int | None = None

    def begin_attempt(self) -> None:
        """Forget the saves of the attempt before."""
        self._save, self._has_ended = [], False

    def end_attempt(self) -> None:
        """Give up a copy under way; to be called without the lock."""
        self._has_ended = True
        if self._thread is not None:
            self._thread.join(_END_COPY_S)

    def begin_notice(self) -> None:
        """Begin to count the copies for another notice."""
        self._count = 0

    def wait_for_next(self) -> None:
        """Forget the newest save: the script goes on, and the next one answers."""
        self._save = []

    def add(self, checkpoint: ScriptCheckpoint, *, same_save: bool) -> None:
        """Add a complete checkpoint to the newest save, or begin another one with it."""
        self._saved_at = self._clock()
        self._save = [*self._save, checkpoint] if same_save else [checkpoint]

    def start_if_due(self, notice: int | None, notice_at: float, *, is_signalled: bool) -> None:
        """Begin to copy the newest save, if it is recent enough for this notice.

        Args:
            notice: of a rehearsal, not answered.
            notice_at: when it came.
            is_signalled: whether the script was asked to save for it.
        """
        if self._is_copying or self._has_ended or notice == self.declined or not self._save:
            return
        if is_signalled:
            is_due = self._save[-1].changed_at >= notice_at
        else:
            is_due = self._saved_at >= notice_at - _FRESH_S
        if not is_due:
            return
        self._is_copying = True
        arguments = (notice, list(self._save))
        self._thread = threading.Thread(target=self._copy, args=arguments, name="keep")
        self._thread.daemon = True
        self._thread.start()

    def _copy(self, notice: int | None, save: list[ScriptCheckpoint]) -> None:
        started = time.monotonic()
        kept: KeptCheckpoint | None = None
        problem: KeepError | None = None
        paths = [checkpoint.path for checkpoint in save]
        try:
            _check_read_watch(paths)
            kept = self._rehearsal.keep(paths, lambda: not self._is_asked(notice))
        except KeepError as error:
            problem = error
        with self._lock:
            self._is_copying = False
            is_quiet = self._handler.count_new()
            # The scan and the copy have seen the same version, or the copy is of no use.
            if kept is not None and (self._save != save or not is_quiet or not kept.intact()):
                problem = KeepError("changes")
            if problem is not None and self._save == save:
                self._save = []  # the next one is tried
            self._finish(notice, kept, problem, time.monotonic() - started)
        self._handler.copy_ended()

    def _is_asked(self, notice: int | None) -> bool:
        orders = self._handler.orders
        return orders.action == "notice" and orders.notice == notice and not self._has_ended

    def _finish(
        self,
        notice: int | None,
        kept: KeptCheckpoint | None,
        problem: KeepError | None,
        seconds: float,
    ) -> None:
        if not self._is_asked(notice):
            self._rehearsal.discard(kept)
            return
        if problem is None and kept is not None and not (self._handler.freeze() and kept.intact()):
            self._handler.thaw()
            problem = KeepError("changes")
        if problem is not None:
            self._rehearsal.discard(kept)
            self._count += 1
            if problem.problem != "changes" or self._count >= _MOST_COPIES:
                self._decline(notice, problem)
            return
        if kept is None or not self._rehearsal.commit(kept, seconds):
            self._handler.thaw()
            self._decline(notice, self._rehearsal.no_place())
            return
        self._handler.answer(self._save[0])

    def _decline(self, notice: int | None, problem: KeepError) -> None:
        self.declined = notice
        fields = self._rehearsal.decline(problem)
        self._state.update({**fields, "phase": "training", "notice": None})


def _check_read_watch(paths: list[str]) -> None:
    """Check that a restart can be shown to read these.

    Raises:
        KeepError: inotify gives no watch.
    """
    watch = ReadWatch(paths)
    watch.close()
    if not watch.is_active:
        raise KeepError("no-watch", remedy=watch.remedy)
