"""Switching of idle nodes through Slurm's power saving: `[sleep] mode = "act"`.

The site's SuspendProgram and ResumeProgram do the work. A node is switched off only while Slurm
shows it plainly IDLE and nothing is meant for it; that is read again just before the write, and
what was written is read back. A node is woken for a claim, a decision or a reservation on it, for
growth that is worth it, for the forecast and for the spare. Slurm itself wakes nodes for pending
jobs, also without this controller. Nodes that others have switched off are woken for claims only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.sleep.demand_history import DemandHistory
from slurm_elastic.controller.sleep.sleeping_nodes import SleepingNodes
from slurm_elastic.core.cluster import Job, Node, Snapshot
from slurm_elastic.core.nodelist import fold
from slurm_elastic.core.plan import JobRecord, Plan
from slurm_elastic.placement.sleep import sleep_choice
from slurm_elastic.slurm import power_states
from slurm_elastic.slurm.power_saving import PowerSaving
from slurm_elastic.slurm.readers.cluster_reader import ClusterReader
from slurm_elastic.slurm.scontrol import Scontrol, ScontrolError, SlurmUnreachableError

#: Seconds after a refusal in which no node is switched off, and in which none is switched on.
_AFTER_REFUSAL_S, _AGAIN_ON_S = 600.0, 60.0
#: Seconds beyond ResumeTimeout after which a wake that shows no effect is asked for again.
_GRACE_S = 60.0


class NodePower:
    """Power of the nodes of one cluster.

    Args:
        config: of the site; replaced at a reconfiguration.
        scontrol: all writes.
        reader: reads the state of each node anew.
        log: structlog logger.
        history: of the nodes in use.
        nodes: names of those that were switched off.
    """

    def __init__(
        self,
        config: Config,
        scontrol: Scontrol,
        reader: ClusterReader,
        log: Any,
        *,
        history: DemandHistory,
        nodes: SleepingNodes,
    ) -> None:
        self.config = config
        self._scontrol, self._reader = scontrol, reader
        self._history, self._nodes, self._log = history, nodes, log
        self._idle_since: dict[str, float] = {}
        #: Nodes that were woken for growth, and until when they are kept for it.
        self._growth_until: dict[str, float] = {}
        self._off_again = self._on_again = 0.0
        #: Why the last write was refused; "": it was not.
        self.problem = ""

    def act(
        self,
        snapshot: Snapshot,
        plan: Plan | None,
        records: Mapping[int, JobRecord],
        *,
        power: PowerSaving,
        others: Iterable[Job] = (),
        growth: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """Follow the nodes that sleep, and switch nodes off or on.

        Args:
            snapshot: of this round.
            plan: of this round.
            records: of the elastic jobs.
            power: settings of power saving.
            others: jobs that are not in the snapshot, such as companions.
            growth: returns the sleeping nodes onto which jobs are to grow.
        """
        settings, now = self.config.sleep, snapshot.time
        self._history.load()
        late = self.follow(snapshot, power.resume_timeout_s)
        nodes = sleep_choice.counted_nodes(snapshot, self._nodes.all)
        used = sum(sleep_choice.in_use(n) for n in nodes)
        named = {n.name: n for n in nodes}
        # Slurm switches off a node on which a job began in these seconds when the job has ended.
        asleep = {
            name: since
            for name, since in self._nodes.asleep.items()
            if name in named and not sleep_choice.in_use(named[name])
        }
        self._history.count(now, used=used, asleep=len(asleep)).late += late
        wanted = set(growth()) if asleep and not self._nodes.waking else set()
        until = now + power.resume_timeout_s + settings.window_s
        self._growth_until = {n: t for n, t in self._growth_until.items() if t > now}
        self._growth_until |= dict.fromkeys(wanted, until)
        assigned = self._growth_until.keys() | sleep_choice.assigned_nodes(
            snapshot,
            plan,
            records,
            others=others,
            reserved_within_s=settings.window_s + power.resume_timeout_s,
        )
        free = [
            name
            for name in sleep_choice.may_sleep(snapshot, assigned)
            if not power.excludes(named[name])
        ]
        self._idle_since = {name: self._idle_since.get(name, now) for name in free}
        known = asleep.keys() & assigned
        needed = sleep_choice.idle_assigned(nodes, assigned)
        needed += sleep_choice.soon_needed(snapshot, power.resume_timeout_s)
        awake = self._history.awake(settings, now, total=len(nodes), needed=needed)
        idle_since = {
            name: now if self._nodes.cycles(name, now) >= settings.cycles_per_day else since
            for name, since in self._idle_since.items()
        }
        boots = [n for n in self._nodes.waking if n in named and n not in assigned]
        changes = sleep_choice.changes(
            [*free, *(n for n in boots if not sleep_choice.in_use(named[n]))],
            {name: since for name, since in asleep.items() if name not in known},
            idle_since,
            total=len(nodes),
            awake=awake,
            now=now,
            least_idle_s=settings.window_s,
            types={n.name: n.gpu_type for n in nodes},
            spare=settings.spare,
        )
        # As Slurm does for a job that it starts: whoever has switched the node off.
        known |= {n.name for n in snapshot.nodes if n.asleep and n.name in _claimed(plan)}
        self._switch_on({*known, *changes.wake}, snapshot, needed_now=known)
        if not known and not self._nodes.waking:
            self._switch_off(changes.sleep, now, awake=awake, total=len(nodes))
        self._history.write(now)

    def wake_all(self, snapshot: Snapshot, power: PowerSaving) -> None:
        """Wake every node that this controller has switched off: it no longer does that."""
        self.follow(snapshot, power.resume_timeout_s)
        self._switch_on(set(self._nodes.asleep), snapshot)

    def follow(self, snapshot: Snapshot, resume_timeout_s: float) -> int:
        """Bring the record up to what Slurm shows; return how many nodes were needed asleep."""
        self._nodes.load()
        late, now = 0, snapshot.time
        ended: list[str] = []
        for name, sleeping in self._nodes.all.items():
            node = snapshot.node.get(name)
            if node is None or _is_set_apart(node):
                ended.append(name)
                state = node.state if node else "gone"
                self._log.warning(
                    f"Node={name} Power=lost State={state} after it was switched off: it is left"
                    " to Slurm and the administrator"
                )
            elif "UNKNOWN" in power_states.words(node.state):
                continue  # slurmctld has just started
            elif power_states.loses_power(node.state):
                if sleeping.woken and now - sleeping.woken > resume_timeout_s + _GRACE_S:
                    self._nodes.not_woken([name])  # it is woken again if it still is needed
            elif power_states.gains_power(node.state):
                if sleeping.woken is None:
                    late += 1
                    self._nodes.switched_on([name], now)
                    self._log.info(
                        f"Node={name} Power=up By=slurm AsleepFor={now - sleeping.since:.0f}s"
                    )
            else:
                ended.append(name)
                late += sleeping.woken is None and sleep_choice.in_use(node)
                begin = sleeping.woken or sleeping.since
                self._log.info(f"Node={name} Power=on After={now - begin:.0f}s")
        self._nodes.ended(ended)
        return late

    def _switch_on(
        self, names: Collection[str], snapshot: Snapshot, *, needed_now: Collection[str] = ()
    ) -> None:
        now, urgent = snapshot.time, frozenset(needed_now)
        ready = {n for n in names if power_states.has_no_power(snapshot.node[n].state)}
        if not ready or now < self._on_again:
            return
        try:
            self._scontrol.power_up(fold(ready))
        except SlurmUnreachableError:
            raise  # whether it happened is read in the next round
        except ScontrolError as error:
            self._refused(error)
            self._on_again = now + _AGAIN_ON_S
            return
        after = self._reader.node_states()
        ignored = {n for n in ready if power_states.loses_power(after.get(n, ""))}
        self._nodes.switched_on(ready - ignored, now)
        for reason, group in (("needed", ready & urgent), ("forecast", ready - urgent)):
            if woken := group - ignored:
                self._log.info(f"Sleep=act ToWake={fold(woken)} Reason={reason}")
        self._read_back("POWER_UP", ignored)
        if ignored:
            self._on_again = now + _AGAIN_ON_S

    def _switch_off(self, names: Collection[str], now: float, *, awake: int, total: int) -> None:
        if not names or now < self._off_again:
            return
        before = self._reader.node_states()
        still_idle = {n for n in names if before.get(n) == sleep_choice.IDLE}
        if not still_idle:
            return
        self._nodes.switched_off(still_idle, now)
        try:
            self._scontrol.power_down(fold(still_idle))
        except SlurmUnreachableError:
            raise  # whether it happened is read in the next round
        except ScontrolError as error:
            self._nodes.ended(still_idle)
            self._refused(error)
            self._off_again = now + _AFTER_REFUSAL_S
            return
        after = self._reader.node_states()
        ignored = {n for n in still_idle if not power_states.loses_power(after.get(n, ""))}
        self._nodes.ended(ignored)
        self._read_back("POWER_DOWN", ignored)
        if ignored:
            self._off_again = now + _AFTER_REFUSAL_S
        self._log.info(
            f"Sleep=act Asleep={len(self._nodes.asleep)} Nodes={total} Awake={awake}"
            f" ToSleep={fold(still_idle - ignored) or '-'}"
        )

    def _read_back(self, order: str, ignored: Collection[str]) -> None:
        if ignored:
            self._refused(f"scontrol update: {order} of {fold(ignored)} had no effect")
        else:
            self.problem = ""

    def _refused(self, error: object) -> None:
        if self.problem != str(error):
            self._log.error(f"{error}; it is tried again later")
        self.problem = str(error)


def _claimed(plan: Plan | None) -> frozenset[str]:
    """Return the nodes that are kept for pending jobs."""
    return frozenset(name for claim in (plan.claims if plan else ()) for name, _ in claim.shares)


def _is_set_apart(node: Node) -> bool:
    """Return whether Slurm has given up a node, or an administrator has drained it."""
    return power_states.is_lost(node.state) or "DRAIN" in power_states.words(node.state)
