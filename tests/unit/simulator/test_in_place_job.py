"""Simulated jobs that are changed without a requeue."""

import pytest

from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import Alternative, Proposal
from slurm_elastic.core.resize_kind import ResizeKind
from slurm_elastic.policies.policy_protocol import Capabilities, load
from slurm_elastic.simulator import simulation
from slurm_elastic.simulator.applications import describe
from slurm_elastic.simulator.cluster_state import SimulatedCluster
from slurm_elastic.simulator.in_place_job import InPlaceJob
from slurm_elastic.simulator.truth.ground_truth import GroundTruth
from slurm_elastic.simulator.truth.resize_costs import ResizeCosts
from slurm_elastic.simulator.workloads import cluster_text
from slurm_elastic.simulator.workloads.workload import SubmittedJob, Workload
from tests.support.decisions.reasons import told
from tests.support.decisions.synthetic_applications import synthetic_application

CLUSTER = cluster_text.parse("t4:3x4,a100:1x8")
PROFILE = synthetic_application("net", seconds=600.0, restart_s=20.0)
COSTS = ResizeCosts(parameters={"net": 100e6})
PAUSE_S = 0.605


def t4(*gpus):
    """GPUs on each of the first nodes of type t4."""
    return Allocation.of("t4", {f"t4-{i:04d}": g for i, g in enumerate(gpus, start=1)})


def job(costs=COSTS, **more):
    truth = GroundTruth(PROFILE)
    submitted = SubmittedJob(name="net-0", time_s=0.0, application="net", gpus=1, batch=16, **more)
    described = describe(submitted, truth, CLUSTER)
    return InPlaceJob(submitted, truth, described, job_id=1, restart_s=20.0, resizes=costs)


def trained(seconds, *holds, costs=COSTS):
    """Return a job after allocations at these times."""
    one = job(costs)
    for at_s, allocation in holds:
        one.advance(at_s)
        one.hold(allocation)
    one.advance(seconds)
    return one


def test_it_trains_on_with_its_old_gpus_until_new_ranks_are_ready():
    one = trained(100.0, (0.0, t4(2)), (100.0, t4(4)))
    assert (one.shape, one.gpus, one.changing) == ((2,), 4, True)
    before = one.progress
    one.advance(119.0)
    alone = trained(119.0, (0.0, t4(2)), (100.0, t4(2)))
    assert one.progress == pytest.approx(alone.progress)
    assert one.progress > before
    # the pause begins with the new ranks
    one.advance(120.0)
    assert (one.shape, one.changing) == ((4,), True)
    still = one.progress
    one.advance(120.0 + PAUSE_S)
    assert one.progress == pytest.approx(still)
    assert not one.changing
    one.advance(121.0)
    assert one.progress > still
    assert (one.restarts, one.changes_in_place) == (0, 1)


def test_gpus_without_ranks_yet_are_held_and_lost():
    one = trained(121.0, (0.0, t4(2)), (100.0, t4(4)))
    assert one.gpu_s == pytest.approx(100 * 2 + 21 * 4)
    assert one.lost_gpu_s == pytest.approx(20 * 2 + 20 * 2 + PAUSE_S * 4)


def test_companions_leave_at_once_and_without_a_pause():
    one = trained(200.0, (0.0, t4(1)), (50.0, t4(2)), (100.0, t4(4)), (150.0, t4(4, 4)))
    assert [c.allocation for c in one.companions] == [t4(1), t4(2), t4(0, 4)]
    assert len({c.job_id for c in one.companions}) == 3
    before = one.progress
    one.hold(t4(2))
    assert (one.shape, one.changing, one.gpus) == ((2,), False, 2)
    one.advance(201.0)
    assert one.progress > before
    assert one.restarts == 0
    assert one.changes_in_place == 4


@pytest.mark.parametrize(
    "target",
    [t4(1), t4(0, 4), t4(3), Allocation.of("a100", {"a100-0001": 2})],
    ids=["less than its base", "other nodes", "a part of a companion", "another type"],
)
def test_everything_else_is_a_requeue(target):
    one = trained(100.0, (0.0, t4(2)), (50.0, t4(4)))
    one.hold(target)
    assert (one.restarts, one.changes_in_place) == (1, 1)
    assert one.companions == ()
    assert (one.gpu_type, one.restart_left_s) == (target.gpu_type, 20.0)
    assert one.shape == tuple(g for _, g in target.shares)


def test_a_requeue_during_a_change_in_place_ends_it():
    one = trained(105.0, (0.0, t4(2)), (100.0, t4(4)))
    one.hold(t4(0, 2))
    assert (one.restarts, one.restart_left_s, one.shape) == (1, 20.0, (2,))
    one.advance(126.0)
    assert (one.shape, one.changing) == ((2,), False)


def test_a_job_that_waits_has_no_companions():
    one = trained(130.0, (0.0, t4(2)), (100.0, t4(4)), (110.0, None))
    assert (one.companions, one.changing, one.gpus) == ((), False, 0)
    one.hold(t4(4))
    assert (one.companions, one.restarts, one.restart_left_s) == ((), 1, 20.0)


