"""Times of the resizes of the last hour, by user, as `[limits]` counts them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.transition import Transition
from slurm_elastic.placement.site_limits import HOUR_S


class ResizeRate:
    """The resizes of the last hour, of jobs that are gone, too; begins with the ledger's."""

    def __init__(self, ledger: Ledger) -> None:
        #: User and end (epoch s) of each transition, by its id.
        self._ended: dict[int, tuple[str, float]] = {}
        for body in ledger.ended_since(time.time() - HOUR_S):
            with contextlib.suppress(ValueError):
                transition = Transition.from_body(body)
                if transition.moved:
                    self.add(transition, body["updated"])

    def add(self, transition: Transition, at: float) -> None:
        """Count a transition that moved its job; starts and the like are none."""
        if transition.old is not None:
            self._ended[transition.id] = (transition.user, at)

    def by_user(self, now: float, live: Iterable[Transition]) -> dict[str, list[float]]:
        """Return the times of resizes (epoch s), by user; those under way count as now."""
        self._ended = {i: row for i, row in self._ended.items() if row[1] > now - HOUR_S}
        rows = [*self._ended.values(), *((t.user, now) for t in live if t.old is not None)]
        times_by_user: dict[str, list[float]] = {}
        for user, at in rows:
            times_by_user.setdefault(user, []).append(at)
        return times_by_user
