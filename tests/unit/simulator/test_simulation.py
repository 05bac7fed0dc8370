"""Whole simulations: clocks, restarts, allocations, and figures."""

import csv
import io
import itertools
import math

import pytest

from slurm_elastic.config.schema import Config, ControllerSettings, ResizeSettings
from slurm_elastic.core.application import JobClass, Learned
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import Alternative, Proposal
from slurm_elastic.models.goodput import GoodputModel
from slurm_elastic.policies.policy_protocol import Capabilities, load
from slurm_elastic.simulator import results, simulation
from slurm_elastic.simulator.applications import describe, whole_nodes
from slurm_elastic.simulator.simulated_job import SimulatedJob
from slurm_elastic.simulator.simulation import SimulationError
from slurm_elastic.simulator.truth.ground_truth import GroundTruth
from slurm_elastic.simulator.truth.restart_costs import RestartCosts
from slurm_elastic.simulator.workloads import cluster_text
from slurm_elastic.simulator.workloads.workload import SubmittedJob, Workload, WorkloadError
from tests.support.decisions.reasons import told
from tests.support.decisions.synthetic_applications import synthetic_application

CLUSTER = "t4:2x4,a100:1x8"
PROFILES = {"net": synthetic_application("net", seconds=600.0, restart_s=20.0)}


class Scripted:
    """Gives each job what a table says from a time on."""

    capabilities = Capabilities(binding_proposals=True)

    def __init__(self, **script):
        self.script = script
        self.asked = []

    def decide(self, question, state):
        now = question.snapshot.time
        self.asked.append((now, question))
        proposals = []
        for job_id in question.jobs:
            name = question.snapshot.job[job_id].name
            steps = self.script.get(name, [(0, "t4", 1)])
            _, kind, gpus = max(s for s in steps if s[0] <= now)
            wish = Alternative(gpu_type=kind, gpus=gpus, value=1.0, reason=told("told so"))
            proposals.append(Proposal(job_id=job_id, alternatives=(wish,)))
        return tuple(proposals), {"rounds": state.get("rounds", 0) + 1}


def job(name="net-0", time_s=0.0, gpus=1, batch=16, **more):
    return SubmittedJob(name=name, time_s=time_s, application="net", gpus=gpus, batch=batch, **more)


def run(*jobs, policy=None, cluster=CLUSTER, **more):
    config = more.pop("config", Config(controller=ControllerSettings(policy="scripted")))
    workload = Workload.of("w", jobs)
    return simulation.simulate(
        workload,
        more.pop("profiles", PROFILES),
        cluster_text.parse(cluster),
        config=config,
        policy=policy or Scripted(),
        **more,
    )


# --- clocks -----------------------------------------------------------------------------------


def test_a_job_waits_for_the_next_multiple_of_the_interval():
    result = run(job(time_s=61.5), policy=Scripted())
    (job_result,) = result.jobs
    assert job_result.start_s == 120.0
    assert job_result.jct_s == job_result.completion_s - 61.5
    assert job_result.restarts == 0
    assert job_result.lost_gpu_s == 20.0
    assert job_result.gpu_s == job_result.completion_s - 120.0


def test_a_job_of_the_first_instant_waits_for_the_first_round():
    assert run(job(time_s=0.0)).jobs[0].start_s == 60.0


def test_the_event_clock_acts_at_once():
    policy = Scripted()
    result = run(job(time_s=61.5), job("net-1", 100.0), policy=policy, clock="event")
    first, second = result.jobs
    assert (first.start_s, second.start_s) == (61.5, 100.0)
    times = [t for t, _ in policy.asked]
    # Arrivals and ends of restarts; then nothing is waited for longer than the interval.
    assert times[:4] == [61.5, 81.5, 100.0, 120.0]
    assert all(b - a <= 60.0 + 1e-9 for a, b in itertools.pairwise(times))
    ends = {r.time_s for r in result.rounds}
    assert {first.completion_s, second.completion_s} <= ends


