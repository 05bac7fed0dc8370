"""Reservations that keep GPUs for transitions under way.

Slurm lets only one reservation be used on a node: changes that want nodes of
one that exists already join it. Each ends by itself after a lease, and is
renewed while a change needs it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Reservation
from slurm_elastic.core.nodelist import fold
from slurm_elastic.slurm.scontrol import Scontrol, ScontrolError

_COMMENT = "slurm-elastic: keeps GPUs during a resize"


@dataclass(slots=True)
class _Held:
    nodes: set[str] = field(default_factory=set)
    users: set[str] = field(default_factory=set)
    renewed: float = float("-inf")  # of time.monotonic
    problem: str = ""


class Reservations:
    """All reservations of the controller. Thread-safe.

    Args:
        scontrol: writes.
        config: the site's.
        account: the controller's own, sole user of fresh reservations.
        log: structlog logger.
    """

    def __init__(self, scontrol: Scontrol, config: Config, account: str, log: Any) -> None:
        self._scontrol, self.config = scontrol, config
        self._account, self._log = account, log
        self._lock = threading.RLock()
        self._held: dict[str, _Held] = {}
        self._adopted = False
        # Of those no longer there: a slurmctld that dies may bring them back.
        self._made: deque[str] = deque(maxlen=1000)

    def __bool__(self) -> bool:
        return bool(self._held)

    def on(self, nodes: Collection[str]) -> set[str]:
        """Return the names of reservations with some of these nodes."""
        with self._lock:
            return {name for name, held in self._held.items() if not held.nodes.isdisjoint(nodes)}

    def cover(self, name: str, nodes: Collection[str]) -> None:
        """Reserve nodes; the reservation is made, or extended if it exists.

        Raises:
            ScontrolError: Slurm refuses, for instance because of a foreign reservation.
        """
        with self._lock:
            held = self._held.get(name)
            if held is None:
                self._create(name, nodes)
            elif not held.nodes.issuperset(nodes):
                all_nodes = held.nodes | set(nodes)
                self._scontrol.update_reservation(name, {"Nodes": ",".join(sorted(all_nodes))})
                held.nodes = all_nodes
                self._log.info(f"Reservation={name} Nodes={fold(all_nodes)} State=extended")

    def open(self, name: str, user: str, nodes: Collection[str]) -> None:
        """Let a job's owner use a reservation, until now of the controller alone."""
        with self._lock:
            held = self._held.setdefault(name, _Held(set(nodes), {self._account}))
            if user in held.users:
                return
            fields = {"Users": ",".join(sorted(held.users | {user}))}
            try:
                self._scontrol.update_reservation(name, fields)
            except ScontrolError as error:
                if "invalid" not in str(error):
                    raise
                self._create(name, nodes)  # it ran out while the controller was away
                held = self._held[name]
                self._scontrol.update_reservation(name, fields)
            held.users.add(user)

    def register(self, name: str, nodes: Collection[str]) -> None:
        """Register a reservation of the ledger."""
        if name:
            self._held.setdefault(name, _Held(users={self._account})).nodes.update(nodes)

    def adopt(self, reservations: Iterable[Reservation]) -> None:
        """Register reservations that Slurm shows, so that they are removed."""
        for reservation in reservations:
            if reservation.ours:
                is_own = reservation.name in self._held or reservation.name in self._made
                if self._adopted and not is_own:
                    self._log.warning(
                        f"Reservation={reservation.name} Problem=made by another selasticd? one "
                        "cluster has one, or several that share [api] controller"
                    )
                self.register(reservation.name, reservation.nodes)
        self._adopted = True

    def keep(self, needed: Collection[str]) -> None:
        """Renew the reservations that are needed, remove the others."""
        with self._lock:
            for name, held in list(self._held.items()):
                try:
                    if name not in needed:
                        self._scontrol.delete_reservation(name)
                        self._log.info(f"Reservation={name} State=deleted")
                    elif time.monotonic() - held.renewed > self.config.slurm.lease_s / 3:
                        end = f"now+{self._minutes}minutes"
                        self._scontrol.update_reservation(name, {"EndTime": end})
                        held.renewed = time.monotonic()
                        continue
                    else:
                        continue
                except ScontrolError as error:
                    if "invalid" not in str(error):
                        self._complain(name, held, str(error))
                        continue
                del self._held[name]

    def _create(self, name: str, nodes: Collection[str]) -> None:
        self._scontrol.create_reservation(
            name,
            nodes=",".join(sorted(nodes)),
            users=self._account,
            minutes=self._minutes,
            comment=_COMMENT,
        )
        self._held[name] = _Held(set(nodes), {self._account}, time.monotonic())
        self._made.append(name)
        self._log.info(f"Reservation={name} Nodes={fold(nodes)} State=created")

    @property
    def _minutes(self) -> int:
        return max(1, int(self.config.slurm.lease_s // 60))

    def _complain(self, name: str, held: _Held, problem: str) -> None:
        if problem != held.problem:
            self._log.info(f"Reservation={name} Problem={problem}")
        held.problem = problem
