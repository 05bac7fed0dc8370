"""Simulated job that is changed without a requeue where its base stays (gpu_holdings.py).

In place: it trains on with the GPUs that it keeps until the new ranks are ready, which takes as
long as they need to start; then it pauses for a moment. Ranks that leave do so at once. Where only
the ranks are restarted, it has its new GPUs at once and restarts. Its nodes matter, so that every
other change, a move in the same shape, too, is a requeue.
"""

from __future__ import annotations

from typing import Any

from slurm_elastic.core.cluster import Allocation, Companion
from slurm_elastic.core.resize_kind import ResizeKind
from slurm_elastic.simulator.gpu_holdings import GpuHoldings
from slurm_elastic.simulator.simulated_job import INSTANT_S, SimulatedJob
from slurm_elastic.simulator.truth.resize_costs import ResizeCosts
from slurm_elastic.simulator.workloads.application_profiles import smallest_rotation

#: Job ids of companions for each job, and for each of its changes.
_IDS, _IDS_PER_CHANGE = 1_000_000, 100


class InPlaceJob(SimulatedJob):
    """State of such a job.

    Attributes:
        resizes: costs of its changes without a requeue.
        holdings: its base and companions; None: it waits.
        join_left_s: seconds until new ranks take part.
    """

    __slots__ = ("holdings", "join_left_s", "resizes")

    def __init__(self, *args: Any, resizes: ResizeCosts, **more: Any) -> None:
        super().__init__(*args, **more)
        self.resizes = resizes
        self.holdings: GpuHoldings | None = None
        self.join_left_s = 0.0

    @property
    def companions(self) -> tuple[Companion, ...]:
        """Jobs that hold a part of its GPUs."""
        return self.holdings.companions if self.holdings else ()

    @property
    def resize_s(self) -> float | None:
        """Seconds without training of a change without a requeue."""
        if self.resizes.cheapest is ResizeKind.RESTART:
            return self.resizes.ranks_restart_s(self.restart_s)
        return self.resizes.pause_s(self.submitted.application)

    @property
    def changed_after_s(self) -> float:
        """Seconds until the change of its GPUs that is under way goes on, or ends."""
        return min(s for s in (self.restart_left_s, self.join_left_s) if s > 0)

    @property
    def changing(self) -> bool:
        """Whether a change of its GPUs is under way."""
        return self.restart_left_s > 0 or self.join_left_s > 0

    def advance(self, until_s: float) -> None:
        """Let time pass until `until_s`, or until the job's completion."""
        if self.join_left_s > 0:
            joined_s = self.now_s + self.join_left_s
            super().advance(min(joined_s, until_s))
            self.join_left_s = max(0.0, joined_s - self.now_s)
            if self.completion_s is not None:
                return
            if self.join_left_s < INSTANT_S:
                self._join()
        if self.now_s < until_s:
            super().advance(until_s)

    def hold(self, allocation: Allocation | None, *, moving_costs: bool = True) -> None:
        """Change the GPUs that the job holds.

        Args:
            allocation: GPUs from now on; None: none.
            moving_costs: of no effect: every move is a requeue.
        """
        del moving_costs
        if allocation is not None and allocation == self.allocation:
            return
        holdings = None
        if allocation is not None and self.holdings is not None:
            changes = self.starts + self.changes_in_place
            first_id = self.job_id * _IDS + changes * _IDS_PER_CHANGE
            most, kind = self.described.directive.max_gpus, self.resizes.cheapest
            holdings = self.holdings.changed(allocation, first_id, most=most, kind=kind)
        if holdings is not None:
            self.allocation = allocation
            self._resize(holdings)
            return
        if self.join_left_s > 0:
            self.join_left_s, self.shape = 0.0, ()
        super().hold(allocation, moving_costs=True)
        self.holdings = GpuHoldings(allocation) if allocation is not None else None

    def _resize(self, holdings: GpuHoldings) -> None:
        """Begin a change without a requeue."""
        self.changed_s = self.now_s
        if self.resizes.cheapest is ResizeKind.RESTART:
            self.starts += 1
            self.restart_left_s = self.resizes.ranks_restart_s(self.restart_s)
            holdings = holdings.joined()
        else:
            self.changes_in_place += 1
            if holdings.joining:
                self.join_left_s = self.resizes.joined_after_s(self.restart_s)
        self._train_on(holdings)

    def _join(self) -> None:
        """Let new ranks take part."""
        assert self.holdings is not None
        self.join_left_s = 0.0
        self.restart_left_s += self.resizes.pause_s(self.submitted.application)
        self._train_on(self.holdings.joined())

    def _train_on(self, holdings: GpuHoldings) -> None:
        self.holdings = holdings
        self.shape = smallest_rotation(g for _, g in holdings.training().shares)
        self._choose_batch()
        self._freeze()