def test_epochs_last_whole_seconds():
    (job_result,) = run(job(time_s=0.0)).jobs
    assert job_result.completion_s == int(job_result.completion_s)


def test_nothing_happens_while_nobody_is_there():
    policy = Scripted()
    result = run(job(), job("net-1", time_s=1e6), policy=policy)
    assert len(result.rounds) < 50
    assert result.jobs[1].start_s == 1e6 + (-1e6) % 60


def test_intervals_that_cannot_be():
    with pytest.raises(
        SimulationError, match="--interval 0 is invalid: expected seconds from 1 on"
    ):
        run(job(), interval_s=0.0)


# --- restarts and moves -----------------------------------------------------------------------


def test_changes_of_type_and_shape_cost_a_restart_and_moves_do_not():
    script = {"net-0": [(0, "t4", 1), (300, "t4", 2), (400, "a100", 2)]}
    result = run(job(), policy=Scripted(**script))
    (job_result,) = result.jobs
    assert job_result.restarts == 2
    assert job_result.lost_gpu_s == 20 * 1 + 20 * 2 + 20 * 2
    assert [(s.gpu_type, s.shape) for s in result.segments] == [
        ("t4", (1,)),
        ("t4", (2,)),
        ("a100", (2,)),
    ]


def test_a_restarting_job_is_left_alone():
    script = {"net-0": [(0, "t4", 1), (120, "t4", 2), (180, "t4", 4)]}
    slow = RestartCosts({"net": 100.0})
    policy = Scripted(**script)
    result = run(job(), policy=policy, restarts=slow)
    assert [(s.begin_s, s.gpus) for s in result.segments][:2] == [(60.0, 1), (180.0, 4)]
    assert [q.jobs for t, q in policy.asked if t == 120.0] == [()]


def test_suspension_is_free_and_the_resume_pays():
    script = {"net-0": [(0, "t4", 1), (120, "", 0), (240, "t4", 1)]}
    (job_result,) = run(job(), policy=Scripted(**script)).jobs
    assert job_result.restarts == 1
    assert job_result.lost_gpu_s == 40.0


def test_jobs_make_room_for_whole_nodes_without_a_restart():
    script = {
        "net-0": [(0, "t4", 2)],
        "net-1": [(0, "t4", 4), (180, "t4", 2)],
        "net-2": [(0, "t4", 4)],
    }
    policy = Scripted(**script)
    result = run(job(), job("net-1"), job("net-2", 130.0), policy=policy, cluster="t4:2x4")
    third = next(j for j in result.jobs if j.name == "net-2")
    assert third.start_s == 180.0
    assert [s.shape for s in result.segments if s.job == "net-2"] == [(4,)]
    assert [j.restarts for j in result.jobs] == [0, 1, 0]


def test_starts_use_gpus_given_up_in_the_same_round():
    script = {"net-0": [(0, "t4", 8), (180, "t4", 4)], "net-1": [(0, "t4", 4)]}
    result = run(job(), job("net-1", 121.0), policy=Scripted(**script), cluster="t4:2x4")
    assert result.jobs[1].start_s == 180.0


def test_odd_sizes_are_scattered_when_they_must():
    script = {"net-0": [(0, "t4", 3)], "net-1": [(0, "t4", 3)], "net-2": [(0, "t4", 2)]}
    result = run(job(), job("net-1"), job("net-2"), policy=Scripted(**script), cluster="t4:2x4")
    shapes = {s.job: s.shape for s in result.segments}
    assert shapes["net-2"] == (1, 1)


def test_policies_that_never_start_anybody_are_told():
    class Idle(Scripted):
        def decide(self, question, state):
            wait = Alternative(gpu_type="", gpus=0, value=0.0)
            return tuple(Proposal(job_id=j, alternatives=(wait,)) for j in question.jobs), state

    with pytest.raises(SimulationError, match="net-0 was given no GPU for 1000 rounds"):
        run(job(), policy=Idle())


# --- what jobs are ----------------------------------------------------------------------------


