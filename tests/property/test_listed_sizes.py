"""No decision leaves the sizes that a directive lists, or takes a shape that is excluded."""

import dataclasses
import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_elastic.config.placement_settings import PlacementSettings
from slurm_elastic.config.schema import Config, ControllerSettings, LimitSettings, ResizeSettings
from slurm_elastic.core.plan import Measurement
from slurm_elastic.core.submission import Submission
from slurm_elastic.policies.policy_protocol import capabilities_of, load
from slurm_elastic.round import decide_round
from tests.support.decisions.cluster_strategies import random_cluster
from tests.support.decisions.synthetic_clusters import Cluster, node

POLICIES = (
    *("fair", "sia", "goodput", "dally", "elastic_batch", "icefrog"),
    *("static", "fifo", "las", "srtf", "qssf", "gavel", "ones"),
)
CASES = (st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**32))


class Watched:
    """Policy whose proposals are checked: legal shapes, or the one that the job holds."""

    def __init__(self, policy):
        self._policy = policy
        self.capabilities = capabilities_of(policy)

    def decide(self, question, state):
        proposals, state = self._policy.decide(question, state)
        for proposal in proposals:
            job = question.snapshot.job[proposal.job_id]
            held = job.allocation and (job.allocation.gpu_type, job.allocation.gpus)
            for shape in ((a.gpu_type, a.gpus) for a in proposal.alternatives if a.gpus):
                assert shape == held or job.directive.allows(shape[1], shape[0]), (shape, job)
        return proposals, state


def random_config(rng, name):
    free = ResizeSettings(min_interval_s=0.0, per_hour=1000, min_gain=0.0, restart_s=0.0)
    return Config(
        controller=ControllerSettings(policy=name, queue=rng.choice(["slurm", "controller"])),
        resize=rng.choice([ResizeSettings(), free, free]),
        placement=PlacementSettings(mode=rng.choice(["near", "near", "delay"])),
        limits=rng.choice(
            [
                LimitSettings(),
                LimitSettings(share=0.3),
                LimitSettings(user_share=0.2, resizes_per_user=2),
                LimitSettings(resizes=1),
            ]
        ),
    )


def with_listed_sizes(cluster, rng):
    """Give most elastic jobs a list of sizes, some also excluded shapes."""
    for i, job in enumerate(cluster.jobs):
        if job.submission is None:
            continue
        directive = job.submission.directive
        legal = list(range(directive.min_gpus, directive.max_gpus + 1, directive.unit or 1))
        if rng.random() < 0.8:
            listed = rng.sample(legal, rng.randint(1, len(legal)))
            if job.allocation and rng.random() < 0.7 and job.allocation.gpus in legal:
                listed = list({*listed, job.allocation.gpus})
            directive = dataclasses.replace(directive, listed=tuple(listed))
        if rng.random() < 0.5:
            sizes = rng.sample(legal, rng.randint(1, len(legal)))
            directive = directive.excluding((rng.choice(["", "a100", "v100"]), s) for s in sizes)
        submission = dataclasses.replace(job.submission, directive=directive)
        gpus = job.gpus if job.allocation else directive.min_gpus
        cluster.jobs[i] = dataclasses.replace(job, submission=submission, gpus=gpus)


@pytest.mark.parametrize("at_once", [False, True], ids=["live", "at once"])
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(*CASES)
@example(6, 5, 14086)  # a gang with uneven shares, more than its directive allows
def test_no_decision_leaves_the_listed_sizes(name, at_once, nodes, jobs, seed):
    rng = random.Random(seed)
    config = random_config(rng, name)
    cluster = random_cluster(nodes, jobs, seed, transitions=False)
    with_listed_sizes(cluster, rng)
    policy, state, plan = Watched(load(config)), {}, None
    for _ in range(3):
        snapshot = cluster.snapshot()
        plan, state = decide_round(
            snapshot,
            cluster.records,
            config=config,
            policy=policy,
            state=json.loads(json.dumps(state)),
            previous=plan,
            seed=seed,
            at_once=at_once,
        )
        for decision in plan.decisions:
            target, current = decision.target, decision.current
            directive = snapshot.job[decision.job_id].directive
            if target is not None and target != current:
                assert directive.allows(target.gpus, target.gpu_type), (name, decision)
        cluster.carry_out(plan)
        with_shapes_barred(cluster, rng)
        cluster.time += 700.0


