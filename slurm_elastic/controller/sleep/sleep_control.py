"""`[sleep]`: off, observing, or switching nodes, as configured and as Slurm allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.sleep.demand_history import DemandHistory
from slurm_elastic.controller.sleep.node_power import NodePower
from slurm_elastic.controller.sleep.sleep_observer import SleepObserver
from slurm_elastic.controller.sleep.sleep_record import ObservedSleep, SleepRecord
from slurm_elastic.controller.sleep.sleeping_nodes import SleepingNodes
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.core.cluster import Job, Snapshot
from slurm_elastic.core.plan import JobRecord, Plan
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.sleep.growth_demand import awakened, growth_nodes
from slurm_elastic.slurm.power_saving import PowerSaving
from slurm_elastic.slurm.readers.cluster_reader import ClusterReader
from slurm_elastic.slurm.scontrol import Scontrol

#: slurm.conf is looked at this often.
_SETTINGS_S = 300.0


class SleepControl:
    """Sleep of the nodes of one cluster.

    Args:
        config: of the site.
        scontrol: all writes.
        reader: reads the state of each node anew.
        ledger: keeps nodes in use, and nodes that were switched off.
        log: structlog logger.
        read_power_saving: reads the settings of power saving.
    """

    def __init__(
        self,
        config: Config,
        scontrol: Scontrol,
        reader: ClusterReader,
        ledger: Ledger,
        log: Any,
        *,
        read_power_saving: Callable[..., PowerSaving] = PowerSaving.read,
    ) -> None:
        self._history = DemandHistory(ledger)
        self._nodes = SleepingNodes(ledger)
        self.observer = SleepObserver(config, self._history, log)
        self.node_power = NodePower(
            config, scontrol, reader, log, history=self._history, nodes=self._nodes
        )
        self._config, self._read = config, read_power_saving
        self._power: tuple[float, PowerSaving] | None = None
        self._growth_at = 0.0
        self._acted = False

    @property
    def config(self) -> Config:
        """The configuration; set at a reconfiguration."""
        return self._config

    @config.setter
    def config(self, config: Config) -> None:
        self._config = self.observer.config = self.node_power.config = config
        self._power = None

    def round(
        self,
        snapshot: Snapshot,
        plan: Plan,
        records: Mapping[int, JobRecord],
        *,
        acts: bool,
        others: Iterable[Job] = (),
        decide: Callable[[Snapshot], Plan],
    ) -> Reason | None:
        """Observe a round, or switch nodes after it.

        Args:
            snapshot: of this round.
            plan: of this round.
            records: of the elastic jobs.
            acts: whether the controller writes at all.
            others: jobs that are not in the snapshot, such as companions.
            decide: decides a round for another snapshot, and keeps nothing of it.

        Returns:
            What keeps nodes from being switched although they should be; None: nothing.
        """
        mode, note = self._config.sleep.mode, None
        self._nodes.load()
        self._acted = False
        if mode == "act" and acts:
            power = self._power_saving()
            if not power.missing:
                self.observer.forget()
                growth = partial(self._growth, snapshot, records, power, decide)
                self.node_power.act(
                    snapshot, plan, records, power=power, others=others, growth=growth
                )
                self._acted = True
                problem = self.node_power.problem
                return Reason("nodes-not-switched", error=problem) if problem else None
            problem = ", ".join(f"{name} {harm}" for name, harm in power.missing)
            note = Reason("nodes-not-switched", error=problem)
        elif acts and self._nodes.asleep:  # it was switched from act to another mode
            self.node_power.wake_all(snapshot, self._power_saving())
        if mode == "off":
            self.observer.forget()
        else:
            self.observer.observe(snapshot, plan, records)
        return note

    def shown(self) -> ObservedSleep | None:
        """Return the state for answers; None: nothing is observed."""
        if self._config.sleep.mode == "off" or not self._history.loaded:
            return None
        asleep = self._nodes.asleep if self._acted else self.observer.asleep
        return ObservedSleep(
            settings=self._config.sleep,
            acts=self._acted,
            record=SleepRecord(dict(self._history.record.bins)),
            asleep=tuple(sorted(asleep)),
            waking=self._nodes.waking if self._acted else (),
        )

    def _power_saving(self) -> PowerSaving:
        now = time.monotonic()
        if self._power is None or now - self._power[0] > _SETTINGS_S:
            self._power = (now, self._read(timeout_s=self._config.slurm.timeout_s))
        return self._power[1]

    def _growth(
        self,
        snapshot: Snapshot,
        records: Mapping[int, JobRecord],
        power: PowerSaving,
        decide: Callable[[Snapshot], Plan],
    ) -> Collection[str]:
        """Return the sleeping nodes onto which jobs would grow; asked once an interval."""
        if snapshot.time < self._growth_at:
            return ()
        self._growth_at = snapshot.time + self._config.controller.interval_s
        names = self._nodes.asleep
        return growth_nodes(
            decide(awakened(snapshot, names)),
            snapshot,
            names,
            records,
            least_left_s=self._config.sleep.grow_boots * power.resume_timeout_s,
        )
