"""Data that metrics are made of."""

from __future__ import annotations

from typing import NamedTuple

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.metrics.activity_counts import ActivityCounts
from slurm_elastic.controller.queries.view import View


class MetricsSource(NamedTuple):
    """State of one selasticd at the time of a scrape.

    Attributes:
        view: of the controller; None: it does not act.
        config: the site's.
        counts: since its start.
        reader: how slurmctld is read; "": not connected.
        ledger_bytes: size of the ledger.
        lease_s: seconds for which its lease still holds; 0: it holds none.
        generation: of its last lease; 0: none.
    """

    view: View | None
    config: Config
    counts: ActivityCounts
    reader: str = ""
    ledger_bytes: int = 0
    lease_s: float = 0.0
    generation: int = 0
