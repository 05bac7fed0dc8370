"""Properties of gangs by offers: whole, deterministic, without endless waits."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.placement.delay.free_map import FreeMap, NodeLayout
from slurm_elastic.placement.delay.timers import Timers
from slurm_elastic.policies.dally.gang import Gang
from slurm_elastic.simulator.gangs.gandiva import Gandiva
from slurm_elastic.simulator.gangs.gang_files import GangWorkload, SubmittedGang
from slurm_elastic.simulator.gangs.gang_policy import Offer
from slurm_elastic.simulator.gangs.gang_simulation import BATCH, CHECKPOINT_S, simulate_gangs
from slurm_elastic.simulator.gangs.own_dally import OwnDally
from slurm_elastic.simulator.gangs.published_dally import PublishedDally
from slurm_elastic.simulator.gangs.tiresias import Tiresias

LEASE = 600.0
SITES = NodeLayout.regular(racks=2, nodes=2, gpus=4, domains=2)
#: The longest timer, in leases: short, so that many gangs are due.
MOST = 2.0


class Distance:
    def part(self, model, gpus, span):
        return 1.0 if gpus == 1 else 1.0 / (1 + (span[0] - 1) * 3 + (span[1] - 1) * float(model))


def policies():
    return (
        OwnDally(Distance(), lease_s=LEASE),
        *(PublishedDally(Timers.parse(t, lease_s=LEASE)) for t in ("auto", "1,2", "nowait")),
        Tiresias(),
        Tiresias(published=True),
        Gandiva(),
    )


gangs = st.lists(
    st.tuples(
        st.integers(1, 12), st.sampled_from(("0", "0.01", "2")), st.floats(0, 1e5),
        st.floats(0, 0.99), st.floats(1, 1e5),
    ),
    max_size=12,
)  # fmt: skip


@given(gangs, st.lists(st.integers(0, 2), min_size=8, max_size=8), st.sampled_from(range(7)))
def test_gangs_are_whole_fit_and_decided_alike(drawn, free, index):
    policy, now = policies()[index], 1.2e5
    waiting = [
        Gang(
            job_id=i, model=model, gpus=gpus, arrival_s=since, since_s=since, ideal_s=ran,
            done=done, ran_s=ran * done, service_gpu_s=gpus * ran * done,
        )
        for i, (gpus, model, since, done, ran) in enumerate(drawn)
    ]  # fmt: skip
    waiting.sort(key=policy.rank)
    offer = Offer(now_s=now, waiting=waiting, room=FreeMap(SITES, free))
    answer = policy.decide(offer, {})
    room = FreeMap(SITES, free)
    for grant in answer.grants:
        room.take(grant.place)
        assert sum(g for _, g in grant.place) == waiting_gpus(waiting, grant.job_id)
    assert len({g.job_id for g in answer.grants}) == len(answer.grants)
    assert offer.room.free == free, "the offer is not the policy's to change"
    again = policies()[index].decide(offer, {})
    assert (again.grants, again.state) == (answer.grants, answer.state)


def waiting_gpus(waiting, job_id):
    return next(g.gpus for g in waiting if g.job_id == job_id)


@given(st.floats(0, 50), st.floats(0, 50), st.integers(0, 60), st.integers(0, 60))
def test_timers_are_monotone(node, more, earlier, later):
    """A place accepted after some wait is accepted after any longer one."""
    timers = Timers.parse(f"{node},{node + more}", lease_s=LEASE)
    policy = PublishedDally(timers)
    took = []
    for leases in sorted((earlier, later)):
        gang = Gang(job_id=1, model="2", gpus=2, arrival_s=0, since_s=0, ideal_s=1e4)
        offer = Offer(
            now_s=leases * LEASE, waiting=[gang], room=FreeMap(SITES, [1, 0, 0, 0, 1, 0, 0, 0])
        )
        took.append(len(policy.decide(offer, {}).grants))
    assert took == sorted(took)
    node_s, rack_s = timers.limits_s(2, {})
    assert node_s <= rack_s


rows = st.lists(
    st.tuples(
        st.integers(1, 16), st.sampled_from(("0", "0.01", "2")), st.floats(0, 3e4),
        st.floats(0.01, 0.3), st.integers(1, 400),
    ),
    min_size=1, max_size=25,
)  # fmt: skip


class Watched(OwnDally):
    """Policy that records for each grant the gang's wait, and the number of gangs before it."""

    def __init__(self, *words, **more):
        super().__init__(*words, **more)
        self.waits = []
        self.ahead = {}

    def decide(self, offer, state):
        for gang in offer.waiting:
            due = gang.since_s + MOST * LEASE
            before = sum((g.since_s, g.job_id) < (gang.since_s, gang.job_id) for g in offer.waiting)
            # While nothing is free no gang is asked: then the first time stands for the due one,
            # as no gang has started since.
            if offer.now_s <= due or (gang.job_id, gang.since_s) not in self.ahead:
                self.ahead[gang.job_id, gang.since_s] = before
        answer = super().decide(offer, state)
        given = {g.job_id for g in answer.grants}
        for gang in offer.waiting:
            if gang.job_id in given:
                waited = offer.now_s - gang.since_s
                self.waits.append((waited, self.ahead[gang.job_id, gang.since_s]))
        return answer


@settings(max_examples=30)
@given(rows)
def test_the_longest_wait_is_bounded(drawn):
    workload = GangWorkload(
        "drawn",
        tuple(
            SubmittedGang(
                job_id=i, arrival_s=at, model=model, iterations=batches * BATCH * gpus,
                iteration_s=step, gpus=gpus,
            )
            for i, (gpus, model, at, step, batches) in enumerate(drawn)
        ),
    )  # fmt: skip
    policy = Watched(Distance(), lease_s=LEASE, most=MOST)
    result = simulate_gangs(workload, SITES, Distance(), policy, name="own", lease_s=LEASE)
    worst = 1 / min(Distance().part(m, 16, (2, 4, 8)) for m in ("0", "0.01", "2"))
    longest = max(step for _, _, _, step, _ in drawn) * BATCH * worst
    restart = CHECKPOINT_S * max(gpus for gpus, *_ in drawn)
    for waited, ahead in policy.waits:
        bound = MOST * LEASE + (ahead + 1) * (LEASE + longest + restart)
        assert waited <= bound
    for job in result.jobs:
        assert math.isclose(
            job.jct_s, job.queue_s + job.run_s + job.restart_s, rel_tol=1e-9, abs_tol=1e-6
        )
        assert job.compute_s <= job.run_s + 1e-6
