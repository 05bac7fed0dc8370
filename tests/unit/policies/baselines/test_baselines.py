"""Published schedulers that do not choose sizes: their order and their state."""

import dataclasses
import json

import numpy as np
import pytest

from slurm_elastic.config.policy_settings import LasSettings
from slurm_elastic.config.schema import Config
from slurm_elastic.core.application import Application, JobClass, Learned, TypeProfile
from slurm_elastic.core.plan import Measurement
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.policies import policy_protocol
from slurm_elastic.policies.baselines.fifo import Fifo
from slurm_elastic.policies.baselines.gavel import Gavel, shares
from slurm_elastic.policies.baselines.las import LeastAttainedService
from slurm_elastic.policies.baselines.qssf import QuasiShortestService
from slurm_elastic.policies.baselines.rigid import requests
from slurm_elastic.policies.baselines.shockwave import Shockwave
from slurm_elastic.policies.baselines.srtf import ShortestRemaining
from slurm_elastic.policies.baselines.static import Static
from slurm_elastic.policies.baselines.themis import Themis
from slurm_elastic.policies.policy_protocol import Question
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node

EVERY = (
    *(Fifo, Static, LeastAttainedService, ShortestRemaining, Gavel, Themis, Shockwave),
    QuasiShortestService,
)


def two_types(a100=4, v100=4):
    """Cluster of nodes of 4 GPUs."""
    return Cluster(
        [node(f"a{i}", 4, "a100") for i in range(a100)]
        + [node(f"v{i}", 4, "v100") for i in range(v100)]
    )


def ask(policy, cluster, state=None, config=None, capacity=None):
    """Return first alternatives by job, and the new state, which must be JSON."""
    config = config or Config()
    snapshot = cluster.snapshot()
    total = {}
    for n in snapshot.nodes:
        total[n.gpu_type] = total.get(n.gpu_type, 0) + n.gpus
    question = Question(
        snapshot=snapshot,
        records=cluster.records,
        models={
            j: SpeedModel.fit(config.speedup, r.measurements) for j, r in cluster.records.items()
        },
        jobs=tuple(cluster.records),
        capacity=total if capacity is None else capacity,
    )
    proposals, after = policy(config).decide(question, state or {})
    assert {p.job_id for p in proposals} == set(cluster.records)
    for proposal in proposals:
        held = snapshot.job[proposal.job_id].allocation
        offered = [(a.gpu_type, a.gpus) for a in proposal.alternatives]
        assert ("", 0) in offered
        assert held is None or (held.gpu_type, held.gpus) in offered
        assert len(set(offered)) == len(offered)
    firsts = {p.job_id: p.alternatives[0] for p in proposals}
    used = {}
    for a in firsts.values():
        used[a.gpu_type] = used.get(a.gpu_type, 0) + a.gpus
    assert all(gpus <= question.capacity.get(kind, 0) for kind, gpus in used.items())
    return firsts, json.loads(json.dumps(dict(after)))


def shapes(policy, cluster, state=None, config=None, capacity=None):
    firsts, _ = ask(policy, cluster, state, config, capacity)
    return {j: (a.gpu_type, a.gpus) for j, a in firsts.items()}


def app(gpus, batch=64, **rates):
    """Application with the requested size and a rate on each type."""
    return Learned(
        Application(
            name="app",
            job_class=JobClass.RIGID,
            initial_batch=batch,
            max_batch=batch,
            batch=batch,
            gpus=gpus,
            types=tuple(TypeProfile(k, least=1, most=64, rate=r) for k, r in rates.items()),
        )
    )


def wants(gpus, **rates):
    return {"learned": app(gpus, **rates)}


WAITS = ("", 0)


