"""Observation of idle nodes that could sleep: `[sleep] mode = "observe"`.

Each round counts the nodes in use and keeps, beside the real cluster, which idle nodes would be
asleep by the rule (`placement/sleep/awake_rule.py`). A node that is needed while it would be
asleep is late: its start would have waited for a boot. Nothing is written to Slurm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.sleep.demand_history import DemandHistory
from slurm_elastic.controller.sleep.sleep_record import SleepBin
from slurm_elastic.core.cluster import Snapshot
from slurm_elastic.core.plan import JobRecord, Plan
from slurm_elastic.placement.sleep import sleep_choice


class SleepObserver:
    """Observation of one controller.

    Args:
        config: of the site; replaced at a reconfiguration.
        history: of the nodes in use.
        log: structlog logger.
    """

    def __init__(self, config: Config, history: DemandHistory, log: Any) -> None:
        self.config = config
        self.history, self._log = history, log
        self._asleep: dict[str, float] = {}
        self._idle_since: dict[str, float] = {}

    @property
    def asleep(self) -> Mapping[str, float]:
        """Since when (epoch s) each node would be asleep."""
        return self._asleep

    def forget(self) -> None:
        """End the observation."""
        self._asleep.clear()

    def observe(
        self, snapshot: Snapshot, plan: Plan | None, records: Mapping[int, JobRecord]
    ) -> None:
        """Count a round, and decide which nodes would sleep until the next one."""
        self.history.load()
        now = snapshot.time
        nodes = sleep_choice.counted_nodes(snapshot)
        used = sum(sleep_choice.in_use(n) for n in nodes)
        bin_ = self.history.count(now, used=used, asleep=len(self._asleep))
        assigned = sleep_choice.assigned_nodes(
            snapshot, plan, records, reserved_within_s=self.config.sleep.window_s
        )
        free = sleep_choice.may_sleep(snapshot, assigned)
        self._idle_since = {name: self._idle_since.get(name, now) for name in free}
        self._wake_needed({n.name for n in nodes}, bin_)
        needed = sleep_choice.idle_assigned(nodes, assigned)
        self._decide(snapshot, nodes_total=len(nodes), needed=needed)
        self.history.write(now)

    def _wake_needed(self, counted: set[str], bin_: SleepBin) -> None:
        """Wake nodes that are assigned to something, or that are no longer counted."""
        for name in [n for n in self._asleep if n not in self._idle_since]:
            since = self._asleep.pop(name)
            if name in counted:
                bin_.late += 1
                self._log.info(f"Node={name} is needed, and would have slept since {since:.0f}")

    def _decide(self, snapshot: Snapshot, *, nodes_total: int, needed: int) -> None:
        settings, now = self.config.sleep, snapshot.time
        awake = self.history.awake(settings, now, total=nodes_total, needed=needed)
        changes = sleep_choice.changes(
            self._idle_since,
            self._asleep,
            self._idle_since,
            total=nodes_total,
            awake=awake,
            now=now,
            least_idle_s=settings.window_s,
            types={n.name: n.gpu_type for n in snapshot.nodes},
            spare=settings.spare,
        )
        for name in changes.wake:
            del self._asleep[name]
        for name in changes.sleep:
            self._asleep[name] = now
        if changes.sleep or changes.wake:
            self._log.info(
                f"Sleep=observe Asleep={len(self._asleep)} Nodes={nodes_total} Awake={awake}"
                f" ToSleep={','.join(changes.sleep) or '-'} ToWake={','.join(changes.wake) or '-'}"
            )
