"""Release of a site's Slurm, and what this project does differently from release to release.

>>> Release.parse("slurm 25.05.8") < Release.parse("slurm-wlm 25.11.0-0rc1")
True
>>> Release.parse("slurm 24.11.5").refusal()
''
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

_NUMBERS = re.compile(r"(?<![0-9.])([0-9]{2})\.([0-9]{2})(?:\.([0-9]{1,2}))?(?![0-9])")
#: Seconds that a requeued job waits, once its nodes were seen to be free, before it starts again:
#: until then slurmd may take the new launch credential for the revoked one. It compares the times
#: of both in whole seconds, and both are slurmctld's: a second later they differ, whatever the
#: other hosts' clocks show. The rest is for a clock that is read with the error of a tick. Measured
#: on 24.11; other releases wait longer. From 25.11 on credentials are keyed by run, and no wait is
#: needed (docs/slurm-versions.md).
WAIT_AFTER_REQUEUE_S = 1.1
LONG_WAIT_AFTER_REQUEUE_S = 2.0


class KnownFault(NamedTuple):
    """A fault of a patch level of Slurm: what it does, and the remedy."""

    harm: str
    remedy: str


@dataclass(frozen=True, order=True, slots=True)
class Release:
    """Release of Slurm, compared as numbers."""

    major: int
    minor: int
    patch: int = 0

    @classmethod
    def parse(cls, text: str) -> Release | None:
        """Return the first release that a text names; None if it names none.

        Args:
            text: as printed by `scontrol --version`, or `SLURM_VERSION` of slurm.conf.
        """
        match = _NUMBERS.search(text)
        return cls(*(int(n or 0) for n in match.groups())) if match else None

    def __str__(self) -> str:
        return f"{self.series}.{self.patch}"

    @property
    def series(self) -> str:
        """Major and minor number, which library and daemon must share: `25.05`."""
        return f"{self.major:02d}.{self.minor:02d}"

    def fits(self, version: str) -> bool:
        """Return whether a version of pyslurm is of this release: `26.5.0` is of 26.05."""
        numbers = [int(n) for n in version.split(".")[:2] if n.isdecimal()]
        return numbers == [self.major, self.minor]

    def refusal(self) -> str:
        """Return why this release cannot be used, with the remedy; "" if it can."""
        if self >= OLDEST:
            return ""
        return f"Slurm {self} is too old: upgrade Slurm to {OLDEST.series} or newer"

    @property
    def is_untried(self) -> bool:
        """Whether the series is newer than all that were tried."""
        return (self.major, self.minor) > (NEWEST.major, NEWEST.minor)

    def faults(self) -> tuple[KnownFault, ...]:
        """Return the known faults of this patch level that harm elastic jobs."""
        return tuple(f for first, fixed, f in _FAULTS if first <= self < fixed)

    @property
    def keeps_licenses(self) -> bool:
        """Whether a requeued job keeps its request for licenses."""
        return not _LICENSES_LOST <= self < _LICENSES_KEPT

    @property
    def wait_after_requeue_s(self) -> float:
        """Seconds that a requeued job must wait before it may start again."""
        if self >= Release(25, 11):
            return 0.0
        measured = (self.major, self.minor) == (24, 11)
        return WAIT_AFTER_REQUEUE_S if measured else LONG_WAIT_AFTER_REQUEUE_S

    @property
    def has_requeue_delay(self) -> bool:
        """Whether `SchedulerParameters=requeue_delay=` replaces cred_expire after a requeue."""
        return self >= Release(25, 11)

    @property
    def accounts_restarts(self) -> bool:
        """Whether sacct has the field `Restarts`."""
        return self >= Release(24, 11)

    @property
    def has_job_states(self) -> bool:
        """Whether `squeue --only-job-state` exists."""
        return self >= Release(23, 11, 5)


#: The oldest release that is read.
OLDEST = Release(23, 11)
#: The newest series that was tried. The SPANK plugin knows it, too: `slurm_release.c`.
NEWEST = Release(26, 5)
#: Requeued jobs lose their licenses in the releases from the first to before the second.
_LICENSES_LOST, _LICENSES_KEPT = Release(25, 5), Release(25, 11, 7)
#: The first release with each fault, the one without it again, and the fault.
_FAULTS = (
    (
        Release(24, 11),
        Release(24, 11, 6),
        KnownFault(
            "may crash slurmctld when many jobs are requeued", "upgrade to 24.11.6 or newer"
        ),
    ),
    (
        _LICENSES_LOST,
        _LICENSES_KEPT,
        KnownFault(
            "loses the licenses of requeued jobs, elastic jobs with licenses are not resized",
            "upgrade to 25.11.7 or newer",
        ),
    ),
)
