"""Properties of the policies pollux, themis and shockwave, and of what they search."""

import json

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.core.application import JobClass
from slurm_elastic.policies.baselines.genetic_search import PlacementProblem, search
from slurm_elastic.policies.baselines.pollux import Pollux
from slurm_elastic.policies.baselines.shockwave import Shockwave
from slurm_elastic.policies.baselines.themis import Themis
from slurm_elastic.simulator import simulation
from slurm_elastic.simulator.workloads import cluster_text
from slurm_elastic.simulator.workloads.workload import SubmittedJob, Workload
from tests.support.decisions.synthetic_applications import synthetic_application

PROFILES = {
    "short": synthetic_application("short", seconds=300.0, restart_s=10.0),
    "long": synthetic_application("long", seconds=3000.0, restart_s=70.0),
}
MACHINES = ("t4:3x4,a100:2x8", "t4:2x4", "a100:2x8")
NAMES = {Pollux: "pollux", Themis: "themis", Shockwave: "shockwave"}


def problem(seed, jobs, nodes):
    rng = np.random.default_rng(seed)
    capacity = rng.integers(1, 5, size=nodes)
    width = int(capacity.sum())
    most = rng.integers(1, max(width, 1) + 1, size=jobs)
    speedup = np.cumsum(rng.uniform(0.0, 1.0, size=(jobs, 2, max(width, 1) + 1)), axis=2)
    speedup[:, :, 0] = 0.0
    present = np.zeros((jobs, nodes), dtype=np.int64)
    for node in range(min(jobs, nodes)):
        present[node, node] = rng.integers(0, min(capacity[node], most[node]) + 1)
    return PlacementProblem(
        capacity=capacity,
        speedup=speedup,
        least=rng.integers(1, most + 1),
        most=most,
        present=present,
        factor=rng.uniform(0.2, 1.0, size=jobs),
    )


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(0, 8), st.integers(0, 6))
def test_the_search_fits_and_is_never_worse_than_the_present(seed, jobs, nodes):
    asked = problem(seed, jobs, nodes)
    found = search(asked, seed=seed, population=12, generations=6)
    assert found.shape == (jobs, nodes)
    assert (found >= 0).all()
    assert (found.sum(axis=0) <= asked.capacity).all()
    assert (found.sum(axis=1) <= asked.most).all()
    distributed = ((found > 0).sum(axis=1) > 1)[:, None] & (found > 0)
    assert (distributed.sum(axis=0) <= 1).all()
    if jobs and nodes:
        values = asked.fitness(np.stack([found, asked.present]))
        assert values[0] >= values[1] - 1e-12
    again = search(asked, seed=seed, population=12, generations=6)
    assert (again == found).all()


class Checked:
    """Policy whose proposals are checked: within the capacity, legal, and with JSON as state."""

    def __init__(self, policy):
        self.policy = policy
        self.capabilities = policy.capabilities

    def decide(self, question, state):
        proposals, after = self.policy.decide(question, state)
        assert {p.job_id for p in proposals} == set(question.jobs)
        used = {}
        for proposal in proposals:
            job = question.snapshot.job[proposal.job_id]
            held = (job.allocation.gpu_type, job.allocation.gpus) if job.allocation else None
            offered = [(a.gpu_type, a.gpus) for a in proposal.alternatives]
            assert len(set(offered)) == len(offered)
            assert ("", 0) in offered
            assert held is None or held in offered
            kind, gpus = offered[0]
            used[kind] = used.get(kind, 0) + gpus
            legal = not gpus or job.directive.allows(gpus, kind) or offered[0] == held
            assert legal, (offered[0], str(job.directive))
        assert all(used[k] <= question.capacity.get(k, 0) for k in used if k)
        return proposals, json.loads(json.dumps(dict(after)))


@st.composite
def workloads(draw):
    """Draw up to six jobs of two applications and all classes."""
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 900),
                st.sampled_from(sorted(PROFILES)),
                st.sampled_from([1, 2, 3, 4, 8]),
                st.sampled_from([16, 64, 256]),
                st.sampled_from(list(JobClass)),
            ),
            min_size=1,
            max_size=6,
        )
    )
    jobs = [
        SubmittedJob(
            name=f"{application}-{i}",
            time_s=float(time_s),
            application=application,
            gpus=gpus,
            batch=batch,
            job_class=job_class,
        )
        for i, (time_s, application, gpus, batch, job_class) in enumerate(rows)
    ]
    return Workload.of("tiny", jobs)


#: Its batch gives eight GPUs two samples each, fewer than the models of all types together expect.
SMALL_BATCH = SubmittedJob(
    name="long-0",
    time_s=82.0,
    application="long",
    gpus=8,
    batch=16,
    job_class=JobClass.RIGID,
)


@pytest.mark.parametrize("policy", NAMES)
# A simulation takes long to shrink.
@settings(max_examples=8, phases=(Phase.explicit, Phase.generate))
@given(workloads(), st.sampled_from(MACHINES), st.integers(0, 2**31))
@example(Workload.of("tiny", [SMALL_BATCH]), "a100:2x8", 1)
def test_every_job_of_a_workload_ends(policy, jobs, machines, seed):
    config = Config(controller=ControllerSettings(policy=NAMES[policy]))
    result = simulation.simulate(
        jobs,
        PROFILES,
        cluster_text.parse(machines),
        config=config,
        policy=Checked(policy(config)),
        interval_s=120.0,
        seed=seed,
    )
    assert len(result.jobs) == len(jobs.jobs)
    assert all(j.rho > 0 for j in result.jobs)
