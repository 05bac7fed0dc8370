"""One change of a job's members, as esrun carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slurm_elastic.core.member_orders import MemberOrders
from slurm_elastic.core.reason import Reason
from slurm_elastic.job.companions.companion_job import CompanionJob


class MemberChange:
    """State of one change.

    Args:
        orders: as first received.
        now: monotonic time.

    Attributes:
        orders: with what was added later.
        state: one of `member_orders.CHANGE_STATES`.
        reason: of a failure, of `launcher_codes`; None: there is none.
        deadline: monotonic time at which companions that have not joined are given up.
        is_restarted: of a change that starts all ranks again: whether that has been done.
    """

    def __init__(self, orders: MemberOrders, now: float) -> None:
        self.orders = orders
        self.state = "submitted" if orders.join else "leaving"
        self.reason: Reason | None = None
        self.deadline = now + orders.deadline_s
        self.is_restarted = False

    @property
    def number(self) -> int:
        """Number of the transition."""
        return self.orders.change

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.state in ("done", "failed")

    def fail(self, reason: Reason) -> None:
        """End it without an effect."""
        self.state, self.reason = "failed", reason

    def merge(self, orders: MemberOrders) -> tuple[bool, bool]:
        """Add leaves and a cancellation; return whether there are more leaves and a new one."""
        old = self.orders
        leave = tuple(dict.fromkeys((*old.leave, *orders.leave)))
        restart = "now" if "now" in (old.restart, orders.restart) else old.restart
        cancel = old.cancel or orders.cancel
        self.orders = replace(old, leave=leave, cancel=cancel, restart=restart)
        return leave != old.leave, orders.cancel and not old.cancel

    def settle(self, jobs: Sequence[CompanionJob]) -> bool:
        """End it if nothing is left to wait for; return whether that is so now."""
        if self.is_over:
            return False
        joins = [job for job in jobs if job.change == self.number]
        leaving = [job for job in jobs if job.job_id in self.orders.leave]
        if self.orders.restart and not self.is_restarted:
            vain = bool(joins or self.orders.join) and not any(job.awaited for job in joins)
            if self.orders.cancel or vain:
                self.fail(self.reason or Reason("members-cancelled"))
            return self.is_over
        if any(job.awaited for job in joins) or any(job.state == "leaving" for job in leaving):
            return False
        joined = any(job.state == "joined" for job in joins)
        self.state = "done" if joined or not self.orders.join else "failed"
        return True

    def report_fields(self) -> dict[str, Any]:
        """Return its fields of a report."""
        return {
            "change": self.number,
            "change_state": self.state,
            "change_reason": self.reason.to_json() if self.reason else None,
        }