@pytest.mark.parametrize("policy", EVERY)
def test_each_is_installed_and_its_proposals_are_binding(policy):
    names = {Fifo: "fifo", Static: "static", LeastAttainedService: "las"}
    names |= {QuasiShortestService: "qssf"}
    names |= {ShortestRemaining: "srtf", Gavel: "gavel", Themis: "themis", Shockwave: "shockwave"}
    controller = dataclasses.replace(Config().controller, policy=names[policy])
    if names[policy] not in policy_protocol.known():
        pytest.skip("needs the package installed again: make venv")
    loaded = policy_protocol.load(Config(controller=controller))
    assert type(loaded) is policy
    assert loaded.capabilities.binding_proposals


@pytest.mark.parametrize("policy", EVERY)
def test_without_jobs_nothing_is_proposed(policy):
    assert shapes(policy, two_types()) == {}


@pytest.mark.parametrize("policy", EVERY)
def test_the_requested_size_on_a_type_that_takes_it(policy):
    c = two_types()
    c.add(1, elastic="1-16", gpus=1, record=wants(6, a100=9.0))
    c.add(2, elastic="1-16", gpus=3, gpu_type="v100")
    c.add(3, elastic="4-8,types=v100", gpus=1)
    c.add(4, elastic="2-8,types=a100,unit=2", record=wants(5, a100=1.0))
    expected = {1: ("a100", 6), 2: ("v100", 3), 3: ("v100", 4), 4: ("a100", 4)}
    assert shapes(policy, c) == expected


@pytest.mark.parametrize("policy", EVERY)
def test_a_job_alone_keeps_what_it_has(policy):
    c = two_types()
    c.add(1, elastic="1-8", on={"v1": 4, "v2": 2})
    assert shapes(policy, c) == {1: ("v100", 6)}


@pytest.mark.parametrize("policy", EVERY)
def test_a_job_that_can_never_run_waits_and_blocks_no_other(policy):
    c = two_types(a100=1, v100=0)
    c.add(1, elastic="64", gpus=64)
    c.add(2, elastic="2,types=h100", gpus=2)
    c.add(3, elastic="2", gpus=2)
    firsts, _ = ask(policy, c)
    assert firsts[3].gpus == 2
    assert words(firsts[1].reason) == words(firsts[2].reason) == "no GPUs of this cluster suit it"


def test_order_of_arrival_outlives_a_requeue():
    c = two_types()
    c.add(1, elastic="1", gpus=1, submit_time=NOW)
    c.add(2, elastic="1", gpus=1, submit_time=NOW - 5)
    early = dataclasses.replace(c.jobs[0].submission, submitted=int(NOW) - 100)
    c.jobs[0] = dataclasses.replace(c.jobs[0], submission=early)
    question = Question(
        snapshot=c.snapshot(), records=c.records, models={}, jobs=(2, 1), capacity={}
    )
    assert [r.job.job_id for r in requests(question)] == [1, 2]


def test_fifo_lets_no_job_overtake():
    c = two_types(a100=2, v100=0)
    c.add(1, elastic="4", on={"a0": 4})
    c.add(2, elastic="8", gpus=8)
    c.add(3, elastic="1", gpus=1)
    firsts, _ = ask(Fifo, c)
    assert [firsts[j].gpus for j in (1, 2, 3)] == [4, 0, 0]
    assert words(firsts[2].reason) == "waits for 8 a100"
    assert words(firsts[3].reason) == "job 2 came first"


def test_fifo_takes_the_types_in_the_order_of_the_directive():
    c = two_types(a100=1, v100=1)
    c.add(1, elastic="4,types=v100:a100", gpus=4)
    c.add(2, elastic="4,types=v100:a100", gpus=4)
    assert shapes(Fifo, c) == {1: ("v100", 4), 2: ("a100", 4)}


def test_static_fills_gaps_without_delaying_the_first_job():
    c = two_types(a100=2, v100=0)
    c.add(1, elastic="5", on={"a0": 4, "a1": 1}, time_limit_s=6000, start_time=NOW - 5000)
    c.add(2, elastic="6", gpus=6, time_limit_s=9000)
    c.add(3, elastic="2", gpus=2, time_limit_s=9000)  # 2 are left beside job 2: it may
    c.add(4, elastic="1", gpus=1, time_limit_s=9000)  # would delay job 2
    c.add(5, elastic="1", gpus=1, time_limit_s=900)  # ends before job 2 can begin
    found = {j: a.gpus for j, a in ask(Static, c)[0].items()}
    assert found == {1: 5, 2: 0, 3: 2, 4: 0, 5: 1}
    c.jobs.pop()
    del c.records[5]
    assert words(ask(Static, c)[0][4].reason) == "would delay job 2"


