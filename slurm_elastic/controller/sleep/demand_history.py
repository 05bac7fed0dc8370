"""Nodes in use over time, kept in the ledger, and how many shall be awake by them."""

from __future__ import annotations

from slurm_elastic.config.schema import SleepSettings
from slurm_elastic.controller.sleep.sleep_record import BIN_S, SleepBin, SleepRecord
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.placement.sleep.awake_rule import AwakeRule

_NAME = "sleep_bins"
#: Seconds between two snapshots that still count as one stretch.
_MOST_BETWEEN_S = 2 * BIN_S
#: The margin is learned anew so often.
_RELEARN_S = 6 * 3600.0


class DemandHistory:
    """Record of one controller.

    Args:
        ledger: keeps the bins; written once per bin.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.record = SleepRecord()
        self.loaded = False
        self._time = 0.0
        self._written = -1
        self._margin: tuple[float, float] | None = None

    def load(self) -> None:
        """Read the ledger, once."""
        if not self.loaded:
            self.record = SleepRecord.of_json(self._ledger.get(_NAME, []))
            self.loaded = True

    def count(self, now: float, *, used: int, asleep: int) -> SleepBin:
        """Count the nodes of a snapshot, and return its bin.

        Args:
            now: of the snapshot, epoch s.
            used: nodes in use.
            asleep: nodes that have slept since the snapshot before it.
        """
        bin_ = self.record.at(now)
        bin_.used = max(bin_.used, used)
        elapsed = now - self._time if self._time else 0.0
        if 0 < elapsed <= _MOST_BETWEEN_S:
            bin_.asleep_s += elapsed * asleep
        self._time = now
        return bin_

    def awake(self, settings: SleepSettings, now: float, *, total: int, needed: int) -> int:
        """Return the number of nodes that shall be awake; arguments as of `AwakeRule.awake`."""
        rule = AwakeRule(window=max(1, round(settings.window_s / BIN_S)), served=settings.served)
        # The present bin is not over: nodes that were in use in it count already.
        series = self.record.series()
        if self._margin is None or now - self._margin[0] > _RELEARN_S:
            self._margin = (now, rule.margin(series))
        return rule.awake(series, total, needed=needed, margin=self._margin[1])

    def write(self, now: float) -> None:
        """Write the bins, once per bin."""
        number = int(now // BIN_S)
        if number != self._written:
            self._ledger.put(_NAME, self.record.to_json())
            self._written = number
