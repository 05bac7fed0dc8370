"""Pollux, Themis and Shockwave, as far as their published rules go."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from benchmarks.policies import rivals
from slurm_elastic.config.schema import Config
from slurm_elastic.core.application import (
    Application,
    JobClass,
    Learned,
    Noise,
    Observation,
    TypeProfile,
)
from slurm_elastic.core.cluster import Allocation, Companion
from slurm_elastic.core.directive import Directive
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.policies.baselines import shockwave
from slurm_elastic.policies.baselines.finish_time import account
from slurm_elastic.policies.baselines.genetic_search import PlacementProblem, search
from slurm_elastic.policies.baselines.pollux import Pollux, type_blind
from slurm_elastic.policies.baselines.rigid import requests
from slurm_elastic.policies.baselines.shockwave import Shockwave, plan_window
from slurm_elastic.policies.baselines.themis import LEASE_S, Themis
from slurm_elastic.policies.policy_protocol import Question
from slurm_elastic.simulator.workloads import workload
from tests.support import published_data
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node


def question(cluster, capacity=None, seed=0):
    snapshot = cluster.snapshot()
    total = {}
    for n in snapshot.nodes:
        total[n.gpu_type] = total.get(n.gpu_type, 0) + n.gpus
    return Question(
        snapshot=snapshot,
        records=cluster.records,
        models={
            j: SpeedModel.fit(Config().speedup, r.measurements) for j, r in cluster.records.items()
        },
        jobs=tuple(cluster.records),
        capacity=total if capacity is None else capacity,
        seed=seed,
    )


def ask(policy, cluster, state=None, capacity=None):
    """Return first alternatives by job, and the state, which must be JSON."""
    proposals, after = policy.decide(question(cluster, capacity), state or {})
    firsts = {p.job_id: p.alternatives[0] for p in proposals}
    return firsts, json.loads(json.dumps(dict(after)))


def rigid(gpus, **rates):
    types = tuple(TypeProfile(k, least=1, most=64, rate=r) for k, r in rates.items())
    application = Application(
        name="app",
        job_class=JobClass.RIGID,
        initial_batch=64,
        max_batch=64,
        batch=64,
        gpus=gpus,
        types=types,
    )
    return {"learned": Learned(application)}


def adaptive(*shapes, types=("a100", "v100")):
    """Job measured on these (type, GPUs), each sample as fast, without loss."""
    application = Application(
        name="net",
        initial_batch=32,
        max_batch=4096,
        batch=32,
        types=tuple(TypeProfile(t, least=8, most=64, single=100.0) for t in types),
    )
    observations = tuple(
        Observation(kind, -(-gpus // 4), gpus, 32, 0.33, 0.32) for kind, gpus in shapes
    )
    return {"learned": Learned(application, observations, Noise(1.0, 4000.0))}


def one_type(nodes=2, each=4):
    return Cluster([node(f"a{i}", each, "a100") for i in range(nodes)])


# --- Pollux ---


def test_pollux_gives_a_new_job_one_gpu():
    c = one_type()
    c.add(1, elastic="1-8", gpus=1, record=adaptive())
    firsts, _ = ask(Pollux(Config()), c)
    assert (firsts[1].gpu_type, firsts[1].gpus) == ("a100", 1)


def test_pollux_at_most_doubles_what_was_measured():
    c = one_type()
    c.add(1, elastic="1-8", on={"a0": 2}, record=adaptive(("a100", 1), ("a100", 2)))
    firsts, _ = ask(Pollux(Config()), c)
    assert firsts[1].gpus == 4
    assert words(firsts[1].reason) == "the search gave it 4 a100; its fair share is 4"


def test_pollux_divides_between_equal_jobs():
    c = one_type()
    shapes = [("a100", g) for g in (1, 2, 4, 8)]
    for j in (1, 2):
        c.add(j, elastic="1-8", gpus=1, submit_time=NOW - 9000, record=adaptive(*shapes))
    firsts, _ = ask(Pollux(Config()), c)
    assert sorted(firsts[j].gpus for j in (1, 2)) == [4, 4]


def test_pollux_moves_no_young_job_for_a_small_gain():
    c = one_type(nodes=1)
    shapes = [("a100", g) for g in (1, 2, 4)]
    record = adaptive(*shapes) | {"resizes": 3, "restart_s": 60.0, "checkpoint_s": 0.0}
    c.add(1, elastic="1-4", on={"a0": 3}, submit_time=NOW - 200, record=record)
    firsts, _ = ask(Pollux(Config()), c)
    assert firsts[1].gpus == 3
    c.jobs[0] = dataclasses.replace(
        c.jobs[0],
        submit_time=NOW - 90_000,
        submission=dataclasses.replace(c.jobs[0].submission, submitted=int(NOW) - 90_000),
    )
    assert ask(Pollux(Config()), c)[0][1].gpus == 4


def test_pollux_changes_in_place_what_is_not_worth_a_requeue():
    shapes = [("a100", g) for g in (1, 2, 3)]
    record = adaptive(*shapes) | {"restart_s": 60.0, "checkpoint_s": 0.0, "pause_s": 0.1}
    record |= {"resizes": 3}
    part = Companion(9, Allocation.of("a100", {"a0": 1}))

    def proposed(age, **more):
        c = one_type(nodes=1)
        c.add(1, elastic="1-4", on={"a0": 3}, submit_time=NOW - age, companions=(part,),
              record=record | more)  # fmt: skip
        (proposal,), _ = Pollux(Config()).decide(question(c), {})
        return [(a.gpus, a.in_place) for a in proposal.alternatives if a.gpus]

    assert proposed(200) == [(3, False)]
    assert proposed(200, in_place=True) == [(4, True), (3, False)]
    # Where a requeue pays, too, it is the second choice; past changes count with their own seconds.
    both = [(4, True), (4, False), (3, False)]
    assert proposed(90_000, in_place=True) == both
    assert proposed(200, in_place=True, resizes_in_place=3) == both


def test_pollux_knows_no_types_and_keeps_one_of_a_mixed_allocation():
    c = Cluster([node("a0", 2, "a100"), node("v0", 4, "v100")])
    shapes = [("a100", 1), ("v100", 2), ("v100", 4)]
    c.add(1, elastic="1-6", gpus=1, submit_time=NOW - 9000, record=adaptive(*shapes))
    firsts, _ = ask(Pollux(Config()), c)
    # No job gets more than the smallest type has.
    assert firsts[1].gpus <= 2
    blind = type_blind(c.records[1].learned)
    assert [(o.gpu_type, o.gpus) for o in blind.observations] == [
        ("any", 1), ("any", 2), ("any", 4),
    ]  # fmt: skip
    assert [t.gpu_type for t in blind.application.types] == ["any"]


def test_pollux_learns_of_a_pipeline_only_shapes_that_it_could_have_on_every_type():
    learned = adaptive(("a100", 2), ("a100", 4), ("v100", 8))["learned"]
    profiles = tuple(
        TypeProfile(t.gpu_type, least=8, most=64, unit=unit)
        for t, unit in zip(learned.application.types, (2, 4), strict=True)
    )
    application = dataclasses.replace(learned.application, types=profiles)
    blind = type_blind(dataclasses.replace(learned, application=application))
    assert blind.application.types[0].unit == 4
    assert [o.gpus for o in blind.observations] == [4, 8]


def test_pollux_leaves_a_job_more_gpus_than_the_smallest_type_has():
    c = Cluster([node("a0", 8, "a100"), node("v0", 2, "v100")])
    record = adaptive(("a100", 1), ("a100", 4), ("a100", 8)) | {"resizes": 3, "restart_s": 60.0}
    c.add(1, elastic="1-8", on={"a0": 6}, submit_time=NOW - 200, record=record)
    firsts, _ = ask(Pollux(Config()), c)
    assert firsts[1].gpus == 6
    # But no more than its directive allows by now.
    submission = dataclasses.replace(c.jobs[0].submission, directive=Directive.parse("1-3"))
    c.jobs[0] = dataclasses.replace(c.jobs[0], submission=submission)
    assert ask(Pollux(Config()), c)[0][1].gpus <= 3


def test_pollux_gives_a_job_the_fewest_gpus_that_it_runs_on_though_the_smallest_type_has_less():
    c = Cluster([node("v1", 2, "v100"), *(node(f"a{i}", 8) for i in range(2))])
    c.add(1, elastic="8", gpus=8)
    policy, state = Pollux(Config()), {}
    chosen = []
    for seed in range(20):  # a mixed allocation leaves it waiting
        proposals, state = policy.decide(question(c, seed=seed), state)
        chosen.append(proposals[0].alternatives[0])
    assert {(a.gpu_type, a.gpus) for a in chosen if a.gpus} == {("a100", 8)}


def test_pollux_leaves_gpus_alone_that_others_hold():
    c = one_type()
    shapes = [("a100", g) for g in (1, 2, 4, 8)]
    c.add(1, elastic="1-8", gpus=1, record=adaptive(*shapes))
    firsts, _ = ask(Pollux(Config()), c, capacity={"a100": 3})
    assert 1 <= firsts[1].gpus <= 3


@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_what_trying_everything_finds(seed):
    rng = np.random.default_rng(seed)
    capacity = np.array([2, 2])
    concave = np.cumsum(-np.sort(-rng.uniform(0.1, 1.0, size=(2, 2, 4)), axis=2), axis=2)
    speedup = np.concatenate([np.zeros((2, 2, 1)), concave], axis=2)
    problem = PlacementProblem(
        capacity=capacity,
        speedup=speedup,
        least=np.array([1, 1]),
        most=np.array([4, 4]),
        present=np.zeros((2, 2), dtype=np.int64),
        factor=np.ones(2),
    )
    found = search(problem, seed=seed)
    best = max(
        float(problem.fitness(np.array([[[a, b], [c, d]]]))[0])
        for a, b, c, d in itertools.product(range(3), repeat=4)
        if a + c <= 2 and b + d <= 2 and not (a and b and c and d)
    )
    assert float(problem.fitness(found[None])[0]) == pytest.approx(best)


# --- Themis ---


def test_themis_keeps_a_lease_then_gives_way():
    c = one_type(nodes=1)
    c.add(1, elastic="4", gpus=4, submit_time=NOW, record=rigid(4, a100=1.0))
    policy = Themis(Config())
    _, state = ask(policy, c)
    assert state["leases"] == {"1@0": NOW + LEASE_S}

    def later(seconds):
        now = Cluster(c.nodes, time=NOW + seconds)
        known = rigid(4, a100=1.0) | {"progress": 0.5}
        now.add(1, elastic="4", on={"a0": 4}, submit_time=NOW, start_time=NOW, record=known)
        now.add(2, elastic="4", gpus=4, submit_time=NOW + 10, record=rigid(4, a100=1.0))
        return ask(policy, now, state)

    firsts, _ = later(LEASE_S - 1)
    assert (firsts[1].gpus, firsts[2].gpus) == (4, 0)
    assert words(firsts[1].reason) == "its lease lasts 1 s more"
    assert words(firsts[2].reason) == "others are further from their fair finish time"
    firsts, after = later(LEASE_S)
    assert (firsts[1].gpus, firsts[2].gpus) == (0, 4)
    assert words(firsts[2].reason) == "new: nothing is known of its finish"
    assert after["leases"] == {"2@0": NOW + 2 * LEASE_S}


def test_themis_prefers_the_job_that_is_further_from_its_fair_finish():
    c = one_type(nodes=1)
    # Both did 100 s of 1,000; job 2 waited ten times as long.
    for j, age in ((1, 500.0), (2, 5000.0)):
        known = rigid(4, a100=1.0) | {"progress": 0.1}
        c.add(j, elastic="4", gpus=4, submit_time=NOW - age, record=known)
    state = {"time": NOW - 60, "jobs": {f"{j}@0": [100.0, 0.0, 0.0] for j in (1, 2)}}
    firsts, _ = ask(Themis(Config()), c, state)
    assert (firsts[1].gpus, firsts[2].gpus) == (0, 4)
    assert words(firsts[2].reason).startswith("won the auction; its finish-time fairness is ")


def test_themis_bids_with_the_cost_of_a_change_in_place():
    def won(**more):
        c = Cluster([node("a0", 4, "a100"), node("v0", 4, "v100")])
        known = rigid(4, a100=0.9, v100=1.0) | {"progress": 0.5, "restart_s": 300.0} | more
        c.add(1, elastic="2-4", on={"a0": 2}, submit_time=NOW - 1000, record=known)
        state = {"time": NOW, "jobs": {"1@0": [500.0, 0.0, 0.0]}}
        firsts, _ = ask(Themis(Config()), c, state)
        return firsts[1].gpu_type, firsts[1].gpus

    assert won() == ("v100", 4)
    assert won(in_place=True, pause_s=0.1) == ("a100", 4)


def test_themis_leaves_no_gpus_idle():
    c = one_type(nodes=1)
    for j in range(1, 5):
        known = rigid(1, a100=1.0) | {"progress": 0.5}
        c.add(j, elastic="1", gpus=1, submit_time=NOW - 100, record=known)
    firsts, _ = ask(Themis(Config()), c)
    assert [a.gpus for a in firsts.values()] == [1, 1, 1, 1]


def test_estimates_of_finish_times():
    c = Cluster([node("a0", 4, "a100"), node("v0", 4, "v100")])
    known = rigid(4, a100=2.0, v100=1.0) | {"progress": 0.25}
    c.add(1, elastic="4", on={"v0": 4}, submit_time=NOW - 600, start_time=NOW - 400, record=known)
    asked = question(c)
    (estimate,), state = account(asked, {}, requests(asked))
    assert estimate.speeds == {("a100", 4): 1.0, ("v100", 4): 0.5}
    # 400 s at half speed were a quarter of it.
    assert estimate.total_s == pytest.approx(800)
    assert estimate.left_s == pytest.approx(600)
    # Alone it has all 8 GPUs, and runs on either type.
    assert estimate.alone_s == pytest.approx(800 * 1.5)
    assert estimate.rho(("a100", 4)) == pytest.approx((600 + 600) / 1200)
    assert estimate.rho(("v100", 4)) == pytest.approx((600 + 1200) / 1200)
    assert estimate.rho(None, wait_s=1200) == pytest.approx((600 + 1200 + 600) / 1200)
    assert state["jobs"] == {"1@0": [200.0, 0.0, 0.0]}


def test_contention_counts_from_round_to_round():
    c = one_type(nodes=1)
    for j in (1, 2):
        c.add(j, elastic="4", gpus=4, record=rigid(4, a100=1.0))
    asked = question(c)
    _, state = account(asked, {}, requests(asked))
    c.time = NOW + 60
    asked = question(c)
    estimates, _ = account(asked, state, requests(asked))
    assert [e.share for e in estimates] == [2.0, 2.0]


# --- Shockwave ---


def test_shockwave_runs_the_job_that_has_waited_longest_for_its_work():
    c = one_type(nodes=1)
    for j, age in ((1, 200.0), (2, 20000.0)):
        known = rigid(4, a100=1.0) | {"progress": 0.1}
        c.add(j, elastic="4", gpus=4, submit_time=NOW - age, record=known)
    state = {"time": NOW - 60, "jobs": {f"{j}@0": [500.0, 0.0, 0.0] for j in (1, 2)}}
    firsts, _ = ask(Shockwave(Config()), c, state)
    assert (firsts[1].gpus, firsts[2].gpus) == (0, 4)
    assert words(firsts[2].reason).endswith("of the next 20 rounds, and there is room")
    assert words(firsts[1].reason) == "other jobs have their turn in this round"


def test_shockwave_leaves_no_gpus_idle():
    c = one_type(nodes=1)
    for j in range(1, 5):
        c.add(j, elastic="1", gpus=1, record=rigid(1, a100=1.0))
    firsts, _ = ask(Shockwave(Config()), c)
    assert [a.gpus for a in firsts.values()] == [1, 1, 1, 1]


def test_the_window_s_plan_fits_and_serves_short_and_long_jobs():
    c = one_type(nodes=1)
    for j in (1, 2, 3):
        known = rigid(4, a100=1.0) | {"progress": 0.1 * j}
        c.add(j, elastic="4", gpus=4, submit_time=NOW - 100, record=known)
    asked = question(c)
    state = {"time": NOW, "jobs": {f"{j}@0": [300.0 * j, 0.0, 0.0] for j in (1, 2, 3)}}
    estimates, _ = account(asked, state, requests(asked))
    planned = plan_window(estimates, [1.0, 1.0, 1.0], {"a100": 4})
    rounds = [sum(p.values()) for p in planned]
    assert sum(rounds) == pytest.approx(shockwave.ROUNDS, abs=0.1)
    assert max(rounds) <= shockwave.ROUNDS
    # All have the same training; the one with most left runs most.
    assert rounds[0] >= rounds[1] >= rounds[2]
    favoured = plan_window(estimates, [1.0, 1.0, 1e5], {"a100": 4})
    # A third of the training is 8.75 rounds of it.
    assert sum(favoured[2].values()) > max(rounds[2], 5)


def test_a_window_without_room_plans_nothing():
    c = one_type(nodes=1)
    c.add(1, elastic="4", gpus=4, record=rigid(4, a100=1.0))
    asked = question(c)
    estimates, _ = account(asked, {}, requests(asked))
    assert plan_window(estimates, [1.0], {"a100": 2}) == [{}]
    assert plan_window([], [], {"a100": 2}) == []


# --- the comparison ---


def test_the_comparison_runs_on_a_part_of_a_published_workload(tmp_path):
    folder = published_data.require("sia", "traces", "workloads")
    whole = (folder / "workloads" / "saturn" / "workload-1.csv").read_text().splitlines()
    file = tmp_path / "part.csv"
    file.write_text("\n".join(whole[:13]) + "\n")
    assert len(workload.read(file).jobs) == 12
    try:
        results = rivals.run("gavel", [file], folder / "traces", rivals.CLUSTER)
    except ValueError as error:
        pytest.skip(f"needs the package installed again: {error}")
    figures = rivals.summary(results)
    assert figures["jobs"] == 12
    assert figures["rho_max"] >= figures["rho_mean"] > 0
