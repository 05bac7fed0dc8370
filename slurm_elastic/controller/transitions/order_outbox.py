"""Orders for each job: one action for one attempt, and settings that stand until replaced.

Nothing is sent from here: jobs fetch orders with their next report or a long poll. An action is
meant for one attempt (restart count) of a job; others do not see it. Settings (layout, batch,
frozen layers) hold from an attempt on: those for the GPUs that a job is about to get must not
reach it while it still has the old ones.

>>> outbox = OrderOutbox()
>>> outbox.ask(7, Orders(action="notice", notice=3), run=0)
>>> outbox.tell(7, run=1, batch=512)
True
>>> outbox.orders(7, 0).action, outbox.orders(7, 1).action, outbox.orders(7, 1).batch
('notice', 'run', 512)
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Orders

#: Seconds between two reports of a job: where few jobs report, and where very many do (a job that
#: was not heard of for three minutes is left alone).
_REPORT_EVERY_S, _SELDOM_S = Orders().report_every_s, 45.0
#: Most reports a second of all jobs together (our choice).
_REPORTS_PER_S = 25.0


class DesiredSettings:
    """Settings by job and field of `Orders`, each with the attempt from which it holds.

    Not thread-safe: its owner holds a lock.

    >>> settings = DesiredSettings()
    >>> settings.put(7, run=0, seq=1, batch=256), settings.put(7, run=1, seq=2, batch=512)
    (True, True)
    >>> settings.on(Orders(), 7, run=0).batch, settings.on(Orders(seq=9), 7, run=3).batch
    (256, 512)
    """

    def __init__(self) -> None:
        self._values: dict[int, dict[str, dict[int, tuple[int, Any]]]] = {}

    def put(self, job_id: int, *, run: int, seq: int, **values: Any) -> bool:
        """Set values from this attempt on; return whether any of them is new.

        Args:
            job_id: the job.
            run: restart count of the attempt.
            seq: of the orders that tell it, if it is news.
            values: by field of `Orders`; None and "" leave it to the job.
        """
        fields = self._values.setdefault(job_id, {})
        news = False
        for name, value in values.items():
            runs = fields.setdefault(name, {})
            if _equal(_at(runs, run), value) and all(r <= run for r in runs):
                continue
            # What was meant for later attempts is void.
            fields[name] = {r: setting for r, setting in runs.items() if r < run} | {
                run: (seq, value)
            }
            news = True
        return news

    def on(self, orders: Orders, job_id: int, *, run: int) -> Orders:
        """Return these orders with the settings of the attempt; `seq` is the higher of both."""
        fields = self._values.get(job_id)
        if not fields:
            return orders
        settings = {
            name: setting for name, runs in fields.items() if (setting := _latest(runs, run))
        }
        seq = max([orders.seq, *(seq for seq, _ in settings.values())])
        values = {name: value for name, (_, value) in settings.items()}
        return dataclasses.replace(orders, seq=seq, **values)

    def forget(self, alive: Collection[int]) -> None:
        """Drop the settings of jobs that are gone."""
        self._values = {k: v for k, v in self._values.items() if k in alive}


def _latest(runs: dict[int, tuple[int, Any]], run: int) -> tuple[int, Any] | None:
    """Return number and value of the latest attempt up to this one."""
    known = [r for r in runs if r <= run]
    return runs[max(known)] if known else None


def _at(runs: dict[int, tuple[int, Any]], run: int) -> Any:
    setting = _latest(runs, run)
    return setting[1] if setting else None


def _equal(first: Any, second: Any) -> bool:
    return first == second or {first, second} == {None, ""}


class OrderOutbox:
    """Orders by job. Thread-safe.

    Attributes:
        wake: called with a job id whose orders have changed.
    """

    def __init__(self) -> None:
        self.wake: Callable[[int], object] = lambda _: None
        self._lock = threading.RLock()
        self._asked: dict[int, tuple[int, Orders, Reason | None]] = {}
        self._standing = DesiredSettings()
        self._seq = int(time.time())
        self._report_every_s = _REPORT_EVERY_S

    def set_report_interval(self, jobs: int) -> None:
        """Let this number of jobs together send at most `_REPORTS_PER_S` reports a second."""
        every_s = min(max(_REPORT_EVERY_S, jobs / _REPORTS_PER_S), _SELDOM_S)
        with self._lock:
            self._report_every_s = every_s

    def orders(self, job_id: int, run: int) -> Orders:
        """Return the orders of one attempt now."""
        with self._lock:
            run_of_request, request, _ = self._asked.get(job_id, (run, Orders(), None))
            orders = self._standing.on(
                request if run_of_request == run else Orders(), job_id, run=run
            )
            return dataclasses.replace(orders, report_every_s=self._report_every_s)

    def reason(self, job_id: int, run: int) -> Reason | None:
        """Return the reason of what one attempt is asked, or None."""
        with self._lock:
            asked_run, _, reason = self._asked.get(job_id, (run, Orders(), None))
            return reason if asked_run == run else None

    def ask(
        self,
        job_id: int,
        orders: Orders,
        *,
        run: int,
        once: bool = False,
        reason: Reason | None = None,
    ) -> None:
        """Order an action of one attempt, in place of the last action of its job.

        Args:
            job_id: the job.
            orders: an action and what belongs to it; their `seq` is given here, and their
                `reason` when they are fetched, without what their job's owner may not see.
            run: restart count of the attempt.
            once: only if this attempt has no order yet.
            reason: why.
        """
        with self._lock:
            if once and job_id in self._asked and self._asked[job_id][0] == run:
                return
            self._seq += 1
            self._asked[job_id] = (run, dataclasses.replace(orders, seq=self._seq), reason)
        self.wake(job_id)

    def take_back(self, job_id: int) -> None:
        """Withdraw the action of a job; its settings stay."""
        with self._lock:
            self._asked.pop(job_id, None)

    def tell(self, job_id: int, *, run: int, **values: Any) -> bool:
        """Set values of a job from this attempt on; see `DesiredSettings`.

        Returns:
            Whether any of them is new.
        """
        with self._lock:
            news = self._standing.put(job_id, run=run, seq=self._seq + 1, **values)
            self._seq += news
        if news:
            self.wake(job_id)
        return news

    def forget(self, alive: Collection[int]) -> None:
        """Drop the orders of jobs that are gone."""
        with self._lock:
            self._asked = {k: request for k, request in self._asked.items() if k in alive}
            self._standing.forget(alive)
