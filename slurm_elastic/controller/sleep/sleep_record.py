"""Nodes in use and asleep, by bins of ten minutes, as the ledger keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.config.schema import SleepSettings
from slurm_elastic.models.demand.used_forecast import without_gaps

Floats = NDArray[np.float64]

#: Seconds of a bin, and bins that are kept: 60 days.
BIN_S, KEPT = 600, 60 * 144


@dataclass(slots=True, kw_only=True)
class SleepBin:
    """One bin.

    Attributes:
        used: most nodes in use at once.
        asleep_s: node seconds that were, or could have been, asleep.
        late: nodes that were needed while they slept.
    """

    used: int = 0
    asleep_s: float = 0.0
    late: int = 0


@dataclass(slots=True)
class SleepRecord:
    """Bins by their number (epoch s over `BIN_S`)."""

    bins: dict[int, SleepBin] = field(default_factory=dict)

    @classmethod
    def of_json(cls, value: Any) -> SleepRecord:
        """Return the record that `to_json` wrote; what cannot be read is left out."""
        bins = {}
        for row in value if isinstance(value, list) else ():
            try:
                number, used, asleep_s, late = row
                bins[int(number)] = SleepBin(
                    used=int(used), asleep_s=float(asleep_s), late=int(late)
                )
            except (TypeError, ValueError):
                continue
        return cls(bins)

    def to_json(self) -> list[list[float]]:
        """Return the newest bins."""
        rows = sorted(self.bins.items())[-KEPT:]
        return [[n, b.used, round(b.asleep_s, 1), b.late] for n, b in rows]

    def at(self, time_s: float) -> SleepBin:
        """Return the bin of a time (epoch s)."""
        number = int(time_s // BIN_S)
        if number not in self.bins:
            self.bins[number] = SleepBin()
            for old in sorted(self.bins)[:-KEPT]:
                del self.bins[old]
        return self.bins[number]

    def series(self) -> Floats:
        """Return the nodes in use up to now, without gaps.

        Bins in which nothing was read (the controller did not run) have the value before them.
        """
        if not self.bins:
            return np.zeros(0)
        first, last = min(self.bins), max(self.bins)
        used, value = [], 0
        for number in range(max(first, last - KEPT + 1), last + 1):
            value = self.bins[number].used if number in self.bins else value
            used.append(value)
        return without_gaps(used)

    def total(self, start: float | None, end: float | None) -> Mapping[str, float]:
        """Return node hours asleep and late nodes of the bins that begin in a period (epoch s)."""
        inside = [
            b
            for n, b in self.bins.items()
            if (start is None or n * BIN_S >= start - BIN_S) and (end is None or n * BIN_S < end)
        ]
        return {
            "node_hours": sum(b.asleep_s for b in inside) / 3600,
            "late": float(sum(b.late for b in inside)),
        }


@dataclass(frozen=True, slots=True)
class ObservedSleep:
    """State of sleep for answers.

    Attributes:
        settings: of the site.
        acts: whether nodes are switched; False: it is only observed.
        record: of the past.
        asleep: nodes that sleep now, or would.
        waking: nodes that boot.
    """

    settings: SleepSettings
    record: SleepRecord
    asleep: tuple[str, ...]
    acts: bool = False
    waking: tuple[str, ...] = ()
