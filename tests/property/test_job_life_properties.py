"""Properties over hours of a small cluster: arrivals, ends, changes with delays, Slurm's starts."""

import dataclasses
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.core.cluster import Allocation, JobState
from slurm_elastic.core.plan import Action
from slurm_elastic.placement.best_fit import even_splits
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.round import decide_round
from tests.support.decisions.synthetic_clusters import Cluster, node, racks

ROUND_S = 30.0


class Life:
    """Cluster, records of the controller, and a Slurm that starts jobs in order of priority."""

    def __init__(self, seed, queue):
        self.rng = random.Random(seed)
        self.config = Config(controller=ControllerSettings(queue=queue))
        nodes = [node(f"n{i}", 4, self.rng.choice(["a100", "v100"])) for i in range(6)]
        self.cluster = Cluster(nodes, switches=racks([n.name for n in nodes], 3))
        self.plan, self.state = None, {}
        self.last_id = 0
        self.left = {}
        self.since = {}
        self.changes = {}

    def run(self, rounds):
        for _ in range(rounds):
            self.cluster.time += ROUND_S
            self.arrive()
            self.end()
            self.finish_changes()
            self.slurm_starts()
            self.check()
            self.plan, self.state = decide_round(
                self.cluster.snapshot(),
                self.cluster.records,
                config=self.config,
                policy=FairShare(self.config),
                state=self.state,
                previous=self.plan,
            )
            for decision in self.plan.changes:
                self.begin(decision)

    def arrive(self):
        if self.rng.random() > 0.25 or len(self.cluster.jobs) > 25:
            return
        self.last_id += 1
        gpus = self.rng.choice([1, 1, 2, 4, 4, 8])
        elastic = f"{gpus}-{gpus * self.rng.choice([1, 2, 4, 8])}"
        self.cluster.add(
            self.last_id,
            elastic=elastic if self.rng.random() < 0.6 else "",
            gpus=gpus,
            priority=self.rng.randint(0, 5),
            record={"proven": False},
            submit_time=self.cluster.time,
        )
        self.left[self.last_id] = self.rng.randint(2, 60)

    def end(self):
        for job in list(self.cluster.jobs):
            if job.state is JobState.RUNNING:
                self.left[job.job_id] -= 1
                if self.left[job.job_id] <= 0 and not self.moving(job.job_id):
                    self.cluster.jobs.remove(job)
                    self.cluster.records.pop(job.job_id, None)

    def moving(self, job_id):
        record = self.cluster.records.get(job_id)
        return record is not None and record.in_transition

    def begin(self, decision):
        job_id = decision.job_id
        self.record(job_id, in_transition=True, target=decision.target, leased=False)
        self.since[job_id] = 0
        if decision.action is not Action.START:
            self.changes.setdefault(job_id, []).append(self.cluster.time)

    def record(self, job_id, **more):
        known = self.cluster.records[job_id]
        self.cluster.records[job_id] = dataclasses.replace(known, **more)

    def finish_changes(self):
        """Advance changes: a job leaves its GPUs in a round, and has its target in the next."""
        free = {n.name: n.free_gpus for n in self.cluster.snapshot().nodes}
        for job in list(self.cluster.jobs):
            if not self.moving(job.job_id):
                continue
            self.since[job.job_id] += 1
            target = self.cluster.records[job.job_id].target
            if self.since[job.job_id] == 1:
                self.hold(job, None)
            else:
                assert all(free[n] >= g for n, g in target.shares if target), "taken meanwhile"
                self.hold(job, target)
            if self.since[job.job_id] == 2 or target is None:
                past = tuple(self.changes.get(job.job_id, ()))
                self.record(
                    job.job_id,
                    in_transition=False,
                    target=None,
                    leased=target is None,
                    last_change=self.cluster.time,
                    changes=past,
                )

    def hold(self, job, target):
        at = self.cluster.jobs.index(job)
        self.cluster.jobs[at] = dataclasses.replace(
            job,
            allocation=target,
            state=JobState.RUNNING if target else JobState.PENDING,
            gpus=target.gpus if target else job.directive.min_gpus if job.directive else job.gpus,
            start_time=self.cluster.time if target else None,
            run=job.run + (target is None),
        )

    def slurm_starts(self):
        """Start pending jobs that are Slurm's, where even shares fit beside all reservations."""
        free = {n.name: n.free_gpus for n in self.cluster.snapshot().nodes}
        for record in self.cluster.records.values():
            for name, gpus in record.target.shares if record.target else ():
                free[name] -= gpus
        for job in sorted(self.cluster.jobs, key=lambda j: (-j.priority, j.submit_time)):
            ours = job.submission and self.config.controller.queue == "controller"
            if job.state is not JobState.PENDING or ours or self.moving(job.job_id):
                continue
            nodes, share = even_splits(job.gpus, 4)[0]
            for kind in ("a100", "v100"):
                homes = [
                    n.name
                    for n in self.cluster.nodes
                    if n.gpu_type == kind and free[n.name] >= share
                ][:nodes]
                if len(homes) == nodes:
                    self.hold(job, Allocation.of(kind, dict.fromkeys(homes, share)))
                    for name in homes:
                        free[name] -= share
                    break
        for job in self.cluster.jobs:
            if job.submission and job.state is JobState.RUNNING:
                self.record(job.job_id, proven=True, reporting=True)

    def check(self):
        for n in self.cluster.snapshot().nodes:
            assert n.used_gpus <= n.gpus
        for job in self.cluster.jobs:
            if job.submission and job.allocation:
                assert job.directive.allows(job.allocation.gpus, job.allocation.gpu_type)


@settings(max_examples=10)
@given(st.integers(0, 2**32), st.sampled_from(["slurm", "controller"]))
def test_hours_go_by(seed, queue):
    life = Life(seed, queue)
    life.run(80)
    hourly = life.config.resize.per_hour
    for times in life.changes.values():
        assert all(
            len([t for t in times if begin <= t < begin + 3600]) <= hourly for begin in times
        )
