"""Policy that chooses GPUs and execution plan of each job together, in rounds. Pure.

A job with L seconds left in an option of g GPUs costs all jobs together about

    cost = (R + L) (1 + p g)        R: seconds of a start;  p = (b + W) / G

for W jobs that wait, of G GPUs: a GPU second delays the jobs that wait for it. b is a price for
jobs that are still to come. Each round, in this order:

1. Jobs are ranked by the least GPU time that they still need, and each waiting one gets the option
   of least cost that fits. One that costs much more than the best option waits for that.
2. Where nothing fits, jobs that need much longer are stopped, if that costs less than it saves.
3. If no job waits, running jobs change to the option that saves most seconds per GPU, if it saves
   more than a start costs.

A guaranteed job runs only in options in which the time for which it holds GPUs, starts included,
stays within that of its request: one start, and all steps as requested.

What is left of a job is known, or estimated (`PlanDemand.known`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_elastic.policies.execution.plan_options import NOTHING_HELD, PlanHolding, PlanOption


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDemand:
    """One job that is not over.

    Attributes:
        name: unique.
        options: as of `useful_options`.
        left: steps that it still needs.
        known: whether that is known; else it is an estimate, on which no guarantee relies.
        holding: what it holds; nothing while it waits.
        step_s: seconds of a step on that.
        standing_s: seconds until it trains after its last start.
        slack_s: by how much a guaranteed job's time with GPUs may still exceed that of its
            request, if all further steps take as long as there; None: it is not guaranteed.
        requested_s: seconds of a step as requested.
    """

    name: str
    options: tuple[PlanOption, ...]
    left: float
    known: bool = True
    holding: PlanHolding = NOTHING_HELD
    step_s: float = math.inf
    standing_s: float = 0.0
    slack_s: float | None = None
    requested_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoiceSettings:
    """Numbers of the policy; our choice, from docs/rubick.md.

    Attributes:
        restart_s: seconds of a start.
        price: b, in jobs.
        patience: a job waits for an option that costs this many times less than the best that
            fits.
        longer: a job is stopped only for one whose time, start included, is this many times
            shorter than its own.
        gain: a change must save this many times the seconds that a start costs.
    """

    restart_s: float = 260.0
    price: float = 1.0
    patience: float = 2.0
    longer: float = 3.0
    gain: float = 2.0


def choose_plans(
    demands: Sequence[PlanDemand],
    *,
    nodes: int,
    node_gpus: int,
    settings: PlanChoiceSettings | None = None,
) -> dict[str, PlanHolding]:
    """Return the GPUs and the plan of each job; a job that is missing holds nothing.

    Args:
        demands: all jobs that are not over.
        nodes: of the cluster.
        node_gpus: GPUs of each.
        settings: numbers of the policy.
    """
    return _Round(demands, nodes, node_gpus, settings or PlanChoiceSettings()).decide()


class _Round:
    """State of one decision."""

    def __init__(
        self,
        demands: Sequence[PlanDemand],
        nodes: int,
        node_gpus: int,
        settings: PlanChoiceSettings,
    ) -> None:
        self._settings = settings
        self._gpus = nodes * node_gpus
        self._free = [node_gpus] * nodes
        self._by_name = {demand.name: demand for demand in demands}
        self._held: dict[str, PlanHolding] = {}
        for demand in demands:
            if demand.holding.nodes:
                self._take(demand.name, demand.holding)
        self._ranked = sorted(demands, key=self._least_gpu_s)

    def decide(self) -> dict[str, PlanHolding]:
        """Carry out the steps of the module."""
        waiting = [d for d in self._ranked if d.name not in self._held]
        self._price = (self._settings.price + len(waiting)) / self._gpus
        for demand in waiting:
            if not self._start(demand):
                self._displace(demand)
        if all(d.name in self._held for d in self._ranked):
            self._grow()
        return self._held

    def _least_gpu_s(self, demand: PlanDemand) -> float:
        start = self._settings.restart_s
        return min((start + demand.left * o.step_s) * o.gpus for o in demand.options)

    def _cost(self, demand: PlanDemand, option: PlanOption) -> float:
        seconds = self._settings.restart_s + demand.left * option.step_s
        return seconds * (1 + self._price * option.gpus)

    def _allowed(self, demand: PlanDemand) -> list[PlanOption]:
        """Return the options that keep a guarantee, cheapest first."""
        options = [o for o in demand.options if self._keeps(demand, o.step_s)]
        return sorted(options, key=lambda o: self._cost(demand, o))

    def _keeps(self, demand: PlanDemand, step_s: float) -> bool:
        """Return whether a start in such an option keeps a job's guarantee."""
        if demand.slack_s is None:
            return True
        if step_s > demand.requested_s:
            return False
        gained = demand.left * (demand.requested_s - step_s) if demand.known else 0.0
        return demand.slack_s + gained >= self._settings.restart_s

    def _start(self, demand: PlanDemand) -> bool:
        options = self._allowed(demand)
        if not options:
            return False
        best = self._cost(demand, options[0])
        for option in options:
            if self._cost(demand, option) > self._settings.patience * best:
                break
            holding = option.on(self._free)
            if holding is not None:
                self._take(demand.name, holding)
                return True
        return False

    def _displace(self, demand: PlanDemand) -> None:
        """Stop jobs that need much longer, if a job then starts."""
        settings = self._settings
        victims = sorted(
            (self._by_name[name] for name in self._held if self._stoppable(name)),
            key=self._left_s,
            reverse=True,
        )
        for option in self._allowed(demand):
            seconds = settings.restart_s + demand.left * option.step_s
            free = list(self._free)
            stopped: list[PlanDemand] = []
            holding = None
            for victim in victims:
                if self._left_s(victim) <= settings.longer * seconds:
                    break
                for node, gpus in self._held[victim.name].nodes:
                    free[node] += gpus
                stopped.append(victim)
                holding = option.on(free)
                if holding is not None:
                    break
            if holding is None:
                continue
            stopped = self._needed(stopped, option)
            if (seconds + settings.restart_s) * len(stopped) > self._until_free(option):
                continue
            for victim in stopped:
                self._give(victim.name)
            holding = option.on(self._free)
            assert holding is not None
            self._take(demand.name, holding)
            for victim in sorted(stopped, key=self._least_gpu_s):
                self._start(victim)
            return

    def _needed(self, stopped: Sequence[PlanDemand], option: PlanOption) -> list[PlanDemand]:
        """Leave out jobs whose GPUs are not needed for the option."""
        needed = list(stopped)
        for victim in stopped:
            rest = [v for v in needed if v is not victim]
            free = list(self._free)
            for other in rest:
                for node, gpus in self._held[other.name].nodes:
                    free[node] += gpus
            if option.on(free) is not None:
                needed = rest
        return needed

    def _stoppable(self, name: str) -> bool:
        victim = self._by_name[name]
        if victim.holding != self._held[name] or victim.standing_s > 0:
            return False
        return self._keeps(victim, min(o.step_s for o in victim.options))

    def _left_s(self, demand: PlanDemand) -> float:
        return demand.standing_s + demand.left * demand.step_s

    def _until_free(self, option: PlanOption) -> float:
        """Return the seconds until so many GPUs are free, if nothing is stopped."""
        free = list(self._free)
        ends = sorted(
            (self._left_s(self._by_name[n]), n)
            for n, h in self._held.items()
            if self._by_name[n].holding == h
        )
        for end_s, name in ends:
            for node, gpus in self._held[name].nodes:
                free[node] += gpus
            if option.on(free) is not None:
                return end_s
        return math.inf

    def _grow(self) -> None:
        """Change running jobs to faster options, most seconds per GPU first."""
        settings = self._settings
        changed: set[str] = set()
        while True:
            best: tuple[float, str, PlanHolding] | None = None
            for name, held in self._held.items():
                demand = self._by_name[name]
                if demand.holding != held or demand.standing_s > 0 or name in changed:
                    continue
                free = list(self._free)
                for node, gpus in held.nodes:
                    free[node] += gpus
                for option in self._allowed(demand):
                    saved = demand.left * (demand.step_s - option.step_s) - settings.restart_s
                    if saved < settings.gain * settings.restart_s:
                        continue
                    more = option.gpus - held.gpus
                    cost = self._cost(demand, option)
                    if cost > self._left_s(demand) * (1 + self._price * held.gpus):
                        break
                    holding = option.on(free)
                    if holding is not None:
                        value = saved / max(more, 0.5)
                        if best is None or value > best[0]:
                            best = (value, name, holding)
                        break
            if best is None:
                return
            _, name, holding = best
            self._give(name)
            self._take(name, holding)
            changed.add(name)

    def _take(self, name: str, holding: PlanHolding) -> None:
        self._held[name] = holding
        for node, gpus in holding.nodes:
            self._free[node] -= gpus

    def _give(self, name: str) -> None:
        for node, gpus in self._held.pop(name).nodes:
            self._free[node] += gpus
