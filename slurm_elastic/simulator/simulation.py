"""Simulation of a workload: time advances, rounds decide, jobs follow.

The same round as in the controller (`slurm_elastic.round`) decides on snapshots of a simulated
cluster; all its changes happen at once. The *round clock* is that of Sia's artifact (SOSP'23,
`cluster.py`): every `interval_s` all jobs advance, then a round decides. With the *event clock* an
arrival, a completion or the end of a restart triggers a round at once, and `interval_s` is the
longest time between two.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slurm_elastic.config.schema import Config
from slurm_elastic.core.application import JobClass
from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.core.plan import Plan, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.policy_protocol import Policy, Question, capabilities_of
from slurm_elastic.round import decide_round
from slurm_elastic.simulator import fairness, job_factory
from slurm_elastic.simulator.cluster_state import SimulatedCluster
from slurm_elastic.simulator.results import JobFreezing, JobResult, Result, RoundResult, Segment
from slurm_elastic.simulator.scalability_analyser import add_observations
from slurm_elastic.simulator.shared_observations import (
    SharedObservations,
    SharedPools,
    application_of,
)
from slurm_elastic.simulator.simulated_job import SimulatedJob
from slurm_elastic.simulator.simulated_lengths import SimulatedLengths
from slurm_elastic.simulator.simulated_neighbours import SimulatedNeighbours
from slurm_elastic.simulator.truth.freezing_truth import BELIEFS
from slurm_elastic.simulator.truth.neighbour_slowdown import NeighbourSlowdown
from slurm_elastic.simulator.truth.rack_network import Network
from slurm_elastic.simulator.truth.resize_costs import ResizeCosts
from slurm_elastic.simulator.truth.restart_costs import RestartCosts
from slurm_elastic.simulator.workloads.application_profiles import Profiles, smallest_rotation
from slurm_elastic.simulator.workloads.cluster_text import Cluster
from slurm_elastic.simulator.workloads.workload import Workload

Clock = Literal["round", "event"]
Progress = Callable[[int, int, float], None]

#: Rounds in a row in which no job holds a GPU, after the last submission, until an error.
_MOST_IDLE_ROUNDS = 1000
#: Shortest time between rounds that a timer alone triggers.
_SOONEST_S = 1.0
#: Rounds between two calls of `progress`.
_TELL_EVERY = 20


class SimulationError(InvalidInputError):
    """Failure of a simulation; the message names the job and a remedy."""


def simulate(
    workload: Workload,
    profiles: Profiles,
    cluster: Cluster,
    *,
    config: Config,
    policy: Policy,
    interval_s: float = 60.0,
    clock: Clock = "round",
    seed: int = 0,
    job_class: JobClass | None = None,
    restarts: RestartCosts | None = None,
    network: Network | None = None,
    freezing: str | None = None,
    resizes: ResizeCosts | None = None,
    moves_restart: bool = False,
    neighbours: NeighbourSlowdown | None = None,
    gpu_pairs: NeighbourSlowdown | None = None,
    progress: Progress | None = None,
) -> Result:
    """Simulate a workload to its end.

    Args:
        workload: jobs and their submission times.
        profiles: true behaviour of the applications.
        cluster: the simulated cluster.
        config: configuration of the site; `[controller] policy` names `policy` in the result. A
            policy with binding proposals is bound neither by `min_interval_s` nor by `per_hour`.
            With `[sia] artifact_compat` jobs also choose their batches by the artifact's fits.
        policy: policy under which it runs.
        interval_s: seconds between rounds; with the event clock the longest.
        clock: `round`: everything happens at multiples of `interval_s`; `event`: arrivals,
            completions and ends of restarts trigger a round at once.
        seed: seed of policies that use random numbers.
        job_class: class of all jobs; None: each its own.
        restarts: seconds of a restart; None: those of the profiles.
        network: racks, and the cost of crossing them; None: all nodes are one rack.
        freezing: assumptions about freezing, one of `freezing_truth.BELIEFS`; all jobs then request
            `freeze=auto`. None: no job freezes layers.
        resizes: costs of changes without a requeue; None: every change is a requeue.
        moves_restart: a move to other nodes in the same shape is a restart, as with racks,
            `resizes` or `neighbours`; else it is free, as in Sia's artifact.
        neighbours: how much applications on one node slow each other down; None: not at all.
        gpu_pairs: how much those on one GPU do; jobs of these have `share=yes`, as far as
            `[neighbours] share_gpus` allows it. None: no job has.
        progress: called every few rounds with (jobs complete, jobs in all, simulated seconds).

    Raises:
        WorkloadError: a job has no profile or can never run on this cluster.
        ApplicationProfileError: the tables have no speed for a placement.
        SimulationError: no job got GPUs for a thousand rounds, or the interval is invalid.
    """
    began = time.process_time()
    if not interval_s >= 1.0:
        raise SimulationError(f"--interval {interval_s:g} is invalid: expected seconds from 1 on")
    capabilities = capabilities_of(policy)
    options = job_factory.JobOptions(
        compat=config.sia.artifact_compat,
        adaptive_batch=capabilities.batch_chosen_by != "user",
        freezes=capabilities.predicts_frozen_layers,
        belief=BELIEFS[freezing] if freezing is not None else None,
        resizes=resizes,
        residuals=capabilities.residual_models,
    )
    jobs = job_factory.jobs(
        workload.forced(job_class), profiles, cluster, restarts or RestartCosts(), options
    )
    if capabilities.initial_measurements:
        add_observations(jobs, cluster)
    costs = (network, resizes, neighbours, gpu_pairs)
    moves_restart = moves_restart or any(cost is not None for cost in costs)
    run = _Run(
        *(cluster, jobs, _Timed(policy), config, seed, interval_s, network, moves_restart),
        *(neighbours, gpu_pairs),
    )
    if clock == "event":
        run.by_events(progress)
    else:
        run.by_rounds(progress)
    results = run.results()
    return Result(
        workload=workload.name,
        policy=config.controller.policy,
        cluster=str(cluster),
        gpus=tuple((g.gpu_type, g.gpus) for g in cluster),
        nodes=sum(g.nodes for g in cluster),
        jobs=results,
        rounds=tuple(run.rounds),
        segments=tuple(run.segments),
        policy_s=tuple(run.policy.cpu_s),
        cpu_s=time.process_time() - began,
        crossing_gpu_s=sum(job.crossing_gpu_s for job in run.jobs),
        notes=(*run.notes, *job_factory.assumptions(run.jobs, options.belief)),
        dropped=tuple(job.submitted.name for job in run.dropped),
        freezing=tuple(_freezing_result(job) for job in run.jobs if job.layers is not None),
    )


def _freezing_result(job: SimulatedJob) -> JobFreezing:
    assert job.layers is not None
    return JobFreezing(job.submitted.name, job.layers.lost / job.truth.total, job.layers.mean)


class _Timed:
    """Policy whose calls are timed."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.capabilities = capabilities_of(policy)
        self.cpu_s: list[float] = []

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Call the policy and measure its CPU time."""
        begin = time.process_time()
        answer = self.policy.decide(question, state)
        self.cpu_s.append(time.process_time() - begin)
        return answer


@dataclass
class _Run:
    """State of one simulation.

    Attributes:
        jobs: all jobs, in order of submission; the first `arrived` are submitted.
        active: jobs submitted and not complete.
        contention: for each job (integral over its life, seconds of its life).
        holding: present allocation of each job, with its start.
        moves_restart: whether a move in the same shape is a restart.
        slowdown: of jobs on one node.
        gpu_slowdown: of jobs on one GPU.
        dropped: jobs that the policy dropped; they never run.
    """

    cluster: Cluster
    jobs: list[SimulatedJob]
    policy: _Timed
    config: Config
    seed: int
    interval_s: float
    network: Network | None = None
    moves_restart: bool = False
    slowdown: NeighbourSlowdown | None = None
    gpu_slowdown: NeighbourSlowdown | None = None
    now_s: float = 0.0
    arrived: int = 0
    active: list[SimulatedJob] = field(default_factory=list)
    rounds: list[RoundResult] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    notes: list[Reason] = field(default_factory=list)
    contention: dict[int, tuple[float, float]] = field(default_factory=dict)
    holding: dict[int, Segment] = field(default_factory=dict)
    dropped: list[SimulatedJob] = field(default_factory=list)
    _state: Mapping[str, Any] = field(default_factory=dict)
    _plan: Plan | None = None
    _idle: int = 0
    _shared: SharedObservations | SharedPools | None = None
    _lengths: SimulatedLengths | None = None
    _neighbours: SimulatedNeighbours | None = None

    def __post_init__(self) -> None:
        if self.slowdown is not None or self.gpu_slowdown is not None:
            self._neighbours = SimulatedNeighbours(
                self.slowdown or NeighbourSlowdown({}), self.config.neighbours, self.gpu_slowdown
            )
        predicts = self.policy.capabilities.predicted_lengths
        self._lengths = SimulatedLengths() if predicts else None
        self.cluster_state = SimulatedCluster(
            self.cluster,
            # With racks, the delay timers of every policy need the cost of distance.
            measure=self.policy.capabilities.simulates_measured_speeds or self.network is not None,
            network=self.network,
            lengths=self._lengths,
            sharing=self.gpu_slowdown.applications if self.gpu_slowdown else frozenset(),
        )
        if self.policy.capabilities.shares_measurements:
            self._shared = SharedPools()
        elif self.config.sia.share:
            self._shared = SharedObservations()
        controller = dataclasses.replace(self.config.controller, queue="controller", partitions=())
        resize = self.config.resize
        if self.policy.capabilities.binding_proposals:
            resize = dataclasses.replace(resize, min_interval_s=0.0, per_hour=3600)
        self.config = dataclasses.replace(self.config, controller=controller, resize=resize)

    def by_rounds(self, progress: Progress | None) -> None:
        """Run with the round clock."""
        count = 0
        while self.arrived < len(self.jobs) or self.active:
            if not self.active:
                # Nothing can happen before the round after the next arrival.
                arrival = self.jobs[self.arrived].submitted.time_s
                count = max(count, -int(-arrival // self.interval_s) - 1)
            count += 1
            self._advance(self.active, count * self.interval_s)
            self._round(count * self.interval_s, progress)

    def by_events(self, progress: Progress | None) -> None:
        """Run with the event clock."""
        while self.arrived < len(self.jobs) or self.active:
            horizon = self.now_s + self.interval_s
            if self._plan is not None and self._plan.wake is not None:
                horizon = min(horizon, max(self._plan.wake, self.now_s + _SOONEST_S))
            if self.arrived < len(self.jobs):
                arrival = self.jobs[self.arrived].submitted.time_s
                horizon = arrival if not self.active else min(horizon, arrival)
            for job in self.active:
                if job.changing:
                    horizon = min(horizon, self.now_s + job.changed_after_s)
            # Jobs do not depend on each other between rounds: advance copies of all jobs to find
            # the first completion, then advance the others to that time only.
            advanced = [job.copy() for job in self.active]
            self._advance(advanced, horizon)
            completions = [j.completion_s for j in advanced if j.completion_s is not None]
            first_completion = min(completions, default=None)
            if first_completion is not None and first_completion < horizon:
                horizon = first_completion
                copies = [job.copy() for job in self.active]
                advanced = [
                    completed if completed.completion_s == first_completion else job
                    for completed, job in zip(advanced, copies, strict=True)
                ]
                self._advance([job for job in advanced if job.completion_s is None], horizon)
            self._replace(advanced)
            self._round(horizon, progress)

    def results(self) -> tuple[JobResult, ...]:
        """Return the results of all jobs but the dropped ones; all are complete."""
        dropped = {job.job_id for job in self.dropped}
        return tuple(self._result(job) for job in self.jobs if job.job_id not in dropped)

    def _advance(self, jobs: list[SimulatedJob], until_s: float) -> None:
        for job in jobs:
            job.advance(until_s)

    def _replace(self, advanced: list[SimulatedJob]) -> None:
        by_id = {job.job_id: job for job in advanced}
        self.active = advanced
        self.jobs = [by_id.get(job.job_id, job) for job in self.jobs]

    def _round(self, at_s: float, progress: Progress | None) -> None:
        """Handle completions and arrivals, decide, and carry out the decision."""
        since = at_s - self.now_s
        for job in self.active:
            total, seconds = self.contention.get(job.job_id, (0.0, 0.0))
            self.contention[job.job_id] = (total + since * len(self.active), seconds + since)
        self.now_s = at_s
        for job in self.active:
            if job.completion_s is not None:
                self._ends(job, job.completion_s)
                self.cluster_state.forget(job.job_id)
                if self._shared is not None:
                    self._shared.add(job)
                if self._lengths is not None:
                    self._lengths.add(job)
        self.active = [job for job in self.active if job.completion_s is None]
        while self.arrived < len(self.jobs) and self.jobs[self.arrived].submitted.time_s <= at_s:
            self._arrives(self.jobs[self.arrived], at_s)
            self.arrived += 1
        self._decide(at_s)
        self._check(at_s)
        if progress is not None and (len(self.rounds) % _TELL_EVERY == 0 or not self.active):
            progress(self.arrived - len(self.active), len(self.jobs), at_s)

    def _arrives(self, job: SimulatedJob, at_s: float) -> None:
        if self._shared is not None:
            others = [o for o in self.active if application_of(o) == application_of(job)]
            for other in others:
                self._shared.add(other)
            self._shared.give_to(job, others)
        job.now_s = at_s
        self.active.append(job)

    def _decide(self, at_s: float) -> None:
        if self.active:
            snapshot = self.cluster_state.snapshot(at_s, self.active)
            table = self._neighbours.learn(snapshot, self.active) if self._neighbours else None
            pairs = self._neighbours.gpu_pairs(snapshot, self.active) if self._neighbours else None
            plan, self._state = decide_round(
                snapshot,
                self.cluster_state.records(self.active),
                config=self.config,
                policy=self.policy,
                state=self._state,
                previous=self._plan,
                seed=self.seed,
                at_once=True,
                explain=False,
                neighbours=table,
                gpu_pairs=pairs,
            )
            self._plan = plan
            self.notes.extend(note for note in plan.notes if note not in self.notes[-8:])
            self._carry_out(plan, at_s)
        held: dict[str, float] = {}
        for job in self.active:
            if job.allocation is not None and job.shape:
                held[job.gpu_type] = held.get(job.gpu_type, 0) + job.allocation.amount
        used = {name: math.ceil(gpus) for name, gpus in held.items()}
        nodes = {n for job in self.active if job.allocation for n in job.allocation.nodes}
        self.rounds.append(
            RoundResult(at_s, len(self.active), tuple(sorted(used.items())), len(nodes))
        )

    def _carry_out(self, plan: Plan, at_s: float) -> None:
        targets = {d.job_id: d.target for d in plan.decisions}
        self._drop({d.job_id for d in plan.decisions if d.dropped})
        batches = {d.job_id: d.batch for d in plan.decisions}
        for job in self.active:
            job.order(batches.get(job.job_id))
            target = targets.get(job.job_id, job.allocation)
            if target == job.allocation:
                continue
            self._ends(job, at_s)
            job.hold(target, moving_costs=self.moves_restart)
            if target is not None:
                shape = smallest_rotation(g for _, g in target.shares)
                self.holding[job.job_id] = Segment(
                    job.submitted.name, at_s, at_s, target.gpu_type, shape
                )
        if self.network is not None:
            self._cross(self.network)
        if self._neighbours is not None:
            self.cluster_state.divide(self.active)
            self._neighbours.slow(self.active, self.cluster_state)

    def _drop(self, job_ids: Collection[int]) -> None:
        """Remove the jobs that the policy dropped."""
        for job in [j for j in self.active if j.job_id in job_ids]:
            self.dropped.append(job)
            self.active.remove(job)
            self.cluster_state.forget(job.job_id)

    def _cross(self, network: Network) -> None:
        """Set the cost of crossing racks for each job from now on."""
        allocations = {
            j.job_id: (j.submitted.application, j.allocation)
            for j in self.active
            if j.allocation is not None
        }
        extra_s = network.extra_s(allocations, self.cluster_state.rack_of)
        for job in self.active:
            job.extra_s = extra_s.get(job.job_id, 0.0)
            allocation = job.allocation
            job.racks = (
                len({self.cluster_state.rack_of[n] for n in allocation.nodes}) if allocation else 0
            )

    def _ends(self, job: SimulatedJob, at_s: float) -> None:
        segment = self.holding.pop(job.job_id, None)
        if segment is not None and at_s > segment.begin_s:
            self.segments.append(dataclasses.replace(segment, end_s=at_s))

    def _check(self, at_s: float) -> None:
        """Check that some job can still make progress."""
        busy = not self.active or any(job.shape for job in self.active)
        self._idle = 0 if busy or self.arrived < len(self.jobs) else self._idle + 1
        if self._idle > _MOST_IDLE_ROUNDS:
            job = self.active[0].submitted
            raise SimulationError(
                f"{job.source or job.name}: {job.name} was given no GPU for {_MOST_IDLE_ROUNDS}"
                f" rounds although the cluster is idle (at {at_s:.0f} s, {len(self.active)} jobs"
                f" wait); try another policy, or change its request"
            )

    def _result(self, job: SimulatedJob) -> JobResult:
        assert job.completion_s is not None
        assert job.start_s is not None
        total, seconds = self.contention[job.job_id]
        contention = total / seconds
        submitted = job.submitted
        jct_s = job.completion_s - submitted.time_s
        return JobResult(
            name=submitted.name,
            application=submitted.application,
            job_class=submitted.job_class.value,
            submission_s=submitted.time_s,
            start_s=job.start_s,
            completion_s=job.completion_s,
            jct_s=jct_s,
            restarts=job.restarts,
            changes_in_place=job.changes_in_place,
            gpu_s=job.gpu_s,
            lost_gpu_s=job.lost_gpu_s,
            contention=contention,
            rho=jct_s / fairness.isolated_s(job, self.cluster, contention),
        )