def test_where_only_ranks_restart_the_new_gpus_are_there_at_once():
    costs = ResizeCosts(cheapest=ResizeKind.RESTART)
    one = trained(100.0, (0.0, t4(2)), (100.0, t4(2, 4)), costs=costs)
    assert (one.shape, one.restarts, one.restart_left_s) == ((2, 4), 1, 16.5)
    one.hold(t4(2, 4, 1))
    assert [c.allocation for c in one.companions] == [t4(0, 4), t4(0, 0, 1)]
    assert len({c.job_id for c in one.companions}) == 2


def test_where_only_ranks_restart_growth_within_a_node_is_a_requeue():
    costs = ResizeCosts(cheapest=ResizeKind.RESTART)
    one = trained(100.0, (0.0, t4(2)), (100.0, t4(4)), costs=costs)
    assert (one.restarts, one.restart_left_s, one.companions) == (1, 20.0, ())


def test_a_job_may_end_before_new_ranks_are_ready():
    one = job(ResizeCosts(join_s=1e6))
    one.hold(t4(2))
    one.advance(100.0)
    one.hold(t4(4))
    one.advance(1e6)
    alone = trained(1e6, (0.0, t4(2)), (100.0, t4(2)))
    assert one.completion_s == alone.completion_s
    assert one.changes_in_place == 1


def test_what_rounds_read_of_it():
    cluster = SimulatedCluster(CLUSTER, measure=False)
    one = trained(110.0, (0.0, t4(2)), (100.0, t4(4)))
    snapshot, record = cluster.snapshot(110.0, [one]), cluster.records([one])[1]
    assert snapshot.job[1].base_allocation == t4(2)
    assert snapshot.job[1].start_time == 0.0
    assert snapshot.job[1].run == 0
    assert (record.in_place, record.pause_s) == (True, pytest.approx(PAUSE_S))
    assert (record.in_transition, record.target, record.last_change) == (True, t4(4), 100.0)
    assert (record.resizes, record.resizes_in_place) == (1, 1)
    one.advance(200.0)
    assert not cluster.records([one])[1].in_transition


# --- whole simulations ------------------------------------------------------------------------


class Scripted:
    """Gives the only job what a table says from a time on."""

    capabilities = Capabilities(binding_proposals=True)

    def __init__(self, *steps):
        self.steps = steps

    def decide(self, question, state):
        _, kind, gpus = max(s for s in self.steps if s[0] <= question.snapshot.time)
        wish = Alternative(gpu_type=kind, gpus=gpus, value=1.0, reason=told("told so"))
        return tuple(Proposal(job_id=j, alternatives=(wish,)) for j in question.jobs), state


def run(*jobs, policy, name="scripted", **more):
    config = Config(controller=ControllerSettings(policy=name, queue="controller"))
    return simulation.simulate(
        Workload.of("w", jobs),
        {"net": PROFILE},
        CLUSTER,
        config=config,
        policy=policy or load(config),
        **more,
    )


def submitted(name="net-0", time_s=0.0):
    return SubmittedJob(name=name, time_s=time_s, application="net", gpus=1, batch=16)


@pytest.mark.parametrize("clock", ["round", "event"])
def test_growing_in_place_loses_less_than_restarts(clock):
    policy = Scripted((0, "t4", 1), (120, "t4", 2), (240, "t4", 4))
    (requeued,) = run(submitted(), policy=policy, clock=clock).jobs
    (grown,) = run(submitted(), policy=policy, clock=clock, resizes=COSTS).jobs
    assert (requeued.restarts, requeued.changes_in_place) == (2, 0)
    assert (grown.restarts, grown.changes_in_place) == (0, 2)
    assert grown.completion_s < requeued.completion_s


def test_with_sia_most_restarts_become_changes_in_place():
    jobs = [submitted(f"net-{i}", 200.0 * i) for i in range(6)]
    without = run(*jobs, policy=None, name="sia", moves_restart=True).summary()
    with_it = run(*jobs, policy=None, name="sia", resizes=COSTS).summary()
    assert without["in_place_per_job"] == 0
    assert with_it["in_place_per_job"] > with_it["restarts_per_job"]
    assert with_it["restarts_per_job"] < without["restarts_per_job"]


def test_a_move_in_the_same_shape_may_be_a_restart():
    class Moved(Scripted):
        def decide(self, question, state):
            node = "t4-0001" if question.snapshot.time < 200 else "t4-0002"
            wish = Alternative(
                gpu_type="t4", gpus=1, value=1.0, reason=told("told so"), shares=((node, 1),)
            )
            return tuple(Proposal(job_id=j, alternatives=(wish,)) for j in question.jobs), state

    assert run(submitted(), policy=Moved()).jobs[0].restarts == 0
    assert run(submitted(), policy=Moved(), moves_restart=True).jobs[0].restarts == 1
    assert run(submitted(), policy=Moved(), resizes=COSTS).jobs[0].restarts == 1
