"""Nodes that slurmctld has just given up, or that have just come back.

When such a node answers again, slurmctld sends it the kill of the runs that were lost on it. A new
run of the same job that starts there in that moment is killed instead, and the job has failed (seen
on 24.11.5; the kill came 0.1 and 3 s after the node).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from slurm_elastic.slurm import power_states

#: Seconds after which a node that is back has got the kills of lost runs (our choice).
_SETTLED_S = 15.0


class LostNodes:
    """Record of when each node was last seen lost."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def look(self, states: Mapping[str, str]) -> frozenset[str]:
        """Return the nodes that are lost, or were within the last `_SETTLED_S`.

        Args:
            states: of every node, by name, as read just now.
        """
        now = time.monotonic()
        self._seen.update(
            (name, now) for name, state in states.items() if power_states.is_lost(state)
        )
        self._seen = {n: at for n, at in self._seen.items() if now - at < _SETTLED_S}
        return frozenset(self._seen)
