"""Layer profiles that jobs report, kept by application.

An application is that of `observation_store`: a user's jobs of one name that state the same
application. The newest profile counts; it is too large for every record of a job.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slurm_elastic.controller.state.ledger import Ledger, LedgerError
from slurm_elastic.core.cluster import Job
from slurm_elastic.core.report import Report
from slurm_elastic.core.report_fields import ProfileRow, ReportError, profile_rows

#: Profiles in memory of jobs of one name.
_STATED = 10

_Name = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A layer profile.

    Attributes:
        rows: as in `Report.profile`.
        batch: samples of the measurement; None: not known.
    """

    rows: tuple[ProfileRow, ...]
    batch: int | None = None

    def gradient_bytes(self, frozen: int) -> float | None:
        """Return the bytes of the parameters behind so many frozen layers; None: there are none."""
        return math.fsum(row[4] for row in self.rows[frozen:]) or None

    def to_body(self) -> dict[str, Any]:
        """Return JSON for the ledger."""
        return {"rows": self.rows, "batch": self.batch}

    @classmethod
    def from_body(cls, body: Any) -> StoredProfile | None:
        """Return it from the ledger's JSON; None if it is invalid."""
        try:
            rows = profile_rows(body["rows"])
            batch = body.get("batch")
        except (ReportError, KeyError, TypeError, AttributeError):
            return None
        valid_batch = type(batch) is int and batch > 0
        return cls(rows, batch if valid_batch else None) if rows else None


class LayerProfileStore:
    """The newest profile of each application. Its caller holds the lock.

    Args:
        ledger: where they are kept.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known: dict[_Name, StoredProfile | None] = {}
        self._dirty: set[_Name] = set()

    def add_report(self, report: Report, job: Job) -> None:
        """Keep the layer profile of a report, if it has one."""
        if report.profile:
            name = (job.user, job.name, report.application)
            profile = StoredProfile(report.profile, report.profile_batch)
            if self._known.get(name) != profile:
                self._known.pop(name, None)
                self._known[name] = profile
                self._dirty.add(name)
                self._forget_oldest(name)

    def _forget_oldest(self, name: _Name) -> None:
        """Drop the oldest profiles: a job may state a new application with each report."""
        alike = [n for n in self._known if n[:2] == name[:2]]
        for oldest in alike[:-_STATED]:
            del self._known[oldest]
            self._dirty.discard(oldest)

    def of(self, job: Job, stated: str) -> StoredProfile | None:
        """Return the profile of a job's application.

        Args:
            job: the job that has these layers.
            stated: what its script calls its application.
        """
        name = (job.user, job.name, stated)
        if name not in self._known:
            try:
                body = self._ledger.profile(*name)
            except LedgerError:
                return None  # the round says so
            self._known[name] = StoredProfile.from_body(body) if body else None
        return self._known[name]

    def save(self, alive: Iterable[Job]) -> None:
        """Write new profiles to the ledger, and drop those that no job needs.

        Raises:
            LedgerError: it could not be written; the next call tries again.
        """
        for name in sorted(self._dirty):
            profile = self._known.get(name)
            if profile is not None:
                self._ledger.put_profile(*name, profile.to_body())
            self._dirty.discard(name)
        names = {(j.user, j.name) for j in alive}
        self._known = {k: v for k, v in self._known.items() if k[:2] in names}
