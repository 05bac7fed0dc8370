"""Nodes whose power a `SleepControl` switches, without Slurm."""

import dataclasses

from slurm_elastic.config.schema import Config, ControllerSettings, SleepSettings
from slurm_elastic.controller.sleep.sleep_control import SleepControl
from slurm_elastic.controller.sleep.sleep_record import BIN_S
from slurm_elastic.core.nodelist import expand
from slurm_elastic.core.plan import Plan
from slurm_elastic.slurm import power_states
from slurm_elastic.slurm.power_saving import PowerSaving

BEGIN = 1_700_000_400 // BIN_S * BIN_S


class Log:
    def __init__(self):
        self.lines = []

    def info(self, line):
        self.lines.append(line)

    error = warning = info


class KeptValues(dict):
    def put(self, name, value):
        self[name] = value


class PoweredNodes:
    """A cluster (`synthetic_clusters`), the power of its nodes, and the controller of their sleep.

    Its ledger has a day in which `used` nodes were in use.
    """

    def __init__(self, cluster, *, used=0, mode="act", controller="act", missing=(), **settings):
        self.cluster, self.now = cluster, float(BEGIN)
        self.states = {n.name: n.state for n in cluster.nodes}
        self.writes = []
        self.refuses = self.before_write = None
        self.power = PowerSaving(
            missing=missing,
            suspend_time_s=1e7,
            resume_timeout_s=300.0,
            excluded_nodes=frozenset(settings.pop("excluded", ())),
        )
        self.config = Config(
            controller=ControllerSettings(mode=controller),
            sleep=SleepSettings(**({"mode": mode, "window_s": 600.0} | settings)),
        )
        first = BEGIN // BIN_S
        self.ledger = KeptValues(sleep_bins=[[first - i, used, 0.0, 0] for i in range(200, 0, -1)])
        self.wished = Plan(time=self.now)
        self.start()

    def start(self):
        """Start the controller, anew."""
        self.log = Log()
        self.control = SleepControl(
            self.config, self, self, self.ledger, self.log,
            read_power_saving=lambda **_: self.power,
        )  # fmt: skip

    # --- Scontrol ---

    def power_down(self, nodes):
        self._write("down", nodes)
        for name in expand(nodes):
            idle = self.states[name] == "IDLE"
            self.states[name] = "IDLE+POWERED_DOWN" if idle else "ALLOCATED+POWER_DOWN"

    def power_up(self, nodes):
        self._write("up", nodes)
        for name in expand(nodes):
            assert self.states[name] == "IDLE+POWERED_DOWN"
            self.states[name] = "IDLE+POWERING_UP"

    # --- ClusterReader ---

    def node_states(self):
        return dict(self.states)

    def _write(self, what, nodes):
        if self.before_write:
            self.before_write()
        if self.refuses:
            raise self.refuses
        self.writes.append((what, *expand(nodes)))

    # --- time ---

    def snapshot(self):
        """Return the cluster now."""
        snapshot = self.cluster.snapshot()
        nodes = tuple(
            dataclasses.replace(
                n,
                state=self.states[n.name],
                available=n.available and self.states[n.name] in ("IDLE", "MIXED", "ALLOCATED"),
                asleep=power_states.can_wake(self.states[n.name]),
            )
            for n in snapshot.nodes
        )
        return dataclasses.replace(snapshot, nodes=nodes, time=self.now)

    def boot(self):
        """End the boot of all nodes that boot."""
        for name, state in self.states.items():
            if power_states.gains_power(state):
                self.states[name] = "IDLE"

    def round(self, *, after_s=60.0, plan=None, records=None, others=()):
        """Let time pass and run a round; return the writes of it."""
        self.now += after_s
        count = len(self.writes)
        self.note = self.control.round(
            self.snapshot(), plan or Plan(time=self.now), records or self.cluster.records,
            acts=self.config.controller.mode == "act", others=others,
            decide=lambda _: self.wished,
        )  # fmt: skip
        return self.writes[count:]

    def rounds(self, seconds):
        """Run a round a minute; return all writes."""
        count = len(self.writes)
        for _ in range(int(seconds // 60)):
            self.round()
        return self.writes[count:]
