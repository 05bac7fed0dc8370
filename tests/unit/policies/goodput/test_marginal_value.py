"""Policy `goodput`: prices, lengths, hysteresis, payback and the longest wait."""

import dataclasses

import numpy as np
import pytest

from slurm_elastic.config.placement_settings import PlacementSettings
from slurm_elastic.config.policy_settings import GoodputSettings
from slurm_elastic.config.schema import Config, ControllerSettings, ResizeSettings
from slurm_elastic.core.application import (
    Application,
    LayerCost,
    Learned,
    Noise,
    Observation,
    Prefixes,
    TypeProfile,
)
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.policies.goodput import remaining_work
from slurm_elastic.policies.goodput.marginal_value import MarginalValue
from slurm_elastic.policies.goodput.type_prices import type_prices
from slurm_elastic.policies.policy_protocol import Question
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node, racks

NET = Application(
    name="net",
    initial_batch=64,
    max_batch=4096,
    batch=64,
    types=(
        TypeProfile("t4", least=1, most=256, single=100.0),
        TypeProfile("a100", least=1, most=256, single=400.0),
    ),
)


def config(queue="controller", **settings):
    return Config(
        controller=ControllerSettings(queue=queue, mode="act", policy="goodput"),
        resize=ResizeSettings(restart_s=30.0, min_interval_s=0.0, per_hour=999),
        goodput=GoodputSettings(**settings),
    )


def learned(sync=0.02, kind="a100", speed=400.0, noise=20000.0):
    """Return a job that was measured on 1, 2 and 4 GPUs; more than one synchronise for `sync` s."""
    seen = tuple(
        Observation(kind, 1, g, m, m / speed + sync * (g > 1), m / speed)
        for g in (1, 2, 4)
        for m in (32, 128)
    )
    return Learned(NET, seen, Noise(1.0, noise))


def cluster(*jobs, nodes=None):
    """Return a cluster and its jobs: (on, fields of its record)."""
    made = Cluster(list(nodes or (node("n1"), node("n2"))))
    for job_id, (on, record) in enumerate(jobs, start=1):
        fields = {"learned": learned(), "proven": True, "reporting": True, "restart_s": 30.0}
        made.add(job_id, elastic="1-8", on=on, record=fields | record)
    made.jobs = [dataclasses.replace(job, submit_time=NOW - 100.0) for job in made.jobs]
    return made


def question(made, seed=0, **changes):
    snapshot = made.snapshot()
    capacity = {}
    for one in made.nodes:
        capacity[one.gpu_type] = capacity.get(one.gpu_type, 0) + one.gpus
    asked = Question(
        snapshot=snapshot,
        records=made.records,
        models={j: SpeedModel.fit(Config().speedup, ()) for j in made.records},
        jobs=tuple(made.records),
        capacity=capacity,
        seed=seed,
    )
    return dataclasses.replace(asked, **changes)


def first(policy, asked, state=None):
    proposals, after = policy.decide(asked, state or {})
    chosen = {p.job_id: p.alternatives[0] for p in proposals}
    return dict(sorted(chosen.items())), after


def test_equal_jobs_share_the_gpus():
    made = cluster((None, {}), (None, {}))
    chosen, _ = first(MarginalValue(config()), question(made))
    assert [a.gpus for a in chosen.values()] == [4, 4]


def test_a_lone_job_takes_no_more_gpus_than_are_worth_their_price():
    policy = MarginalValue(config(price=1.0, charge=0.3))
    scales, slow = learned(sync=0.0, noise=200.0), learned(sync=2.0, noise=200.0)
    for data, gpus in ((scales, 8), (slow, 1)):
        made = cluster((None, {"learned": data}))
        chosen, _ = first(policy, question(made))
        assert chosen[1].gpus == gpus


def test_a_small_gain_is_no_reason_to_move():
    times = {"t4": 398.0, "a100": 400.0}
    types = tuple(TypeProfile(t, least=1, most=256, single=s) for t, s in times.items())
    data = dataclasses.replace(
        learned(), application=dataclasses.replace(NET, types=types), noise=Noise(1.0, 0.0)
    )
    nodes = (node("n1", 1, "t4"), node("n2", 1, "a100"))
    record = {"learned": data, "restart_s": 0.0}
    made = cluster(({"n2": 1}, record), nodes=nodes)
    chosen, _ = first(MarginalValue(config(hysteresis=0.0)), question(made))
    assert chosen[1].gpu_type == "a100"
    made = cluster(({"n1": 1}, record), nodes=nodes)
    chosen, _ = first(MarginalValue(config(hysteresis=0.05)), question(made))
    assert chosen[1].gpu_type == "t4"


