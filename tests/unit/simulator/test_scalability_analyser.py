"""Jobs that begin with observations, and batches and drops that a policy decides."""

from dataclasses import replace

from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.core.plan import Alternative, Proposal
from slurm_elastic.policies.policy_protocol import Capabilities
from slurm_elastic.simulator import simulation
from slurm_elastic.simulator.applications import describe
from slurm_elastic.simulator.scalability_analyser import add_observations
from slurm_elastic.simulator.simulated_job import SimulatedJob
from slurm_elastic.simulator.truth.ground_truth import GroundTruth
from slurm_elastic.simulator.workloads import cluster_text
from slurm_elastic.simulator.workloads.workload import SubmittedJob, Workload
from tests.support.decisions.reasons import told
from tests.support.decisions.synthetic_applications import synthetic_application

CLUSTER = cluster_text.parse("t4:2x4,a100:1x8")
PROFILES = {"net": synthetic_application("net", seconds=600.0, restart_s=20.0)}


class Scripted:
    """Four t4 for every job from time 0 on, with a batch by time; turns some away."""

    capabilities = Capabilities(binding_proposals=True, batch_chosen_by="policy")

    def __init__(self, *batches, gone=()):
        self.batches, self.gone = batches, gone
        self.seen = []

    def decide(self, question, state):
        now = question.snapshot.time
        batch = max((at, b or 0) for at, b in self.batches if at <= now)[1] or None
        proposals = []
        for job_id in question.jobs:
            self.seen.append(question.records[job_id].learned)
            wish = Alternative(
                gpu_type="t4", gpus=4, value=1.0, reason=told("told so"), batch=batch
            )
            if question.snapshot.job[job_id].name in self.gone:
                wish = Alternative(gpu_type="", gpus=0, value=0.0, reason=told("no"), dropped=True)
            proposals.append(Proposal(job_id=job_id, alternatives=(wish,)))
        return tuple(proposals), state


def jobs(*names, **fields):
    return [
        SubmittedJob(name=n, time_s=0.0, application="net", gpus=1, batch=16, **fields)
        for n in names
    ]


def run(policy, *names):
    config = Config(controller=ControllerSettings(policy="scripted"))
    workload = Workload.of("w", jobs(*names))
    return simulation.simulate(workload, PROFILES, CLUSTER, config=config, policy=policy)


def test_the_analyser_tells_what_is_true():
    truth = GroundTruth(PROFILES["net"])
    (submitted,) = jobs("a")
    job = SimulatedJob(
        submitted, truth, describe(submitted, truth, CLUSTER), job_id=1, restart_s=20.0
    )
    add_observations([job], CLUSTER)
    observations = job.learned.observations
    assert {(o.gpu_type, o.nodes, o.gpus) for o in observations} == {
        ("t4", 1, 1), ("t4", 1, 2), ("t4", 1, 4), ("t4", 2, 8),
        ("a100", 1, 1), ("a100", 1, 2), ("a100", 1, 4), ("a100", 1, 8),
    }  # fmt: skip
    for o in observations:
        shape = (o.gpus // o.nodes,) * o.nodes
        assert (o.step_s, o.micro_step_s) == truth.iteration(o.gpu_type, shape, o.micro_batch)
    assert {o.micro_batch for o in observations if o.gpus == 1} == {4, 8, 16, 32}
    assert job.noise is None


def test_only_a_policy_that_asks_for_it_gets_measured_jobs():
    plain, asks = Scripted((0, 64)), Scripted((0, 64))
    asks.capabilities = replace(asks.capabilities, initial_measurements=True)
    run(plain, "a")
    run(asks, "a")
    assert plain.seen[0].observations == ()
    assert len(asks.seen[0].observations) == 32


def test_a_batch_reaches_the_job_without_a_restart():
    policy = Scripted((0, 16), (120, 128))
    (result,) = run(policy, "a").jobs
    assert result.restarts == 0
    micro = [o.micro_batch for o in policy.seen[-1].observations]
    assert micro == [4, 32]
    (slow,) = run(Scripted((0, 16)), "a").jobs
    assert result.completion_s < slow.completion_s
    # Without an order it chooses for itself, and with none any more it keeps what it had.
    (free,) = run(Scripted((0, None)), "a").jobs
    assert free.completion_s < slow.completion_s
    (unordered,) = run(Scripted((0, 16), (120, None)), "a").jobs
    assert unordered == slow


def test_who_is_turned_away_is_counted_apart():
    result = run(Scripted((0, 64), gone=("b",)), "a", "b")
    assert [j.name for j in result.jobs] == ["a"]
    assert result.dropped == ("b",)
    assert (result.summary()["jobs"], result.summary()["dropped"]) == (1, 1)
    assert "dropped" not in run(Scripted((0, 64)), "a", "b").summary()
