"""Rules by which a job may be changed in place, or all its ranks be started again. Pure.

See docs/adr/0018-in-place-changes.md. Whether companions lead to a target at all is
`slurm_elastic.core.resize_kind`.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.controller.companions.placed_companions import PlacedCompanions
from slurm_elastic.core.cluster import Job, JobState
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report
from slurm_elastic.core.resize_kind import ResizeKind


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlacePermission:
    """Data of one job that permits or rules out changes in place. Times are epoch seconds.

    Attributes:
        job: as last read.
        directive: the allowed one; None: the job is rigid.
        report: its newest one; None: not since the controller started.
        placed: its companions, and how changes in place went.
        site_allows: whether `[resize] in_place` allows them.
    """

    job: Job
    directive: Directive | None
    report: Report | None
    placed: PlacedCompanions
    site_allows: bool

    @property
    def allowed(self) -> bool:
        """Whether site and directive allow changes in place.

        Not of a job on half of a GPU: its first change brings it to a whole one.
        """
        is_wanted = self.directive is not None and self.directive.in_place == "auto"
        return self.site_allows and is_wanted and not self._on_half

    @property
    def is_considered(self) -> bool:
        """Whether the job runs and the site allows changes in place: then `obstacle` counts."""
        return self.site_allows and self.job.state is JobState.RUNNING and not self._on_half

    @property
    def _on_half(self) -> bool:
        return self.job.allocation is not None and self.job.allocation.half

    def obstacle(self, now: float) -> Reason | None:
        """Return why a running job cannot be changed in place where the site allows it, or None."""
        if self.directive is not None and self.directive.in_place != "auto":
            return Reason("in-place-declined")
        if self.placed.unsuitable:
            return self.placed.barred(now)
        report = self.report
        if report is None or report.run != self.job.run or report.in_place is None:
            return Reason("in-place-unknown")
        if not report.in_place:
            return Reason("in-place-unsupported", why=report.not_in_place)
        return self.placed.barred(now)

    def may_restart(self, now: float, *, on_own: bool = False) -> bool:
        """Return whether all ranks of a running job can be started again on other companions.

        Args:
            now: epoch s.
            on_own: on its own GPUs alone, whatever failed in companions.
        """
        if self.report is None or self.report.run != self.job.run or not self.report.restarts:
            return False
        barred = self.placed.barred(now, kind=ResizeKind.RESTART)
        return (on_own or barred is None) and self.allowed