def test_prices_follow_the_jobs_speeds_unless_they_are_stated():
    made = cluster((None, {}), (None, {}), nodes=(node("n1", 4, "t4"), node("n2", 4, "a100")))
    arrays = MarginalValue(config()).weigh(question(made)).table
    types = arrays.configurations.types
    derived = dict(zip(types, type_prices(arrays, 0.02, {}).tolist(), strict=True))
    assert derived["t4"] == pytest.approx(0.02)
    assert derived["a100"] == pytest.approx(0.08, rel=0.01)
    stated = dict(zip(types, type_prices(arrays, 0.02, {"t4": 0.5}).tolist(), strict=True))
    assert stated == {"t4": 0.5, "a100": derived["a100"]}


def test_each_configuration_counts_with_its_best_batch_and_frozen_layers():
    def goodputs(data):
        table = MarginalValue(config()).weigh(question(cluster((None, {"learned": data})))).table
        return table.goodput[0, table.configurations.gpus == 8]

    whole = learned()
    small = dataclasses.replace(NET, max_batch=64)
    assert goodputs(dataclasses.replace(whole, application=small)) < 0.9 * goodputs(whole)
    layers = tuple(LayerCost(1.0, 2.0, 1.0) for _ in range(4))
    prefixes = Prefixes(
        layers=4, certified=2, penalties=((2, 0.01),), max_penalty=0.02, costs=layers
    )
    assert goodputs(dataclasses.replace(whole, prefixes=prefixes)) > 1.1 * goodputs(whole)
    assert MarginalValue(config()).capabilities.predicts_frozen_layers


def test_a_change_must_pay_back_within_the_time_that_is_left():
    made = cluster(({"n1": 4}, {"progress": 0.5, "restart_s": 60.0}))
    policy = MarginalValue(config())
    asked = question(made)
    key = asked.snapshot.jobs[0].key
    rate = policy.weigh(asked).table.goodput.max()

    def decide(left_s):
        work = {"time": NOW - 30.0, "asked": [], "jobs": {key: [0.5, 0.0, rate * left_s, 0.5]}}
        return first(policy, asked, {"work": work})[0][1]

    assert decide(left_s=20.0).gpus == 4
    long = decide(left_s=36_000.0)
    assert long.gpus == 8
    assert "are left on these GPUs" in words(long.reason)


def aged(age_s, restart_s, **settings):
    """Return the policy and a question about a job of unknown length on four of eight GPUs."""
    made = cluster(({"n1": 4}, {"restart_s": restart_s}))
    made.jobs = [dataclasses.replace(job, submit_time=NOW - age_s) for job in made.jobs]
    return MarginalValue(config(**settings)), question(made)


def test_a_change_at_unknown_length_costs_the_gpus_that_stand_idle_meanwhile():
    policy, asked = aged(3600.0, 600.0, price=0.5, hysteresis=0.0)
    weighed = policy.weigh(asked)
    eight = weighed.table.configurations.gpus == 8
    left = weighed.scaled[0, eight] / weighed.gain[0, eight]
    assert left == pytest.approx(3600 / (3600 + 600 * (1 + 0.5 * 8)))


@pytest.mark.parametrize(("age_s", "gpus"), [(900.0, 4), (2 * 86_400.0, 8)])
def test_a_change_at_unknown_length_is_worth_more_the_older_the_job(age_s, gpus):
    policy, asked = aged(age_s, 1000.0)
    assert first(policy, asked)[0][1].gpus == gpus


