"""Leader election by a lease in slurmctld: wait for it, take it, renew it, give it back.

The rules are in `leader_lease`; the calls and the thread are here. The lease is renewed only
while the daemon's own loop makes progress, so that a daemon that hangs loses it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from slurm_elastic.controller.leader import leader_lease
from slurm_elastic.core.cluster import Reservation
from slurm_elastic.slurm.readers.cluster_reader import LEASE
from slurm_elastic.slurm.scontrol import LeaseWrites, NotActiveError, ScontrolError

#: A loop that is busy with one look for this many times `takeover_s` hangs.
_HANGS = 6
#: Slurm's error for a reservation that exists already.
_EXISTS = "Duplicate reservation name"


class LeaseReader(Protocol):
    """Reader of leases, such as `cluster_reader.ClusterReader`."""

    def leases(self) -> tuple[Reservation, ...]:
        """Return all leases."""
        ...

    def some_node(self) -> str:
        """Return the name of a node."""
        ...


def now() -> float:
    """Return seconds of a clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaderElection:
    """The lease as one controller holds it or waits for it. Thread-safe.

    Args:
        reader: reads leases.
        writes: writes leases.
        prefix: of our reservations.
        address: where this controller listens, one of `[api] controller`.
        takeover_s: see `leader_lease`.
        log: structlog logger.
        clock: see `now`.

    Attributes:
        lost: called when the lease is lost, from the thread that renews it.
    """

    def __init__(
        self,
        *,
        reader: LeaseReader,
        writes: LeaseWrites,
        prefix: str,
        address: str,
        takeover_s: float,
        log: Any,
        clock: Callable[[], float] = now,
    ) -> None:
        self._reader, self._writes, self._prefix = reader, writes, prefix + LEASE
        self.address, self._takeover_s, self._log, self._clock = address, takeover_s, log, clock
        self._id = os.urandom(4).hex()
        self._watch = leader_lease.LeaseObservation(takeover_s)
        self._claim: leader_lease.LeaseClaim | None = None
        self._tenure: leader_lease.Tenure | None = None
        self._before: leader_lease.LeaseMark | None = None
        self._seen: leader_lease.LeaseMark | None = None
        self._lock = threading.RLock()
        self._busy_since: float | None = None
        self._beat, self._name = 0, ""
        self._why, self._said = "", ""
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self.lost: Callable[[], object] = lambda: None
        #: Generation that is, or was last, held here.
        self.generation = 0

    # --- standing by ---

    @property
    def pause_s(self) -> float:
        """Seconds between two looks while standing by."""
        return self._takeover_s * leader_lease.LOOK

    @property
    def active_address(self) -> str:
        """Address of the holder, as last seen; "": no holder is known."""
        if self.holds:
            return self.address
        mark = self._seen
        return mark.holder if mark and not mark.free and mark.holder != self.address else ""

    @property
    def active_process(self) -> str:
        """Id of the active process, as last seen."""
        return f"{self._seen.name} {self._seen.id}" if self._seen else ""

    def stand_by(self) -> bool:
        """Look once, and take the lease if it is free; return whether it is held now.

        Raises:
            SlurmUnreachableError: slurmctld does not answer; that time does not count.
        """
        began = self._clock()
        marks = [leader_lease.LeaseMark(r.name, r.comment) for r in self._reader.leases()]
        self._seen = leader_lease.newest(marks)
        if self._claim:
            return self._settle(self._claim, marks, began)
        if self._watch.look(self._seen, began=began, ended=self._clock()):
            self._make()
        return False

    def _make(self) -> None:
        """Make the next generation of the lease; of several attempts at once one succeeds."""
        generation = self._seen.generation + 1 if self._seen else 1
        name, began = f"{self._prefix}{generation}", self._clock()
        try:
            self._writes.create_lease(
                name, node=self._reader.some_node(), comment=self._comment(free=False)
            )
        except ScontrolError as error:
            if _EXISTS not in str(error):  # else another one was quicker
                self._say(f"Lease={generation} Problem={error}")
            self._watch = leader_lease.LeaseObservation(self._takeover_s)
            return
        self._before = self._seen
        tenure = leader_lease.Tenure(self._takeover_s, began)
        self._claim = leader_lease.LeaseClaim(name, self._id, tenure, made=self._clock())
        self.generation, self._name = generation, name
        self._log.info(f"Lease={generation} State=made")

    def _settle(
        self, claim: leader_lease.LeaseClaim, marks: list[leader_lease.LeaseMark], looked: float
    ) -> bool:
        """Renew a fresh lease until slurmctld has saved it; return whether it has."""
        began = self._clock()
        try:
            if claim.stands(self._seen):
                self._renew()
                claim.tenure.renewed(began, self._clock())
        except ScontrolError as error:
            self._say(f"Lease={self.generation} Problem={error}")
        if not claim.stands(self._seen) or not claim.tenure.left(self._clock()):
            self._log.info(f"Lease={self.generation} State=forgotten by slurmctld, or too late")
            self._stand_down()
            return False
        if not claim.lasts(looked):
            return False
        with self._lock:
            self._tenure, self._why, self._claim = claim.tenure, "", None
        previous = self._before
        state = (
            "taken" if previous is None or previous.free else f"taken over from {previous.holder}"
        )
        if previous and previous.holder == self.address:
            state = "taken again"
        self._log.warning(f"Lease={self.generation} State={state!r} Active={self.address}")
        for mark in marks:
            if mark.name != claim.name:  # the highest number counts, whatever is left
                with contextlib.suppress(ScontrolError):
                    self._writes.delete_reservation(mark.name)
        self._ending.clear()
        self._thread = threading.Thread(target=self._beats, name="lease", daemon=True)
        self._thread.start()
        return True

    def _stand_down(self) -> None:
        with self._lock:
            self._tenure = self._claim = None
        self._watch = leader_lease.LeaseObservation(self._takeover_s)

    def _renew(self) -> None:
        fields = {"Comment": self._comment(free=False)}
        self._writes.update_reservation(self._name, fields)

    # --- holding ---

    @property
    def holds(self) -> bool:
        """Whether the lease is held now."""
        return self.left_s > 0

    @property
    def left_s(self) -> float:
        """Seconds for which the lease still holds; 0: it is not held."""
        with self._lock:
            return max(0.0, self._tenure.left(self._clock())) if self._tenure else 0.0

    def right(self) -> float:
        """Return the seconds for which a write may still be under way.

        Raises:
            NotActiveError: none.
        """
        with self._lock:
            left = self.left_s
            if left > 0:
                return left
            raise NotActiveError(self._why or "the lease was not renewed in time")

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Mark the work of the daemon's loop between two waits."""
        self._busy_since = self._clock()
        try:
            yield
        finally:
            self._busy_since = None

    def notice(self, leases: tuple[Reservation, ...]) -> None:
        """Take leases that a round has read: a later one of another controller ends this one."""
        above = leader_lease.newest(leader_lease.LeaseMark(r.name, r.comment) for r in leases)
        with self._lock:
            if self._tenure and above and above.generation > self.generation:
                self._end(f"{above.holder or 'another controller'} has taken the lease")

    def give_back(self) -> None:
        """Give the lease back: a standby may begin at once. Nothing is written after this."""
        held = self.holds
        self._stop_beating()
        with self._lock:
            self._end("it was given back")
        if held:
            try:
                fields = {"Comment": self._comment(free=True)}
                self._writes.update_reservation(self._name, fields)
                self._log.info(f"Lease={self.generation} State=given back")
            except ScontrolError as error:
                self._log.warning(f"Lease={self.generation} Problem={error}")

    def drop(self) -> str:
        """Stand by from now on; return why the lease was lost."""
        self._stop_beating()
        with self._lock:
            reason = self._why or "the lease was not renewed in time"
        self._stand_down()
        self._seen = None
        return reason

    def _beats(self) -> None:
        while not self._ending.wait(self._takeover_s * leader_lease.BEAT):
            began, busy = self._clock(), self._busy_since
            if not self.holds:
                break
            if busy is not None and began - busy > _HANGS * self._takeover_s:
                self._say(f"the controller's loop has hung for {began - busy:.0f} s")
                continue
            try:
                self._renew()
            except ScontrolError as error:
                if "invalid" in str(error):
                    with self._lock:
                        self._end("slurmctld has lost the lease")
                    break
                self._say(f"Lease={self.generation} Problem={error}")
                continue
            self._said = ""
            with self._lock:
                if not self._tenure or not self._tenure.renewed(began, self._clock()):
                    break
        if not self._ending.is_set():
            self.lost()

    def _stop_beating(self) -> None:
        self._ending.set()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()

    def _end(self, reason: str) -> None:
        if self._tenure and not self._why:
            self._tenure.end()
            self._why = reason

    def _comment(self, *, free: bool) -> str:
        self._beat += 1
        return leader_lease.comment_of(
            holder=self.address, id_=self._id, beat=self._beat, free=free
        )

    def _say(self, text: str) -> None:
        """Log a text once, until another one follows."""
        if text != self._said:
            self._log.warning(text)
        self._said = text


def rival(leases: tuple[Reservation, ...]) -> str:
    """Return the message about another acting controller, where only one is configured; or ""."""
    above = leader_lease.newest(leader_lease.LeaseMark(r.name, r.comment) for r in leases)
    if above is None or above.free:
        return ""
    return (
        f"another selasticd, at {above.holder or 'an unknown address'}, holds {above.name}: "
        "nothing is begun here. Name both in [api] controller; or stop that one, and "
        f"scontrol delete ReservationName={above.name}"
    )