def described(job_class, *, gpus=6, batch=64, cluster=CLUSTER, **more):
    submitted = job(gpus=gpus, batch=batch, job_class=job_class, **more)
    return describe(submitted, GroundTruth(PROFILES["net"]), cluster_text.parse(cluster))


def test_directives_by_class():
    assert str(described(JobClass.ADAPTIVE).directive) == "1-8"
    assert str(described(JobClass.STRONG_SCALING).directive) == "1-6"
    assert str(described(JobClass.RIGID).directive) == "6"
    assert str(described(JobClass.ADAPTIVE, most=3).directive) == "1-3"
    assert str(described(JobClass.ADAPTIVE, cluster="t4:1x4,k80:9x4").directive) == "1-4,types=t4"


def test_directives_with_listed_sizes():
    assert str(described(JobClass.ADAPTIVE, listed=(1, 2, 4, 16)).directive) == "1-4,sizes=1:2:4"
    assert str(described(JobClass.STRONG_SCALING, listed=(2, 3, 7)).directive) == "2-3,sizes=2:3"
    assert str(described(JobClass.RIGID, listed=(3, 6)).directive) == "6,sizes=6"
    with pytest.raises(WorkloadError, match="net-0: none of sizes 2:3 is within 6, the GPUs"):
        described(JobClass.RIGID, listed=(2, 3))


@pytest.mark.parametrize("name", ["fair", "sia", "dally", "elastic_batch", "icefrog", "las"])
def test_simulated_jobs_keep_to_their_sizes(name):
    config = Config(controller=ControllerSettings(policy=name, queue="controller"))
    jobs = [job(f"net-{i}", time_s=30.0 * i, gpus=4, listed=(1, 4, 6)) for i in range(4)]
    result = run(*jobs, policy=load(config), config=config)
    held = {segment.gpus for segment in result.segments}
    assert held
    assert held <= {1, 4, 6}


def test_applications_state_what_is_known():
    application = described(JobClass.RIGID).application
    assert (application.initial_batch, application.max_batch, application.batch) == (16, 256, 64)
    t4, a100 = application.types
    assert (t4.least, t4.most) == (4, 32)
    assert a100.single == pytest.approx(2 * t4.single)
    assert a100.rate > t4.rate > 0


def test_jobs_that_can_never_run_are_refused():
    with pytest.raises(WorkloadError, match=r"w.csv:3: net-0 \(rigid, 9 GPUs\) can never run on"):
        run(job(gpus=9, job_class=JobClass.RIGID, source="w.csv:3"))
    with pytest.raises(WorkloadError, match="application net of net-0 has no profile; known: o"):
        run(job(), profiles={"other": PROFILES["net"]})


def test_a_class_may_be_forced():
    result = run(
        job(gpus=2), policy=Scripted(**{"net-0": [(0, "t4", 2)]}), job_class=JobClass.RIGID
    )
    assert result.jobs[0].job_class == "rigid"


def test_whole_nodes_first():
    assert whole_nodes(10, 4) == (2, 4, 4)
    assert whole_nodes(8, 4) == (4, 4)


# --- one job's training -----------------------------------------------------------------------


def simulated(**more):
    truth = GroundTruth(PROFILES["net"])
    submitted = job(**more)
    simulated_job = SimulatedJob(
        submitted,
        truth,
        describe(submitted, truth, cluster_text.parse(CLUSTER)),
        job_id=1,
        restart_s=20.0,
    )
    simulated_job.hold(Allocation.of("t4", {"t4-0001": 4}))
    return simulated_job


def test_its_batch_is_the_models_best():
    simulated_job = simulated()
    assert (simulated_job.micro_batch, simulated_job.accumulation) == (4, 0)
    for until in (30.0, 60.0, 90.0):
        simulated_job.advance(until)
        model = GoodputModel.of(simulated_job.learned)
        _, micro, steps = model.best("t4", 1, 4, max_batch=256, most=32)
        assert (simulated_job.micro_batch, simulated_job.accumulation) == (int(micro), int(steps))


