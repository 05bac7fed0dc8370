"""Simulation of jobs whose GPUs and execution plans change together, in rounds.

In each round the jobs first train for an interval, then a policy decides what each holds. A job
that is placed anew stands still for `RESTART_S`, and begins the step anew that was interrupted.
Step times are those of a `StepTable`. `PlanRules.published` follows Rubick's simulator instead,
whose results this reproduces (docs/rubick.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slurm_elastic.policies.execution.plan_options import PlanHolding
from slurm_elastic.simulator.execution.plan_jobs import PlanJob
from slurm_elastic.simulator.execution.step_table import StepTable
from slurm_elastic.simulator.workloads.workload import WorkloadError

#: Seconds of a round, and those that a job stands still when it is placed: as published.
ROUND_S = 60.0
RESTART_S = 260.0


@dataclass(slots=True)
class PlanRun:
    """A job and its progress.

    Attributes:
        job: as submitted.
        holding: what it runs on; nothing while it waits.
        step_s: seconds of a step on that.
        steps: complete steps.
        partial_s: seconds of the step that is under way.
        standing_s: seconds until it trains again.
        starts: how often it was placed.
        gpu_s: GPU seconds that it has held; its last round counts in full, as others get its GPUs
            only when the round is over.
        training_s: seconds for which it held GPUs, restarts included.
        finish_s: end; None: it is not over.
    """

    job: PlanJob
    holding: PlanHolding = field(default_factory=PlanHolding)
    step_s: float = math.inf
    steps: int = 0
    partial_s: float = 0.0
    standing_s: float = 0.0
    starts: int = 0
    gpu_s: float = 0.0
    training_s: float = 0.0
    finish_s: float | None = None

    @property
    def left(self) -> int:
        """Steps that are still to be done."""
        return self.job.steps - self.steps

    @property
    def restarts(self) -> int:
        """Placements after the first."""
        return max(0, self.starts - 1)

    def train(self, now: float, seconds: float) -> None:
        """Train from `now` on for so many seconds."""
        if not self.holding.nodes or self.finish_s is not None:
            return
        standing = min(self.standing_s, seconds)
        self.standing_s -= standing
        spent = self.partial_s + seconds - standing
        done = math.floor(spent / self.step_s) if standing < seconds else 0
        held = seconds
        if done >= self.left:
            held = standing + self.left * self.step_s - self.partial_s
            self.finish_s = now + held
            done, spent = self.left, self.left * self.step_s
        self.steps += done
        self.partial_s = spent - done * self.step_s
        self.training_s += held
        self.gpu_s += seconds * self.holding.gpus


class PlanPolicy(Protocol):
    """A decision on all jobs that are not over."""

    def decide(
        self, now: float, runs: Sequence[PlanRun], decided: Mapping[str, PlanHolding]
    ) -> dict[str, PlanHolding]:
        """Return the GPUs and the plan of each job; a job that is missing holds nothing.

        Args:
            now: seconds since the trace's start.
            runs: jobs that were submitted and are not over, in the order of the trace.
            decided: what this returned last for these jobs.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRules:
    """Rules of a simulation.

    Attributes:
        nodes, node_gpus: of the cluster.
        keeps_taken: a job whose GPUs were all taken runs on with them, as published.
        keeps_partial: seconds that were spent on an interrupted step count, as published.
        free_moves: a move to other nodes in the same placement costs nothing, as published.
        extra_steps: steps that each job does beyond those of the trace; as published: 1.
        most_s: end of the simulation, even if jobs are not over.
    """

    nodes: int = 8
    node_gpus: int = 8
    keeps_taken: bool = False
    keeps_partial: bool = False
    free_moves: bool = False
    extra_steps: int = 0
    most_s: float = math.inf

    @classmethod
    def published(cls, *, keeps_taken: bool) -> PlanRules:
        """Return the rules of Rubick's simulator."""
        return cls(keeps_taken=keeps_taken, keeps_partial=True, free_moves=True, extra_steps=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Outcome of a simulation.

    Attributes:
        runs: all jobs, in the order of the trace.
        most_gpus: most GPUs in use after a round.
        rounds: all rounds; `full_rounds`: those with more GPUs in use than there are.
        decide_s: wall time of the longest decision.
    """

    runs: tuple[PlanRun, ...]
    most_gpus: int
    rounds: int
    full_rounds: int
    decide_s: float

    @property
    def completion_s(self) -> list[float]:
        """Completion times of the jobs that are over, ascending."""
        return sorted(r.finish_s - r.job.submit_s for r in self.runs if r.finish_s is not None)


def simulate_plans(
    jobs: Sequence[PlanJob],
    tables: Mapping[str, StepTable],
    policy: PlanPolicy,
    rules: PlanRules | None = None,
) -> PlanResult:
    """Run a trace.

    Args:
        jobs: of the trace.
        tables: step tables by model.
        policy: decides in each round.
        rules: of the simulation.

    Raises:
        WorkloadError: the policy gave more GPUs than there are, or nothing ever runs again.
    """
    rules = rules or PlanRules()
    runs = [PlanRun(job, steps=-rules.extra_steps) for job in jobs]
    decided: dict[str, PlanHolding] = {}
    now, most_gpus, rounds, full_rounds, longest, idle = 0.0, 0, 0, 0, 0.0, 0
    capacity = rules.nodes * rules.node_gpus
    while now < rules.most_s and any(run.finish_s is None for run in runs):
        for run in runs:
            run.train(now, ROUND_S)
        now += ROUND_S
        rounds += 1
        active = [r for r in runs if r.job.submit_s <= now and r.finish_s is None]
        names = {run.job.name for run in active}
        decided = {name: holding for name, holding in decided.items() if name in names}
        began = time.perf_counter()
        decided = policy.decide(now, active, decided)
        longest = max(longest, time.perf_counter() - began)
        _check(decided, rules)
        for run in active:
            _place(run, decided.get(run.job.name, PlanHolding()), tables, rules)
        used = sum(run.holding.gpus for run in active)
        most_gpus, full_rounds = max(most_gpus, used), full_rounds + (used > capacity)
        idle = 0 if used or not active else idle + 1
        if idle > 10_000:
            raise WorkloadError(f"job {active[0].job.name} never runs although all GPUs are free")
    return PlanResult(
        runs=tuple(runs),
        most_gpus=most_gpus,
        rounds=rounds,
        full_rounds=full_rounds,
        decide_s=longest,
    )


def _place(
    run: PlanRun, holding: PlanHolding, tables: Mapping[str, StepTable], rules: PlanRules
) -> None:
    """Give a job what was decided."""
    if not holding.nodes:
        if not rules.keeps_taken:
            run.holding, run.step_s = holding, math.inf
        return
    old = run.holding
    # As published, a changed plan on unchanged GPUs is not applied.
    same = holding.placement == old.placement if rules.free_moves else holding == old
    if same:
        run.holding = PlanHolding(holding.nodes, old.plan)
        return
    run.holding = holding
    run.step_s = tables[run.job.model].step_s(holding.plan, holding.placement)
    run.standing_s = RESTART_S
    run.starts += 1
    if not rules.keeps_partial:
        run.partial_s = 0.0


def _check(decided: Mapping[str, PlanHolding], rules: PlanRules) -> None:
    used = [0] * rules.nodes
    for name, holding in decided.items():
        for node, gpus in holding.nodes:
            used[node] += gpus
            if used[node] > rules.node_gpus:
                raise WorkloadError(
                    f"job {name}: node {node} has {rules.node_gpus} GPUs, the policy gave"
                    f" {used[node]}"
                )