def test_lengths_count_less_where_there_are_many_gpus_per_job():
    def weight(nodes):
        made = cluster(({"n1": 4}, {"progress": 0.5}), nodes=nodes)
        policy = MarginalValue(config())
        asked = question(made)
        rate = policy.weigh(asked).table.goodput.max()
        account = {asked.snapshot.jobs[0].key: [0.5, 0.0, rate * 300, 0.5]}
        work = {"time": NOW - 30.0, "asked": [], "jobs": account}
        reason = first(policy, asked, {"work": work})[0][1].reason
        return next(r for r in reason.parameters["reasons"] if r.code == "work-left").parameters[
            "weight"
        ]

    few, many = [node("n1", 4)], [node(f"n{i}", 8) for i in range(1, 9)]
    assert weight(few) > weight(many) > 1.0


def test_the_work_left_follows_from_progress_and_predicted_goodput():
    made = cluster(({"n1": 4}, {"progress": 0.10}))
    policy = MarginalValue(config())
    state, progress = {}, 0.10
    for _ in range(5):
        asked = question(made)
        arrays = policy.weigh(asked).table
        rate = float(arrays.goodput[0, arrays.held[0]])
        remaining, work = remaining_work.account(asked, arrays, state.get("work", {}))
        _, state = policy.decide(asked, state)
        assert state["work"] == work
        made.time += 60.0
        progress += 0.01
        record = dataclasses.replace(made.records[1], progress=progress)
        made.records[1] = record
    # 60 s of this rate for each hundredth; 14 of them are done.
    assert remaining[0] == pytest.approx(rate * 60.0 * 86, rel=0.01)


def test_a_job_without_progress_is_treated_without_a_length():
    made = cluster(({"n1": 4}, {}))
    asked = question(made)
    arrays = MarginalValue(config()).weigh(asked).table
    remaining, _ = remaining_work.account(asked, arrays, {})
    assert np.isnan(remaining).all()


def known_work(policy, asked, *, left_s, jobs=None):
    """Return the state in which these jobs have as many seconds left on all GPUs of the cluster."""
    best = policy.weigh(asked).table.goodput.max(axis=1)
    ids = asked.jobs if jobs is None else jobs
    accounts = {
        asked.snapshot.job[j].key: [0.5, 0.0, float(best[asked.jobs.index(j)]) * left_s, 0.5]
        for j in ids
    }
    return {"work": {"time": NOW - 30.0, "asked": [], "jobs": accounts}}


IN_PLACE = {"in_place": True, "pause_s": 0.5}


def test_what_is_reached_in_place_costs_a_job_of_unknown_length_only_a_pause():
    asked = question(cluster(({"n1": 2}, IN_PLACE)))
    weighed = MarginalValue(config(hysteresis=0.0, price=0.1)).weigh(asked)
    part = dict(
        zip(
            ((n, g) for _, n, g in weighed.table.configurations.shapes()),
            (weighed.scaled[0] / weighed.gain[0]).tolist(),
            strict=True,
        )
    )
    assert part[1, 4] == pytest.approx(100 / (100 + 0.5 * (1 + 0.1 * 4)))
    assert part[1, 2] == 1.0
    # Fewer GPUs than its base need a requeue.
    assert part[1, 1] == pytest.approx(100 / (100 + 30 * (1 + 0.1 * 1)))


def test_what_is_reached_in_place_costs_a_job_of_known_length_only_a_pause():
    policy = MarginalValue(config(hysteresis=0.0))
    made = cluster(({"n1": 2}, {"progress": 0.5} | IN_PLACE), nodes=[node("n1")])
    asked = question(made)
    weighed = policy.weigh(asked)
    gain = weighed.gain[0, weighed.table.configurations.gpus == 4].item()
    (proposal,), _ = policy.decide(asked, known_work(policy, asked, left_s=36_000.0))
    found = [(a.gpus, a.in_place, a.value / gain) for a in proposal.alternatives[:2]]
    assert found == [
        (4, True, pytest.approx(600 / (600 + 0.5))),
        (4, False, pytest.approx(600 / (600 + 30))),
    ]


@pytest.mark.parametrize(("record", "gpus"), [(IN_PLACE, 4), ({}, 2)])
def test_a_job_with_little_left_grows_only_in_place(record, gpus):
    policy = MarginalValue(config())
    made = cluster(({"n1": 2}, {"progress": 0.5} | record), nodes=[node("n1")])
    asked = question(made)
    chosen, _ = first(policy, asked, known_work(policy, asked, left_s=20.0))
    assert chosen[1].gpus == gpus


