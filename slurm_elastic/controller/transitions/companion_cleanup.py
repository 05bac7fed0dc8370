"""End of companions whose base is gone, and of those that belong to no change.

Nothing in Slurm ends a companion with its base. Its own script does when the base's esrun is gone
or silent; this is the last resort (docs/adr/0018-in-place-changes.md). A job is cancelled only if
AdminComment, which its owner cannot change, says that it is a companion, or if it was placed as
one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from slurm_elastic.controller.companions.companion_folding import base_of
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.transitions.transition_engine import TransitionEngine
from slurm_elastic.core.cluster import Job, JobState
from slurm_elastic.core.reason import Reason
from slurm_elastic.slurm.scontrol import Scontrol, ScontrolError, SlurmUnreachableError

#: Name of the ids in the ledger.
_KEPT_AS = "placed_companions"
#: Seconds that a companion may be without a base, or belong to no change. In that time its own
#: script ends it, or its base's esrun reports to a controller that has lost its ledger.
_ORPHAN_S = 15.0
_UNKNOWN_S = 90.0


class CompanionCleanup:
    """Companions that do not belong to a running job.

    Args:
        scontrol: writes.
        store: has the companions that were placed.
        engine: has those of changes under way.
        ledger: keeps the ids of placed companions, as long as Slurm lists them.
        log: structlog logger.
    """

    def __init__(
        self,
        scontrol: Scontrol,
        store: JobStore,
        engine: TransitionEngine,
        ledger: Ledger,
        log: Any,
    ) -> None:
        self._scontrol, self._store, self._engine = scontrol, store, engine
        self._ledger, self._log = ledger, log
        self._seen: dict[int, float] = {}
        kept = ledger.get(_KEPT_AS, [])
        self._placed = frozenset(i for i in kept if isinstance(i, int))

    def sweep(self, jobs: Mapping[int, Job], companions: Mapping[int, Job]) -> None:
        """Cancel companions that belong to nothing for some time.

        Args:
            jobs: as Slurm shows them, by id.
            companions: jobs whose comment marks them as companions.

        Raises:
            LedgerError: the ids of placed companions cannot be written.
        """
        self._note_placed(jobs, companions)
        now = time.monotonic()
        strays = {}
        for job_id, companion in companions.items():
            if companion.state in (JobState.PENDING, JobState.RUNNING):
                reason = self._stray(companion, jobs)
                if reason is not None:
                    strays[job_id] = reason
        self._seen = {i: self._seen.get(i, now) for i in strays}
        for job_id, reason in strays.items():
            if now - self._seen[job_id] >= _patience_s(companions[job_id], reason):
                self._cancel(companions[job_id], reason)

    def _note_placed(self, jobs: Mapping[int, Job], companions: Mapping[int, Job]) -> None:
        """Keep which jobs are placed companions, for the time after their base."""
        bases = {c.companion.base for c in companions.values() if c.companion is not None}
        placed = set(self._placed)
        for base in (jobs[i] for i in bases if i in jobs):
            if base.submission is not None:
                placed |= self._store.companions(base) | self._engine.companions(base)
        present = frozenset(placed & companions.keys())
        if present != self._placed:
            self._ledger.put(_KEPT_AS, sorted(present))
            self._placed = present

    def _stray(self, companion: Job, jobs: Mapping[int, Job]) -> Reason | None:
        """Return why a companion is to end, or None; one that trains is adopted."""
        is_known = companion.companion_recorded or companion.job_id in self._placed
        if not is_known or self._engine.awaits(companion):
            return None
        base = base_of(companion, jobs)
        if base is None:
            return Reason("companion-orphaned")
        if companion.run:
            return Reason("companion-unknown")
        if companion.job_id in self._store.companions(base) | self._engine.companions(base):
            return None
        if companion.state is JobState.RUNNING and self._trains(companion, base):
            self._log.warning(f"JobId={base.display_id} Companion={companion.job_id} Adopted=yes")
            self._store.adopt_companion(base, companion.job_id)
            return None
        return Reason("companion-unknown")

    def _trains(self, companion: Job, base: Job) -> bool:
        """Return whether the base's esrun reports that ranks train there."""
        report = self._store.last_report(base.job_id)
        if report is None or report.run != base.run:
            return False
        return any(row[0] == companion.job_id and row[2] == "joined" for row in report.companions)

    def _cancel(self, companion: Job, reason: Reason) -> None:
        self._log.warning(f"JobId={companion.display_id} Action=cancel Reason={reason}")
        try:
            self._scontrol.cancel(companion)
        except SlurmUnreachableError:
            raise
        except ScontrolError as error:
            self._log.warning(f"JobId={companion.display_id} Problem={error}")


def _patience_s(companion: Job, reason: Reason) -> float:
    """Return the seconds that a stray companion is left to end by itself, or to be reported."""
    if companion.run:
        # Slurm requeues what it could not launch in spite of --no-requeue: nobody waits for it.
        return 0.0
    return _ORPHAN_S if reason.code == "companion-orphaned" else _UNKNOWN_S
