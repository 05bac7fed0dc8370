"""Report and orders of one job, shared by esrun's threads.

Rank 0 and the watch of checkpoints set single fields of the report; the controller gets it whole.
Orders come from the controller and are passed on to subscribers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slurm_elastic.core.report import Orders, Report
from slurm_elastic.core.report_fields import ReportError, profile_rows
from slurm_elastic.job.launch import log_line

#: Fields whose change is reported at once.
_URGENT = frozenset({
    "phase", "notice", "proven", "rehearsal", "exit_code", "failed_start", "kind", "jump",
    "in_place", "restarts", "change", "change_state", "change_reason", "companions", "generation",
})  # fmt: skip
#: What esrun measures between two reports.
_MEASURED = ("busy_cpus", "read_bytes_s", "memory_bytes_s", "gpu_busy", "gpu_memory_busy")
#: Fields that only esrun sets.
_OWN = frozenset({
    "job_id", "run", "gpus", "nodes", "in_place", "not_in_place", "restarts", "change",
    "change_state", "change_reason", "companions", "generation", "pause_s", "failed_gpus",
    "out_of_memory", "failed_in_companions", *_MEASURED,
})  # fmt: skip
#: Fields that are reported once, with their values after that.
_ONCE: dict[str, Any] = {
    "step_time_s": None,
    "steps_measured": 0,
    "micro_step_s": None,
    "profile": (),
    "profile_batch": None,
    **dict.fromkeys(_MEASURED),
}
#: Fields that stay as they are when an attempt begins in place; all others begin anew.
_KEPT_IN_PLACE = frozenset({
    *_OWN, "kind", "gpu_type", "step", "progress", "global_batch", "micro_batch", "accumulation",
    "grad_sqr", "grad_var", "initial_batch", "max_micro_batch", "application", "checkpoint_step",
    "checkpoint_age_s", "checkpoint_s", "proven", "layers", "frozen", "certified", "penalty",
    "certified_penalty", "supported_options", "weight_bytes", "optimizer_bytes", "gpu_bytes",
    "jump",
}) - {"failed_gpus", "out_of_memory", "failed_in_companions", *_MEASURED}  # fmt: skip

#: Seconds without an answer of the controller after which an overdue notice is withdrawn.
GRACE_S = 30.0
_DEFAULT_DEADLINE_S = 300.0


class ReportState:
    """Current report and orders of one job.

    Args:
        report: the first one.
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
        self._served: int | None = None
        self._subscribers: list[Callable[[Orders], None]] = []
        self._complained: set[str] = set()
        #: Called after each update.
        self.on_update: Callable[[], None] = lambda: None

    def update(self, fields: dict[str, Any]) -> None:
        """Set some fields of the report; an invalid one is ignored and logged once."""
        self._update({name: value for name, value in fields.items() if name not in _OWN})

    def set_own(self, fields: dict[str, Any]) -> None:
        """Set fields that the program cannot set, of one group of ranks.

        What was measured with another number of GPUs is not reported any more.
        """
        with self._changed:
            if fields.get("gpus", self._report.gpus) != self._report.gpus:
                old_profile = {"profile", "profile_batch"}
                ended = {k: v for k, v in _ONCE.items() if k not in old_profile}
                self._report = replace(self._report, **ended)
        self._update(fields)

    def _update(self, fields: dict[str, Any]) -> None:
        with self._changed:
            old_report = self._report
            for name, value in fields.items():
                self._set(name, value)
            if any(getattr(old_report, name) != getattr(self._report, name) for name in _URGENT):
                self._urgent = True
                self._changed.notify_all()
        self.on_update()

    def _set(self, name: str, value: Any) -> None:
        if isinstance(value, float) and value.is_integer() and name not in _FRACTIONS:
            value = int(value)  # a tensor of one element arrives as a float
        profile, report = self._report.profile, replace(self._report, profile=())
        if name == "checkpoint_age_s":
            self._aged = self._clock()
        try:
            if name == "profile":  # validated by itself, as it is large
                self._report = replace(report, profile=profile_rows(value or ()))
            else:
                fields = {**report.to_wire(), name: value}
                self._report = replace(Report.from_wire(fields), profile=profile)
        except ReportError as error:
            if name not in self._complained:
                self._complained.add(name)
                log_line(f"a field of the job's report is ignored: {error}")

    def report(self) -> Report:
        """Return the current report."""
        with self._changed:
            report = self._report
            if report.checkpoint_age_s is None:
                return report
            age = report.checkpoint_age_s + self._clock() - self._aged
            return replace(report, checkpoint_age_s=age)

    def mark_reported(self, report: Report) -> None:
        """Do not send the measurements of this report again: the controller has it."""
        with self._changed:
            if all(getattr(report, name) == getattr(self._report, name) for name in _ONCE):
                self._report = replace(self._report, **_ONCE)

    def begin_attempt(self) -> None:
        """Reset the report for a restart in place."""
        with self._changed:
            kept = {name: getattr(self._report, name) for name in _KEPT_IN_PLACE}
            self._report = Report(phase="starting", **kept)
            self._urgent = True
            self._changed.notify_all()

    def wait_urgent(self, seconds: float) -> bool:
        """Wait at most this long for an urgent change; return whether there is one."""
        with self._changed:
            urgent = self._changed.wait_for(lambda: self._urgent, seconds)
            self._urgent = False
            return urgent

    def request_report(self) -> None:
        """Make a report due at once."""
        with self._changed:
            self._urgent = True
            self._changed.notify_all()

    def orders(self) -> Orders:
        """Return the current orders; their deadline counts from now."""
        return self.orders_and_source()[0]

    def orders_and_source(self) -> tuple[Orders, str]:
        """Return the current orders and their source, one of `rank_socket.CONTROLLER`."""
        with self._changed:
            controller = "none" if self._heard is None else "heard"
            orders = self._orders
            if orders.deadline_s is not None:
                remaining_s = self._received + orders.deadline_s - self._clock()
                orders = replace(orders, deadline_s=max(0.0, remaining_s))
            return orders, "expected" if self._expected else controller

    @property
    def heard(self) -> float | None:
        """Time of the controller's last answer, by the clock; None: there was none."""
        return self._heard

    def expect_controller(self) -> None:
        """Record that a controller is configured, whose first answer is awaited."""
        self._expected = True

    def give_up_controller(self) -> None:
        """Record that the controller cannot be reached: end the wait for its first answer."""
        with self._changed:
            if not self._expected:
                return
            self._expected = False
            orders, subscribers = self._orders, list(self._subscribers)
        for subscriber in subscribers:
            subscriber(orders)

    @property
    def seq(self) -> int:
        """Sequence number of the current orders."""
        return self._orders.seq

    def receive(self, orders: Orders, *, authoritative: bool) -> None:
        """Accept orders of the controller, and pass changes on to subscribers.

        Args:
            orders: as received.
            authoritative: whether they answer the long poll. Others are accepted only if they are
                newer, as the poll may overtake them; those of the poll always, as the controller
                may have lost its ledger.
        """
        with self._changed:
            orders = self._without_served(orders)
            first, self._heard = self._heard is None, self._clock()
            self._expected = False
            unchanged = _untimed(orders) == _untimed(self._orders)
            newer = authoritative or first or orders.seq > self._orders.seq
            # The first answer is passed on even if it changes nothing.
            if not newer or (unchanged and not first):
                return
            self._orders, self._received = orders, self._clock()
            subscribers = list(self._subscribers)
        for subscriber in subscribers:
            subscriber(orders)

    def subscribe(self, subscriber: Callable[[Orders], None]) -> None:
        """Call with the current orders now, and later, from any thread, at each change."""
        with self._changed:
            self._subscribers.append(subscriber)
        subscriber(self.orders())

    def serve_notice(self, change: int | None) -> None:
        """End the notice of a change for good: the program goes on from what it saved for it.

        Args:
            change: number of the change for which the program is started again, as its notice has
                it; None: for none. Any other notice is still to be answered.
        """
        with self._changed:
            if self._orders.action != "notice" or change is None or self._orders.notice != change:
                return
            self._served = self._orders.notice
            orders = self._orders = self._without_served(self._orders)
            subscribers = list(self._subscribers)
        for subscriber in subscribers:
            subscriber(orders)

    def _without_served(self, orders: Orders) -> Orders:
        """Return orders of the controller, which may not know yet that a notice is over."""
        if orders.action != "notice" or orders.notice is None or orders.notice != self._served:
            return orders
        reason = "the program is started again"
        return replace(orders, action="run", notice=None, deadline_s=None, reason=reason)

    def expire_notice(self, *, is_unused: bool = False) -> None:
        """Withdraw a notice past its deadline if the controller does not answer.

        Args:
            is_unused: whether the program has saved and waited for long, so that the deadline does
                not count.
        """
        with self._changed:
            orders, now = self._orders, self._clock()
            deadline = _DEFAULT_DEADLINE_S if orders.deadline_s is None else orders.deadline_s
            overdue = is_unused or now >= self._received + deadline + GRACE_S
            silent = self._heard is None or now >= self._heard + GRACE_S
            if orders.action != "notice" or not overdue or not silent:
                return
            reason = "the controller does not answer"
            reason += "" if is_unused else " and the deadline has passed"
            self._orders = replace(orders, action="resume", deadline_s=None, reason=reason)
            orders, subscribers = self._orders, list(self._subscribers)
        log_line(f"notice {orders.notice} is withdrawn: {reason}")
        for subscriber in subscribers:
            subscriber(orders)


def _untimed(orders: Orders) -> Orders:
    """Return orders without their deadlines, which count down in each answer."""
    members = orders.members and replace(orders.members, deadline_s=0.0)
    return replace(orders, deadline_s=None, members=members)


_FRACTIONS = frozenset(
    name for name, spec in Report.__dataclass_fields__.items() if "float" in str(spec.type)
)