def test_jobs_of_known_and_of_unknown_length_in_one_round_have_each_its_own_value():
    def costs(informed):
        known = {"progress": 0.5}
        made = cluster(*(({f"n{i}": 2}, known if i in informed else {}) for i in (1, 2)))
        policy = MarginalValue(config())
        asked = question(made)
        state = known_work(policy, asked, left_s=300.0, jobs=sorted(informed))
        chosen, _ = first(policy, asked, state)
        has_length = {j for j, a in chosen.items() if "are left on these" in words(a.reason)}
        assert has_length == informed
        return policy.round_program.program.cost

    none, both, mixed = costs(set()), costs({1, 2}), costs({1})
    assert (none != both).any(axis=1).all()
    assert (mixed[0] == both[0]).all()
    assert (mixed[1] == none[1]).all()


def overdue_cluster(*, started_s):
    """Return eight GPUs held by eight jobs since `started_s`, and a ninth job that waits."""
    nodes = (node("n1", 4), node("n2", 4))
    jobs = [({f"n{1 + i // 4}": 1}, {}) for i in range(8)]
    made = cluster(*jobs, (None, {}), nodes=nodes)
    made.jobs = [
        dataclasses.replace(job, start_time=NOW - started_s) if job.allocation else job
        for job in made.jobs
    ]
    return made


@pytest.mark.parametrize(("queue", "gets"), [("controller", 1), ("slurm", 0)])
def test_an_overdue_job_gets_its_smallest_size_with_the_reason(queue, gets):
    made = overdue_cluster(started_s=9000.0)
    asked = question(made)
    policy = MarginalValue(config(queue, wait_s=1800.0))
    waits = {asked.snapshot.job[9].key: NOW - 1900.0}
    chosen, state = first(policy, asked, {"waits": waits})
    assert chosen[9].gpus == gets
    assert sum(a.gpus for a in chosen.values()) == 8
    assert state["waits"] == waits
    if gets:
        assert "waited for 1900 s" in words(chosen[9].reason)


def test_no_job_is_suspended_for_an_overdue_one_soon_after_its_start():
    made = overdue_cluster(started_s=60.0)
    asked = question(made)
    policy = MarginalValue(config(wait_s=1800.0))
    chosen, _ = first(policy, asked, {"waits": {asked.snapshot.job[9].key: NOW - 1900.0}})
    assert [a.gpus for a in chosen.values()] == [1] * 8 + [0]


def test_jobs_larger_than_their_smallest_size_shrink_for_an_overdue_one():
    made = cluster(({"n1": 4}, {}), ({"n2": 4}, {}), (None, {"learned": learned(sync=9.0)}))
    asked = question(made)
    policy = MarginalValue(config(wait_s=600.0))
    chosen, _ = first(policy, asked, {"waits": {asked.snapshot.job[3].key: NOW - 700.0}})
    assert chosen[3].gpus == 1
    assert min(a.gpus for a in chosen.values()) >= 1


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("waited_s", "nodes"), [(500.0, 0), (700.0, 2)])
def test_an_overdue_job_waits_for_no_nearer_place(waited_s, nodes, at_once):
    made = Cluster([node("n1"), node("n2")], switches=racks(["n1", "n2"], 1))
    for job_id, name in ((1, "n1"), (2, "n2")):
        made.add(job_id, on={name: 2})
    fields = {"learned": learned(), "restart_s": 30.0}
    made.add(3, elastic="4-8", gpus=4, record=fields, submit_time=NOW - waited_s)
    delayed = dataclasses.replace(
        config(wait_s=600.0),
        placement=PlacementSettings(mode="delay", timers="fixed", wait_rack_s=9e4, wait_node_s=9e4),
    )
    plan, _ = decide_round(
        made.snapshot(),
        made.records,
        config=delayed,
        policy=MarginalValue(delayed),
        state={},
        at_once=at_once,
    )
    target = plan.decision[3].target
    assert (len(target.shares) if target else 0) == nodes


def test_sharing_and_residuals_are_capabilities_of_their_settings():
    on, off = MarginalValue(config()), MarginalValue(config(share=False, residuals=False))
    assert (on.capabilities.shares_measurements, on.capabilities.residual_models) == (True, True)
    assert (off.capabilities.shares_measurements, off.capabilities.residual_models) == (
        False,
        False,
    )
