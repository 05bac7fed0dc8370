"""What the layers of jobs cost, as they report it: kept by application, for people to ask.

An application is what `learning` means by it: a user's jobs of one name that state the
same word. The newest profile counts; it is too large to travel with every record of a job.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slurm_elastic.controller.state.ledger import Ledger, LedgerError
from slurm_elastic.core.cluster import Job
from slurm_elastic.core.report import ProfileRow, Report, ReportError, profile_rows

#: Profiles in memory of jobs of one name.
_STATED = 10

_Name = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A layer profile.

    Attributes:
        rows: as in `Report.profile`.
        batch: samples that it was measured with at once; None: not said.
    """

    rows: tuple[ProfileRow, ...]
    batch: int | None = None

    def gradient_bytes(self, frozen: int) -> float | None:
        """Bytes of the parameters behind so many frozen layers; None: there are none."""
        return math.fsum(row[4] for row in self.rows[frozen:]) or None

    def to_body(self) -> dict[str, Any]:
        """As JSON for the ledger."""
        return {"rows": self.rows, "batch": self.batch}

    @classmethod
    def from_body(cls, body: Any) -> StoredProfile | None:
        """From the ledger's JSON; None if it cannot be."""
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

    def take(self, report: Report, job: Job) -> None:
        """Keep what a report says of layers, if it does."""
        if report.profile:
            name = (job.user, job.name, report.application)
            profile = StoredProfile(report.profile, report.profile_batch)
            if self._known.get(name) != profile:
                self._known.pop(name, None)
                self._known[name] = profile
                self._dirty.add(name)
                self._forget_oldest(name)

    def _forget_oldest(self, name: _Name) -> None:
        """A job may call its application anything, as often as it reports."""
        alike = [n for n in self._known if n[:2] == name[:2]]
        for oldest in alike[:-_STATED]:
            del self._known[oldest]
            self._dirty.discard(oldest)

    def of(self, job: Job, stated: str) -> StoredProfile | None:
        """The profile of a job's application.

        Args:
            job: whose layers.
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
        """Write down what is new, and forget what no job needs.

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
