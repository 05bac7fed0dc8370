"""GPUs of a simulated job: its base, and the companions that it was grown by.

Each change in place adds at most one companion on a node, as the controller does.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.core.cluster import Allocation, Companion
from slurm_elastic.core.resize_kind import ResizeKind, companion_change, shares_node


@dataclass(frozen=True, slots=True)
class GpuHoldings:
    """Base and companions of one job.

    Attributes:
        base: GPUs of the job itself.
        companions: jobs that hold the others, the oldest first.
        joining: those of them whose ranks do not take part yet.
    """

    base: Allocation
    companions: tuple[Companion, ...] = ()
    joining: tuple[Companion, ...] = ()

    def training(self) -> Allocation:
        """Return the GPUs whose ranks take part."""
        shares = dict(self.base.shares)
        for companion in self.companions:
            if companion not in self.joining:
                for node, gpus in companion.allocation.shares:
                    shares[node] = shares.get(node, 0) + gpus
        return Allocation.of(self.base.gpu_type, shares)

    def joined(self) -> GpuHoldings:
        """Return the same with all ranks taking part."""
        return GpuHoldings(self.base, self.companions)

    def changed(
        self, target: Allocation, first_id: int, *, most: int, kind: ResizeKind
    ) -> GpuHoldings | None:
        """Return the holdings after a change without a requeue; None: it needs one.

        Args:
            target: base and companions.
            first_id: job id of the first new companion; the others follow.
            most: GPUs that the job may hold, also for a moment.
            kind: in place, or a restart of the ranks.
        """
        companions = [c.allocation for c in self.companions]
        change = companion_change(self.base, companions, target, most=most)
        if change is None:
            return None
        if kind is ResizeKind.RESTART and shares_node(self.base, companions, change):
            return None
        stay = tuple(c for i, c in enumerate(self.companions) if i not in change.leave)
        new = tuple(
            Companion(first_id + i, Allocation(self.base.gpu_type, (share,)))
            for i, share in enumerate(change.join)
        )
        return GpuHoldings(
            self.base, (*stay, *new), (*(c for c in self.joining if c in stay), *new)
        )