def test_static_without_time_limits_lets_no_job_overtake_on_that_type():
    c = two_types(a100=1, v100=1)
    c.add(1, elastic="2", on={"a0": 2})
    c.add(2, elastic="4,types=a100", gpus=4)
    c.add(3, elastic="1,types=a100", gpus=1)
    c.add(4, elastic="1,types=v100", gpus=1)
    firsts, _ = ask(Static, c)
    assert [firsts[j].gpus for j in (2, 3, 4)] == [0, 0, 1]
    assert words(firsts[3].reason) == "would delay job 2"


def test_static_goes_by_slurm_s_priority():
    c = two_types(a100=1, v100=0)
    c.add(1, elastic="4", gpus=4, priority=1)
    c.add(2, elastic="4", gpus=4, priority=2)
    assert shapes(Static, c) == {1: WAITS, 2: ("a100", 4)}


def las(**changes):
    return Config(las=dataclasses.replace(LasSettings(), **changes))


def run(policy, cluster, config, *, seconds, state=None):
    """Advance some seconds; running jobs go on."""
    _, state = ask(policy, cluster, state, config)
    cluster.time += seconds
    return state


def test_las_moves_a_job_with_much_service_behind_new_ones():
    c = two_types(a100=1, v100=0)
    c.add(1, elastic="4", on={"a0": 4}, start_time=NOW)
    c.add(2, elastic="4", gpus=4, submit_time=NOW)
    config = las(queue_gpu_s=400)
    state = run(LeastAttainedService, c, config, seconds=99)
    assert shapes(LeastAttainedService, c, state, config) == {1: ("a100", 4), 2: WAITS}
    state = run(LeastAttainedService, c, config, seconds=1, state=state)
    firsts, state = ask(LeastAttainedService, c, state, config)
    assert {j: a.gpus for j, a in firsts.items()} == {1: 0, 2: 4}
    assert state["jobs"]["1@0"]["service"] == pytest.approx(400)
    assert words(firsts[1].reason) == "other jobs have had fewer GPU hours"


def test_las_in_one_queue_is_first_started_first_served():
    c = two_types(a100=1, v100=0)
    c.add(1, elastic="4", gpus=4, submit_time=NOW - 900)
    c.add(2, elastic="4", on={"a0": 4}, submit_time=NOW - 100, start_time=NOW - 50)
    assert shapes(LeastAttainedService, c) == {1: WAITS, 2: ("a100", 4)}


def test_las_promotes_a_starved_job():
    c = two_types(a100=1, v100=0)
    c.add(1, elastic="4", gpus=4, submit_time=NOW - 500)
    c.add(2, elastic="4", on={"a0": 4}, start_time=NOW)
    book = {"service": 900.0, "ran": 225.0, "waited": 400.0, "started": NOW - 800}
    state = {"time": NOW - 100, "jobs": {"1@0": book}}
    assert shapes(LeastAttainedService, c, state, las(queue_gpu_s=500))[1] == WAITS
    firsts, after = ask(LeastAttainedService, c, state, las(queue_gpu_s=500, promote=2.0))
    assert firsts[1].gpus == 4
    assert after["jobs"]["1@0"]["service"] == 0


def test_las_packs_a_job_that_loses_by_being_spread():
    spread = Measurement(gpu_type="a100", gpus=4, nodes=4, samples_per_s=10, steps=9)
    packed = Measurement(gpu_type="a100", gpus=4, nodes=2, samples_per_s=40, steps=9)
    c = Cluster([*(node(f"a{i}", 2, "a100") for i in range(4)), node("v0", 4, "v100")])
    c.add(1, elastic="4,types=a100:v100", gpus=4, record={"measurements": (packed, spread)})
    assert shapes(LeastAttainedService, c, config=las(pack_loss=0.9)) == {1: ("a100", 4)}
    assert shapes(LeastAttainedService, c) == {1: ("v100", 4)}