def test_knowledge_is_the_same_object_until_something_new_is_learned():
    simulated_job = simulated(job_class=JobClass.RIGID, gpus=4, batch=64)
    assert simulated_job.learned == Learned(simulated_job.described.application)
    simulated_job.advance(30.0)
    learned = simulated_job.learned
    assert len(learned.observations) == 1
    simulated_job.advance(31.0)
    assert simulated_job.learned is learned


def test_a_copy_goes_its_own_way():
    simulated_job = simulated()
    simulated_job.advance(30.0)
    ahead = simulated_job.copy()
    ahead.advance(1e5)
    assert ahead.completion_s is not None
    assert simulated_job.completion_s is None
    assert simulated_job.now_s == 30.0
    assert len(simulated_job.observations) < len(ahead.observations)


# --- policies whose proposals placement judges -------------------------------------------------


def test_the_sites_rules_bind_other_policies():
    class Hesitant(Scripted):
        capabilities = Capabilities()

    script = {"net-0": [(0, "t4", 1), (120, "t4", 4)]}
    config = Config(resize=ResizeSettings(min_interval_s=200.0))
    result = run(job(), policy=Hesitant(**script), config=config)
    assert [(s.begin_s, s.gpus) for s in result.segments][:2] == [(60.0, 1), (300.0, 4)]


# --- figures ----------------------------------------------------------------------------------


def test_figures_of_known_jobs():
    def one(name, begin, end, **more):
        fields = {"start_s": begin, "restarts": 1, "gpu_s": 7200.0, "lost_gpu_s": 360.0}
        return results.JobResult(
            name=name,
            application="net",
            job_class="adaptive",
            submission_s=begin,
            completion_s=end,
            jct_s=end - begin,
            contention=2.0,
            **(fields | more),
        )

    jobs = (one("a", 0.0, 3600.0, rho=0.5), one("b", 1800.0, 9000.0, rho=1.5))
    result = results.Result(
        workload="w",
        policy="p",
        cluster="t4:1x4",
        gpus=(("t4", 4),),
        jobs=jobs,
        rounds=(
            results.RoundResult(60.0, 3, (("t4", 4),)),
            results.RoundResult(90.0, 2, (("t4", 4),)),
            results.RoundResult(180.0, 0, ()),
        ),
        segments=(),
        policy_s=(0.001, 0.003),
        cpu_s=0.5,
    )
    figures = result.summary()
    expected = {
        "avg_jct_h": 1.5,
        "p50_jct_h": 2.0,
        "p99_jct_h": 2.0,
        "makespan_h": 2.5,
        "gpu_h_per_job": 2.0,
        "gpu_h_lost_per_job": 0.1,
        "restarts_per_job": 1.0,
        "contention_mean": 2.25,
        "contention_max": 3,
        "rho_mean": 1.0,
        "rho_max": 1.5,
        "unfair_fraction": 0.5,
        "utilisation": 0.4,
        "policy_ms_p95": 3.0,
        "cpu_s": 0.5,
    }
    assert {k: figures[k] for k in expected} == pytest.approx(expected)
    both = results.summary((result, result))
    assert both["avg_jct_h"] == 1.5
    assert both["cpu_s"] == 1.0
    rows = list(csv.DictReader(io.StringIO(results.jobs_csv((result,)))))
    assert [(r["workload"], r["policy"], r["name"], r["jct_s"]) for r in rows] == [
        ("w", "p", "a", "3600"),
        ("w", "p", "b", "7200"),
    ]


def test_nothing_has_no_figures():
    assert math.isnan(results.summary(())["avg_jct_h"])


def test_fairness_compares_with_a_share_of_ones_own():
    alone = run(job(), policy=Scripted(**{"net-0": [(0, "a100", 8)]})).jobs[0]
    contended = run(*(job(f"net-{i}") for i in range(8)), policy=Scripted()).jobs
    assert alone.rho > 0.5
    assert min(j.rho for j in contended) > 1.0
    assert math.isfinite(max(j.rho for j in contended))


def test_progress_is_told():
    reports = []
    run(job(), progress=lambda *at: reports.append(at))
    assert reports[-1][:2] == (1, 1)
