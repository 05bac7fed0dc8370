"""Reasons as a viewer may see them: other users' jobs are hidden where Slurm hides them."""

from __future__ import annotations

from functools import cached_property

from slurm_elastic.controller.queries.view import View, Viewer
from slurm_elastic.core.reason import Reason
from slurm_elastic.rpc.answers import ReasonRow


class Visibility:
    """Jobs and users in reasons that one viewer may see.

    With PrivateData=jobs only ids of jobs that the viewer sees now stay: an id that names no job
    any more may have been another user's. Finished sentences may name any job and are hidden
    as a whole.
    """

    def __init__(self, view: View, viewer: Viewer) -> None:
        self._view, self._viewer = view, viewer

    def reason(self, reason: Reason) -> Reason:
        """Return a reason with None in place of what is hidden."""
        if self._viewer.operator or not self._viewer.private:
            return reason
        return reason.hidden(job=self._sees_job, user=self._users.__contains__)

    def row(self, reason: Reason | None) -> ReasonRow | None:
        """Return a reason as JSON, without what is hidden; None for no reason."""
        if reason is None:
            return None
        row = self.reason(reason).to_json()
        return {"code": row["code"], "parameters": row["parameters"]}

    def _sees_job(self, name: str) -> bool:
        jobs = self._view.snapshot.job
        ids = self._view.snapshot.named.get(name, ())
        return bool(ids) and all(self._viewer.sees(jobs[i].uid) for i in ids)

    @cached_property
    def _users(self) -> frozenset[str]:
        return frozenset(j.user for j in self._viewer.jobs(self._view))
