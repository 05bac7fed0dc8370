"""Renewal of leases, and cleanup of traces that belong to no transition.

All of it is derived from Slurm and AdminComment: traces of a controller that died and lost
its ledger are cleared as well.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import LedgerError
from slurm_elastic.controller.transitions.steps.state_steps import HELD
from slurm_elastic.core.cluster import Job, JobState, Reservation, Snapshot
from slurm_elastic.core.nodelist import expand
from slurm_elastic.slurm import shape
from slurm_elastic.slurm.scontrol import Scontrol, ScontrolError, SlurmUnreachableError

#: Reasons of a pending job that could start now if there were room.
READY = ("Resources", "Priority", "None", "")
#: Seconds after which slurmctld has saved a change of a job: it does so every 5 s at most.
_SAVED_S = 10.0
#: Times that a nice value is given back before it is left at that: Slurm may ignore it.
_MOST_NICE_WRITES = 4


class OrphanCleanup:
    """Leases and cleanup, between rounds.

    Args:
        scontrol: writes.
        config: the site's.
        store: records of jobs.
        log: structlog logger.
    """

    def __init__(self, scontrol: Scontrol, config: Config, store: JobStore, log: Any) -> None:
        self._scontrol, self.config, self._store, self._log = scontrol, config, store, log
        self._renewed: dict[str, float] = {}

    def leases(
        self,
        jobs: Iterable[Job],
        live: Mapping[int, Any],
        *,
        left_to_slurm: Collection[int] = (),
        retired: bool,
    ) -> None:
        """Renew the start time of jobs that wait by decision; forget broken leases.

        Args:
            jobs: of the snapshot.
            live: transitions under way, by job id.
            left_to_slurm: jobs whose leases end, as by the plan of the last round.
            retired: all leases end.
        """
        lease = self.config.slurm.lease_s
        now = time.monotonic()
        jobs = tuple(jobs)
        keys = {j.key for j in jobs}
        self._renewed = {k: at for k, at in self._renewed.items() if k in keys}
        for job in jobs:
            if job.job_id in live or not job.elastic or job.state is JobState.ENDED:
                continue
            entry = self._store.entry(job)
            if not entry.leased:
                continue
            renewed = self._renewed.get(job.key, float("-inf"))
            if job.state is not JobState.PENDING:
                self._keep(job, leased=False)
            elif job.begin_time is None and now - renewed < lease:
                self._log.info(f"JobId={job.display_id} Lease=broken by its owner")
                self._keep(job, leased=False, broken=job.run)
            elif job.reason in HELD:
                self.end_lease(job)  # else it would go on once the job is released
                self._keep(job, broken=job.run)
            elif retired or job.job_id in left_to_slurm:
                self.end_lease(job)
            elif now - renewed > lease / 3:
                self._renew(job, now)

    def may_lease(self, job: Job) -> bool:
        """Return whether a pending job that is not to start now may be made to wait."""
        entry = self._store.entry(job)
        ready = job.begin_time is None and not job.dependency and job.reason in READY
        return ready and not entry.leased and entry.broken != job.run

    def lease(self, job: Job) -> None:
        """Make a pending job wait: Slurm starts it by itself if the lease is not renewed."""
        self._store.command(job, leased=True)
        self._renew(job, time.monotonic())
        self._log.info(f"JobId={job.display_id} Lease={self.config.slurm.lease_s:g}s")

    def end_lease(self, job: Job) -> None:
        """Let Slurm start a waiting job."""
        self._try(job, lambda: self._scontrol.update(job, {"StartTime": "now"}))
        self._keep(job, leased=False)
        self._renewed.pop(job.key, None)
        self._log.info(f"JobId={job.display_id} Lease=ended")

    def give_back(self, jobs: Iterable[Job]) -> tuple[int, list[str]]:
        """Leave jobs to Slurm for good: end all leases.

        Returns:
            Leases ended; names of running jobs whose node list stays set.
        """
        ended, pinned = 0, []
        for job in jobs:
            if not job.elastic:
                continue
            if job.state is JobState.PENDING and self._store.entry(job).leased:
                self.end_lease(job)
                ended += 1
            elif job.state is JobState.RUNNING and self._pinned(job):
                pinned.append(job.display_id)
        return ended, pinned

    def _keep(self, job: Job, **values: Any) -> None:
        """Keep values as `JobStore.command`; on a full disk in memory only."""
        with contextlib.suppress(LedgerError):
            self._store.command(job, **values)

    def _renew(self, job: Job, now: float) -> None:
        start = f"now+{int(self.config.slurm.lease_s)}"
        if self._try(job, lambda: self._scontrol.update(job, {"StartTime": start})):
            self._renewed[job.key] = now

    def sweep(
        self,
        snapshot: Snapshot,
        live: Mapping[int, Any],
        *,
        per_node: Mapping[str, Mapping[str, int]],
    ) -> tuple[Reservation, ...]:
        """Clear marks of the controller that belong to no transition.

        Returns:
            Its reservations that exist; `TransitionEngine` removes the idle ones.
        """
        for job in snapshot.jobs:
            if job.job_id in live or job.state is JobState.ENDED:
                continue
            in_reservation = job.reservation.startswith(self.config.slurm.reservation_prefix)
            first = job.priority == int(shape.FIRST)
            if first:  # of whatever job: its owner may have hidden the directive meanwhile
                self._log.warning(f"JobId={job.display_id} Mended=priority")
                self._try(job, lambda job=job: self._scontrol.release(job))  # type: ignore[misc]
            self._return_nice(job, snapshot.time, replaced=first or in_reservation)
            if in_reservation:  # last: it shows what is missing, if this controller dies meanwhile
                self._mend(job, "reservation", {"ReservationName": ""})
            directive = job.directive
            if not job.elastic or job.state is not JobState.PENDING or directive is None:
                continue
            if self._pinned(job) or ((in_reservation or first) and job.required_nodes):
                fields = shape.queued(job, directive, gpus_per_node=per_node.get(job.partition, {}))
                self._mend(job, "node list", fields)
        return tuple(r for r in snapshot.reservations if r.ours)

    def _return_nice(self, job: Job, now: float, *, replaced: bool) -> None:
        """Give a nice value back that our priority has replaced, or that slurmctld has forgotten.

        A slurmctld that is killed falls back to what it saved last, between the end of the priority
        and the nice value, too. So a value counts as given back when it is still there some seconds
        later. An owner who sets it to 0 before that has to do so again.

        Args:
            job: without a transition.
            now: time of the look at it, epoch s.
            replaced: the job has our priority, or our reservation, which is given back after it.
        """
        if job.submission is None:
            return
        given = self._store.entry(job).nice
        nice, at, times = given or (_submitted_nice(job) if replaced else 0, now, 0)
        if nice and not job.nice and times < _MOST_NICE_WRITES:
            self._mend(job, "nice value", {"Nice": str(nice)})
            self._keep(job, nice=(nice, now, times + 1))
        elif given is not None and (job.nice != nice or not 0 <= now - at < _SAVED_S):
            self._keep(job, nice=None)

    def _pinned(self, job: Job) -> bool:
        entry = self._store.entry(job)
        return pinned_by_us(job, pin=entry.pin, earlier=entry.pins)

    def _mend(self, job: Job, field: str, fields: Mapping[str, str]) -> None:
        self._log.warning(f"JobId={job.display_id} Mended={field}")
        self._try(job, lambda: self._scontrol.update(job, fields))

    def _try(self, job: Job, call: Callable[[], None]) -> bool:
        try:
            call()
        except SlurmUnreachableError:
            raise
        except ScontrolError as error:
            self._log.warning(f"JobId={job.display_id} Problem={error}")
            return False
        return True


def _submitted_nice(job: Job) -> int:
    """Return the nice value that a job was submitted with; 0: none. Its owner may have changed it.

    job_submit.lua records numbers.
    """
    nice = job.submission.shape.get("nice") if job.submission else None
    return nice if isinstance(nice, int) else 0


def pinned_by_us(
    job: Job, *, pin: Sequence[str] | None, earlier: Iterable[Sequence[str]] = ()
) -> bool:
    """Return whether a job's node list was set by the controller rather than its user.

    Args:
        job: elastic.
        pin: the node list set last; None: not known, the ledger is younger than the job.
        earlier: the lists before; slurmctld falls back to them when it dies.
    """
    requested_nodes = str(job.submission.shape.get("req_nodes", "")) if job.submission else ""
    named = set(job.required_nodes)
    if not named or named == _names(requested_nodes):
        return False
    return job.run > 0 if pin is None else named in (set(pin), *map(set, earlier))


def _names(text: str) -> set[str]:
    """Return the nodes of a list that a user wrote; none if it is invalid."""
    try:
        return set(expand(text))
    except ValueError:
        return set()