def test_srtf_goes_by_progress_and_preempts():
    c = two_types(a100=1, v100=0)
    c.add(1, elastic="4", on={"a0": 4}, start_time=NOW - 1000, record={"progress": 0.1})
    c.add(2, elastic="4", gpus=4, record={"progress": 0.9})
    state = {"time": NOW - 10, "ran": {"1@0": 990.0, "2@0": 900.0}}
    firsts, after = ask(ShortestRemaining, c, state)
    assert {j: a.gpus for j, a in firsts.items()} == {1: 0, 2: 4}
    assert after["ran"] == {"1@0": 1000.0, "2@0": 900.0}
    assert firsts[2].value == pytest.approx(-100)


def test_srtf_falls_back_to_time_limits_then_to_the_time_run():
    c = two_types(a100=3, v100=0)
    c.add(1, elastic="4", on={"a0": 4}, start_time=NOW - 500)
    c.add(2, elastic="4", on={"a1": 4}, start_time=NOW - 500, time_limit_s=800)
    c.add(3, elastic="4", gpus=4)
    values = {j: a.value for j, a in ask(ShortestRemaining, c)[0].items()}
    assert values == {1: -500, 2: -300, 3: 0}


def test_gavel_gives_equal_jobs_equal_shares_and_turns():
    c = two_types(a100=1, v100=0)
    for j in (1, 2):
        c.add(j, elastic="4", gpus=4, record=wants(4, a100=3.0))
    config = Config()
    state, turns = {}, []
    for _ in range(4):
        firsts, state = ask(Gavel, c, state, config)
        turns.append(next(j for j, a in firsts.items() if a.gpus))
        fresh = Cluster(c.nodes, time=c.time + 30)
        for j in (1, 2):
            on = {"a0": 4} if j == turns[-1] else None
            fresh.add(j, elastic="4", on=on, gpus=4, record=wants(4, a100=3.0), start_time=c.time)
        c = fresh
    assert turns[:2] == [1, 2]
    assert sorted(turns[2:]) == [1, 2]
    assert state["received"]["1@0"]["a100"] == pytest.approx(15 + 60, abs=30)


def test_gavel_puts_each_on_the_type_that_gives_most_in_all():
    c = two_types(a100=1, v100=1)
    c.add(1, elastic="4", gpus=4, record=wants(4, a100=10.0, v100=9.0))
    c.add(2, elastic="4", gpus=4, record=wants(4, a100=10.0, v100=2.0))
    assert shapes(Gavel, c) == {1: ("v100", 4), 2: ("a100", 4)}


def test_gavel_gives_left_over_gpus_to_those_without_a_share():
    c = two_types(a100=1, v100=0)
    c.add(1, elastic="3", gpus=3, record=wants(3, a100=90.0))
    c.add(2, elastic="1", gpus=1, record=wants(1, a100=0.001))
    c.add(3, elastic="1", gpus=1, record=wants(1, a100=50.0))
    firsts, _ = ask(Gavel, c)
    assert [firsts[j].gpus for j in (1, 2, 3)] == [3, 0, 1]
    firsts, _ = ask(Gavel, c, capacity={"a100": 2})
    assert [firsts[j].gpus for j in (1, 2, 3)] == [0, 1, 1]


