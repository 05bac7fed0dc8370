"""What esrun knows of its job, and what it was last told: shared by its threads.

Reports come in pieces, from rank 0 and from esrun's own watching, and leave
whole. Orders come from the controller and go to whoever subscribed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slurm_elastic.core.report import Orders, Report, ReportError, profile_rows
from slurm_elastic.job.launch import say

#: A change of these is reported at once.
_URGENT = frozenset({"phase", "notice", "proven", "exit_code", "kind"})
#: Facts that only esrun knows.
_OWN = frozenset({"job_id", "run", "gpus", "nodes"})
#: Measured since the last report: said once.
_ONCE: dict[str, Any] = {
    "step_time_s": None,
    "steps_measured": 0,
    "micro_step_s": None,
    "profile": (),
    "profile_batch": None,
}
#: What a new attempt in place has to say anew.
_ATTEMPT: dict[str, Any] = {
    **_ONCE,
    **dict.fromkeys(("notice", "exit_code", "startup_s", "restore_s", "resumed_from")),
    **dict.fromkeys(("data_s", "forward_s", "backward_s", "sync_s", "optimizer_s")),
    "peak_memory_bytes": None,
    "layout": "",
}

#: After a notice's deadline the job goes on if the controller has been silent for this long.
GRACE_S = 30.0
_DEFAULT_DEADLINE_S = 300.0


class ReportState:
    """The present report and the present orders of one job.

    Args:
        report: what is known from the start.
        clock: monotonic seconds.
    """

    def __init__(self, report: Report, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._clock = clock
        self._aged = clock()
        self._changed = threading.Condition()
        self._urgent = False
        self._orders = Orders()
        self._received = clock()
        self._heard: float | None = None
        self._expected = False
        self._subscribers: list[Callable[[Orders], None]] = []
        self._complained: set[str] = set()

    def tell(self, fields: dict[str, Any]) -> None:
        """Take some fields of a report; one that cannot be is left out, with a word in the log."""
        with self._changed:
            before = self._report
            for name, value in fields.items():
                if name not in _OWN:
                    self._set(name, value)
            if any(getattr(before, name) != getattr(self._report, name) for name in _URGENT):
                self._urgent = True
                self._changed.notify_all()

    def _set(self, name: str, value: Any) -> None:
        if isinstance(value, float) and value.is_integer() and name not in _FRACTIONS:
            value = int(value)  # a tensor of one element arrives as a float
        profile, rest = self._report.profile, replace(self._report, profile=())
        if name == "checkpoint_age_s":
            self._aged = self._clock()
        try:
            if name == "profile":  # once is enough: it is large
                self._report = replace(rest, profile=profile_rows(value or ()))
            else:
                known = {**rest.to_wire(), name: value}
                self._report = replace(Report.from_wire(known), profile=profile)
        except ReportError as error:
            if name not in self._complained:
                self._complained.add(name)
                say(f"a report of the job is left out: {error}")

    def report(self) -> Report:
        """The whole report as of now."""
        with self._changed:
            report = self._report
            if report.checkpoint_age_s is None:
                return report
            age = report.checkpoint_age_s + self._clock() - self._aged
            return replace(report, checkpoint_age_s=age)

    def reported(self, report: Report) -> None:
        """The controller has this one: its measurements are not said again."""
        with self._changed:
            if all(getattr(report, name) == getattr(self._report, name) for name in _ONCE):
                self._report = replace(self._report, **_ONCE)

    def begin_attempt(self) -> None:
        """The program is started again, in place."""
        with self._changed:
            self._report = replace(self._report, phase="starting", **_ATTEMPT)
            self._urgent = True
            self._changed.notify_all()

    def wait_urgent(self, seconds: float) -> bool:
        """Wait at most so long for something that wants to be reported at once."""
        with self._changed:
            urgent = self._changed.wait_for(lambda: self._urgent, seconds)
            self._urgent = False
            return urgent

    def hurry(self) -> None:
        """Make a report due."""
        with self._changed:
            self._urgent = True
            self._changed.notify_all()

    def orders(self) -> Orders:
        """The present orders; their deadline counts from now."""
        return self.news()[0]

    def news(self) -> tuple[Orders, str]:
        """The present orders and, one of `local.CONTROLLER`, what they are."""
        with self._changed:
            controller = "none" if self._heard is None else "heard"
            orders = self._orders
            if orders.deadline_s is not None:
                left = self._received + orders.deadline_s - self._clock()
                orders = replace(orders, deadline_s=max(0.0, left))
            return orders, "expected" if self._expected else controller

    def expect(self) -> None:
        """There is a controller, whose first word is worth waiting for."""
        self._expected = True

    def despair(self) -> None:
        """The controller cannot be reached: nobody shall wait for its first word any more."""
        with self._changed:
            if not self._expected:
                return
            self._expected = False
            orders, subscribers = self._orders, list(self._subscribers)
        for subscriber in subscribers:
            subscriber(orders)

    @property
    def seq(self) -> int:
        """Of the present orders."""
        return self._orders.seq

    def take(self, orders: Orders, *, authoritative: bool) -> None:
        """Take orders from the controller.

        Args:
            orders: as received.
            authoritative: from the long poll. A report's answer may be overtaken by it and
                counts only if it is newer; the poll's may be older after the controller lost
                its ledger, and still counts.
        """
        with self._changed:
            first, self._heard = self._heard is None, self._clock()
            self._expected = False
            same = orders == replace(self._orders, deadline_s=orders.deadline_s)
            newer = authoritative or first or orders.seq > self._orders.seq
            # The first word is news even when it says what was known.
            if not newer or (same and not first):
                return
            self._orders, self._received = orders, self._clock()
            subscribers = list(self._subscribers)
        for subscriber in subscribers:
            subscriber(orders)

    def subscribe(self, subscriber: Callable[[Orders], None]) -> None:
        """Call with the present orders, and from then on, from any thread, with every change."""
        with self._changed:
            self._subscribers.append(subscriber)
        subscriber(self.orders())

    def expire(self) -> None:
        """Withdraw a notice whose controller has gone: it must not park the job for ever."""
        with self._changed:
            orders, now = self._orders, self._clock()
            deadline = _DEFAULT_DEADLINE_S if orders.deadline_s is None else orders.deadline_s
            overdue = now >= self._received + deadline + GRACE_S
            silent = self._heard is None or now >= self._heard + GRACE_S
            if orders.action != "notice" or not overdue or not silent:
                return
            reason = "the controller is silent and the deadline has passed"
            self._orders = replace(orders, action="resume", deadline_s=None, reason=reason)
            orders, subscribers = self._orders, list(self._subscribers)
        say(f"notice {orders.notice}: {reason}; going on")
        for subscriber in subscribers:
            subscriber(orders)


_FRACTIONS = frozenset(
    name for name, spec in Report.__dataclass_fields__.items() if "float" in str(spec.type)
)