def with_shapes_barred(cluster, rng):
    """Exclude a shape of some jobs, as after a change that failed."""
    for i, job in enumerate(cluster.jobs):
        if job.submission is not None and rng.random() < 0.3:
            shapes = [("", rng.randint(1, 16))]
            if job.allocation is not None:
                shapes = [(job.allocation.gpu_type, job.allocation.gpus)]
            directive = job.submission.directive.excluding(shapes)
            submission = dataclasses.replace(job.submission, directive=directive)
            cluster.jobs[i] = dataclasses.replace(job, submission=submission)


@pytest.mark.parametrize("name", ["fair", "sia", "goodput", "elastic_batch", "icefrog"])
@pytest.mark.parametrize(
    ("elastic", "start", "end"),
    [
        ("1-8,sizes=1:4:8", 1, 8),
        ("3-12,sizes=3:6:12", 3, 12),
        ("2-16,sizes=2:12", 2, 12),
        ("2-16,sizes=2:16,unit=a100:2", 2, 16),
    ],
)
def test_a_job_grows_over_the_gaps(name, elastic, start, end):
    config = Config(
        controller=ControllerSettings(policy=name, queue="controller"),
        resize=ResizeSettings(min_interval_s=0.0, per_hour=1000, restart_s=1.0),
    )
    cluster = Cluster([node("n1"), node("n2"), node("n3"), node("n4")])
    cluster.add(1, elastic=elastic, on={"n1": start}, record={"checkpoint_s": 1.0})
    policy, state, plan, sizes = load(config), {}, None, [start]
    for _ in range(6):
        held = cluster.jobs[0].allocation
        measurement = Measurement(
            gpu_type="a100", gpus=held.gpus, nodes=len(held.nodes), samples_per_s=held.gpus, steps=9
        )
        cluster.records[1] = dataclasses.replace(cluster.records[1], measurements=(measurement,))
        plan, state = decide_round(
            cluster.snapshot(), cluster.records, config=config, policy=policy, state=state,
            previous=plan,
        )  # fmt: skip
        cluster.carry_out(plan)
        cluster.time += 700.0
        sizes.append(cluster.jobs[0].allocation.gpus)
    assert sizes[-1] == end
    directive = cluster.jobs[0].directive
    assert all(directive.allows(gpus, "a100") for gpus in sizes)


@pytest.mark.parametrize("name", ["fair", "sia", "goodput", "elastic_batch", "icefrog"])
def test_a_job_grows_past_an_excluded_size(name):
    config = Config(
        controller=ControllerSettings(policy=name, queue="controller"),
        resize=ResizeSettings(min_interval_s=0.0, per_hour=1000, restart_s=1.0),
    )
    cluster = Cluster([node("n1")])
    cluster.add(1, elastic="1-4", on={"n1": 1})
    barred = cluster.jobs[0].submission.directive.excluding([("a100", 2)])
    job = dataclasses.replace(cluster.jobs[0], submission=Submission(barred))
    cluster.jobs[0] = job
    measurement = Measurement(gpu_type="a100", gpus=1, nodes=1, samples_per_s=1.0, steps=9)
    cluster.records[1] = dataclasses.replace(cluster.records[1], measurements=(measurement,))
    policy, state, plan = load(config), {}, None
    for _ in range(3):
        plan, state = decide_round(
            cluster.snapshot(), cluster.records, config=config, policy=policy, state=state,
            previous=plan,
        )  # fmt: skip
        cluster.carry_out(plan)
        cluster.time += 700.0
    assert cluster.jobs[0].allocation.gpus in (3, 4)