def test_gavel_keeps_the_type_at_a_tie_unless_it_is_to_do_as_the_artifact():
    c = two_types(a100=2, v100=2)
    c.add(1, elastic="8", gpus=8, record=wants(8, a100=90.0))
    c.add(2, elastic="8", gpus=8, record=wants(8, v100=90.0))
    c.add(3, elastic="1", on={"v1": 1}, record=wants(1, a100=0.001, v100=0.001))
    c.nodes = [*c.nodes, node("a9", 1, "a100"), node("v9", 1, "v100")]
    capacity = {"a100": 9, "v100": 9}
    small = {1: ("a100", 8), 2: ("v100", 8)}
    assert shapes(Gavel, c, capacity=capacity) == small | {3: ("v100", 1)}
    compat = Config(sia=dataclasses.replace(Config().sia, artifact_compat=True))
    assert shapes(Gavel, c, config=compat, capacity=capacity) == small | {3: ("a100", 1)}


def test_gavel_counts_the_time_of_those_that_left():
    c = two_types(a100=1, v100=0)
    c.add(1, elastic="1", gpus=1, record=wants(1, a100=1.0))
    state = {
        "time": NOW - 60,
        "received": {"9@0": {"a100": 100.0}},
        "given": {"a100": 100.0},
        "taken": {"9@0": "a100"},
    }
    _, after = ask(Gavel, c, state)
    assert after["given"]["a100"] == pytest.approx(100 + 60 + 30)
    assert set(after["received"]) == {"1@0"}


def test_gavel_without_rates_believes_the_speed_model():
    c = two_types(a100=1, v100=1)
    config = Config(speedup=dataclasses.replace(Config().speedup, types={"a100": 3.0}))
    c.add(1, elastic="4", gpus=4)
    assert shapes(Gavel, c, config=config) == {1: ("a100", 4)}


def test_shares_of_time_are_the_linear_program_s():
    rates = np.array([[4.0, 1.0], [3.0, 2.0], [0.0, 5.0]])
    gpus = np.array([[2.0, 2.0], [2.0, 2.0], [1.0, 4.0]])
    x = shares(rates, gpus, np.array([2.0, 4.0]))
    assert x[2, 0] == 0
    assert x.sum(axis=1).max() <= 1 + 1e-6
    assert ((gpus * x).sum(axis=0) <= np.array([2.0, 4.0]) + 1e-6).all()
    assert (rates * x).sum() == pytest.approx(9.0, abs=1e-4)
    assert not shares(rates * 0, gpus, np.array([2.0, 4.0])).any()


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("seed", range(6))
def test_any_cluster_over_some_rounds(policy, seed):
    """`ask` checks capacity, alternatives and that the state is JSON."""
    rng = np.random.default_rng(seed)
    c = two_types(a100=3, v100=2)
    waiting, holds, state, next_id = {}, {}, {}, 1
    for _ in range(8):
        for _ in range(rng.integers(0, 5)):
            waiting[next_id] = int(rng.integers(1, 9))
            next_id += 1
        gone = {j for j in waiting if rng.random() < 0.1}
        waiting = {j: g for j, g in waiting.items() if j not in gone}
        c = Cluster(c.nodes, time=c.time + 60)
        free = {n.name: 4 for n in c.nodes}
        for j, gpus in waiting.items():
            kind, left, on = holds.get(j, ("", 0))[0], holds.get(j, ("", 0))[1], {}
            for name in [n.name for n in c.nodes if n.gpu_type == kind]:
                on[name] = min(left, free[name])
                left -= on[name]
                free[name] -= on[name]
            assert left == 0
            known = {"progress": rng.random()} if rng.random() < 0.5 else {}
            known |= wants(gpus, a100=3.0, v100=2.0) if rng.random() < 0.7 else {}
            on = {name: g for name, g in on.items() if g}
            c.add(j, elastic="1-12", on=on or None, gpus=gpus, record=known, submit_time=j)
        firsts, state = ask(policy, c, state)
        again, _ = ask(policy, c, state)
        assert set(firsts) == set(again)
        if policy in (Fifo, Static):
            assert all(
                (firsts[j].gpu_type, firsts[j].gpus) == h for j, h in holds.items() if j in firsts
            )
        for book in ("jobs", "ran", "received"):
            assert set(state.get(book, {})) <= {f"{j}@0" for j in waiting}
        holds = {j: (a.gpu_type, a.gpus) for j, a in firsts.items() if a.gpus}
