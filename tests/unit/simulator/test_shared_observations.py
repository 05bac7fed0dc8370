"""Sharing of measurements between simulated jobs of an application."""

import dataclasses

import pytest

from slurm_elastic.config.policy_settings import SiaSettings
from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.core.plan import Alternative, Proposal
from slurm_elastic.policies.policy_protocol import Capabilities
from slurm_elastic.simulator import simulation
from slurm_elastic.simulator.workloads import cluster_text
from slurm_elastic.simulator.workloads.workload import SubmittedJob, Workload
from tests.support.decisions.reasons import told
from tests.support.decisions.synthetic_applications import synthetic_application

NET = synthetic_application("net", seconds=600.0, restart_s=20.0)


class OneGpu:
    """Gives each job one GPU, and keeps the records that it was shown."""

    def __init__(self, *, pools):
        self.capabilities = Capabilities(
            binding_proposals=True, shares_measurements=pools, residual_models=pools
        )
        self.learned = {}

    def decide(self, question, state):
        for job_id in question.jobs:
            name = question.snapshot.job[job_id].name
            self.learned.setdefault(name, []).append(question.records[job_id].learned)
        best = Alternative(gpu_type="t4", gpus=1, value=1.0, reason=told("told so"))
        return tuple(Proposal(job_id=j, alternatives=(best,)) for j in question.jobs), state


def run(policy, *, share=False, applications=("net", "net")):
    jobs = [
        SubmittedJob(name=f"net-{i}", time_s=180.0 * i, application=application, gpus=1, batch=16)
        for i, application in enumerate(applications)
    ]
    simulation.simulate(
        Workload.of("w", jobs),
        {name: dataclasses.replace(NET, name=name) for name in applications},
        cluster_text.parse("t4:1x4"),
        config=Config(
            controller=ControllerSettings(policy="scripted"), sia=SiaSettings(share=share)
        ),
        policy=policy,
    )
    return policy.learned


@pytest.mark.parametrize(("pools", "share"), [(True, False), (False, True), (False, False)])
def test_a_new_job_begins_with_the_measurements_of_its_application_where_that_is_asked_for(
    pools, share
):
    learned = run(OneGpu(pools=pools), share=share)
    begins = learned["net-1"][0]
    assert bool(begins.observations) is (pools or share)
    assert (begins.noise is not None) is (pools or share)
    assert begins.residuals is pools
    if pools:
        assert set(begins.observations) <= set(learned["net-0"][-1].observations)


def test_its_noise_is_that_of_the_first_epoch():
    learned = run(OneGpu(pools=True))
    shown = [known.noise for known in learned["net-0"] if known.noise is not None]
    assert learned["net-1"][0].noise == shown[0]


def test_jobs_whose_profiles_are_their_own_share_by_the_name_of_the_application():
    learned = run(OneGpu(pools=True), applications=("net#0", "net#1"))
    assert learned["net-1"][0].observations
    learned = run(OneGpu(pools=True), applications=("net", "other"))
    assert not learned["net-1"][0].observations


def test_a_running_job_gets_what_its_application_learned_meanwhile():
    class Grows(OneGpu):
        def decide(self, question, state):
            proposals, state = super().decide(question, state)
            larger = Alternative(gpu_type="t4", gpus=2, value=1.0, reason=told("told so"))
            return tuple(
                Proposal(job_id=p.job_id, alternatives=(larger,))
                if question.snapshot.job[p.job_id].name == "net-1"
                else p
                for p in proposals
            ), state

    learned = run(Grows(pools=True), applications=("net", "net", "net"))
    assert max(o.gpus for o in learned["net-0"][-1].observations) == 2
