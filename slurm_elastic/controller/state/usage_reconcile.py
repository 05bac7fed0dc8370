"""Allocation segments corrected by Slurm's accounting, to the second.

The controller reads the end of a run at its next poll. Slurm's accounting has the exact time some
seconds later: end and length of each segment come from there, and whole segments of runs while
the controller was away. Segments without a record in sacct stay as they were seen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.slurm import accounting
from slurm_elastic.slurm.accounting import AccountedRun

#: Seconds between two reads of sacct: while some usage is not settled yet, and otherwise.
_SOON_S, _LATER_S = 10.0, 600.0
#: Age at which usage is no longer looked for in sacct; the first read goes as far back.
_OLD_S = 2 * 86400.0
#: slurmdbd may hear of runs late.
_LATE_S = 900.0
_MARK = "accounted"


class UsageReconciler:
    """Correction of segments in the background.

    Args:
        ledger: holds the segments.
        log: structlog logger.
    """

    def __init__(self, ledger: Ledger, log: Any) -> None:
        self._ledger, self._log = ledger, log
        self._next = 0.0
        self._thread: threading.Thread | None = None
        self._trouble = ""

    def tick(self) -> None:
        """Start a query of the accounting if it is due; never waits."""
        now = time.monotonic()
        if now < self._next or (self._thread and self._thread.is_alive()):
            return
        self._next = now + _SOON_S
        self._thread = threading.Thread(target=self._work, name="accounting", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._look()
        except SlurmElasticError as error:
            self._next = time.monotonic() + _LATER_S / 10
            if str(error) != self._trouble:
                self._log.warning(f"{error}; `selastic usage` counts what was seen until then")
            self._trouble = str(error)
            return
        self._trouble = ""

    def _look(self) -> None:
        now = time.time()
        oldest = self._ledger.unsettled(now - _OLD_S)
        mark = float(self._ledger.get(_MARK, now - _OLD_S))
        if oldest is None and now - mark < _LATER_S:
            return
        since = min(mark - _LATE_S, now if oldest is None else oldest)
        settle(self._ledger, accounting.runs(max(since, now - _OLD_S)))
        self._ledger.put(_MARK, now)


def settle(ledger: Ledger, runs: Iterable[AccountedRun]) -> int:
    """Correct ended segments by accounting; return how many changed."""
    count = 0
    for run in runs:
        if run.end is None:
            continue
        if ledger.settle(run.job_id, run.run, run.start, end=run.end, seconds=run.seconds):
            count += 1
        elif run.gpus and (key := _key(ledger, run)):
            count += ledger.add_settled(
                {
                    "key": key,
                    "job_id": run.job_id,
                    "user": run.user,
                    "run": run.run,
                    "gpu_type": run.gpu_type,
                    "gpus": run.gpus,
                    "start": float(run.start),
                    "end": float(run.end),
                    "seconds": run.seconds,
                }
            )
    return count


def _key(ledger: Ledger, run: AccountedRun) -> str:
    """Return the key of the elastic job of a run; "": unknown."""
    if run.submitted is not None:
        return f"{run.job_id}@{run.submitted}"
    key = ledger.key_of(run.job_id)
    at = key.partition("@")[2]
    return key if at.isdigit() and int(at) <= run.start else ""
