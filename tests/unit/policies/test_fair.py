"""Division of GPUs by policy `fair`, without placement."""

import dataclasses

from slurm_elastic.config.schema import Config, ResizeSettings, SpeedupSettings
from slurm_elastic.core.cluster import Allocation, Companion, Limit
from slurm_elastic.core.plan import Measurement
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.policies.policy_protocol import Question
from tests.support.reasons import words
from tests.support.synthetic_clusters import Cluster, busy, node

CALM = Config(resize=ResizeSettings(restart_s=0.0, min_gain=0.0))


def many(count=8, gpus=4, gpu_type="a100"):
    return [node(f"{gpu_type}{i}", gpus, gpu_type) for i in range(count)]


def ask(cluster, capacity, config=CALM):
    snapshot = cluster.snapshot()
    question = Question(
        snapshot=snapshot,
        records=cluster.records,
        models={
            j: SpeedModel.fit(config.speedup, r.measurements) for j, r in cluster.records.items()
        },
        jobs=tuple(cluster.records),
        capacity=capacity,
    )
    proposals, state = FairShare(config).decide(question, {})
    assert state == {}
    return {p.job_id: p for p in proposals}


def shares(cluster, capacity, config=CALM):
    return {j: p.alternatives[0].gpus for j, p in ask(cluster, capacity, config).items()}


def seen(gpus, rate, gpu_type="a100"):
    return Measurement(gpu_type=gpu_type, gpus=gpus, nodes=1, samples_per_s=rate, steps=9)


def test_equal_jobs_get_equal_shares_and_ties_go_to_the_lowest_id():
    c = Cluster(many())
    for i in (1, 2, 3):
        c.add(i, elastic="1-32", on={f"a100{i}": 1})
    assert shares(c, {"a100": 12}) == {1: 4, 2: 4, 3: 4}
    assert shares(c, {"a100": 7}) == {1: 3, 2: 2, 3: 2}


def test_a_large_min_is_not_a_larger_share():
    c = Cluster(many())
    c.add(1, elastic="1-32", on={"a1001": 1})
    c.add(2, elastic="8-32", on={"a1002": 4, "a1003": 4})
    assert shares(c, {"a100": 16}) == {1: 8, 2: 8}


def test_a_job_that_stops_scaling_stops_growing():
    c = Cluster(many())
    c.add(1, elastic="1-16", on={"a1001": 1}, record={"measurements": (seen(1, 9), seen(2, 9.1))})
    c.add(2, elastic="1-16", on={"a1002": 1}, record={"measurements": (seen(1, 9), seen(2, 18))})
    found = shares(c, {"a100": 16})
    assert found[2] > 2 * found[1]


def test_min_goes_to_running_jobs_then_by_priority_then_age():
    c = Cluster(many())
    c.add(1, elastic="4-8", gpus=4, priority=5)
    c.add(2, elastic="4-8", gpus=4, priority=9)
    c.add(3, elastic="4-8", gpus=4, priority=5)
    c.add(4, elastic="4-8", on={"a1001": 4}, priority=1)
    assert shares(c, {"a100": 12}) == {4: 4, 2: 4, 1: 4, 3: 0}
    waiting = ask(c, {"a100": 12})[3].alternatives
    assert words(waiting[0].reason) == "waits for 4 a100, its MIN"


def test_units_and_types_are_obeyed():
    c = Cluster([*many(), *many(8, 4, "v100")])
    c.add(1, elastic="2-16,types=v100,unit=2", on={"v1001": 2})
    c.add(2, elastic="1-16,types=a100", on={"a1001": 1})
    proposals = ask(c, {"a100": 9, "v100": 9})
    first = proposals[1].alternatives[0]
    assert (first.gpu_type, first.gpus) == ("v100", 8)
    assert {a.gpu_type for a in proposals[2].alternatives} == {"a100"}


def test_pending_jobs_start_on_the_first_type_of_their_list_that_has_room():
    c = Cluster([*many(), *many(8, 4, "v100")])
    c.add(1, elastic="4-4,types=v100:a100", gpus=4)
    c.add(2, elastic="4-4,types=v100:a100", gpus=4)
    found = ask(c, {"a100": 4, "v100": 4})
    assert [found[i].alternatives[0].gpu_type for i in (1, 2)] == ["v100", "a100"]


def test_a_faster_type_with_idle_gpus_is_offered_and_the_present_one_after_it():
    c = Cluster([*many(), *many(8, 4, "v100")])
    c.add(1, elastic="2-4,types=v100:a100", on={"v1001": 4})
    config = dataclasses.replace(CALM, speedup=SpeedupSettings(types={"a100": 3.0}))
    offered = ask(c, {"a100": 4, "v100": 4}, config)[1].alternatives
    assert {a.gpu_type for a in offered} == {"a100", "v100"}
    assert [(a.gpu_type, a.gpus) for a in (offered[0], offered[-1])] == [
        ("a100", 4),
        ("v100", 4),
    ]
    assert "make it faster" in words(offered[0].reason)
    assert shares(c, {"a100": 1, "v100": 4}, config) == {1: 4}


def test_a_preferred_type_that_is_no_faster_is_no_reason_to_change():
    c = Cluster([*many(), *many(8, 4, "v100")])
    c.add(1, elastic="2-4,types=v100:a100", on={"a1001": 4})
    assert ask(c, {"a100": 4, "v100": 4})[1].alternatives[0].gpu_type == "a100"


def test_a_job_keeps_its_gpus_unless_the_trade_pays():
    c = Cluster(many(8, 8))
    c.add(1, elastic="1-32", on={"a1001": 6})
    c.add(2, elastic="1-32", on={"a1003": 4})
    assert shares(c, {"a100": 10}, Config()) == {1: 6, 2: 4}
    assert shares(c, {"a100": 10}) == {1: 5, 2: 5}
    c.jobs.clear()
    c.add(1, elastic="1-32", on={"a1001": 8, "a1002": 1})
    c.add(2, elastic="1-32", on={"a1004": 1})
    found = shares(c, {"a100": 10}, Config())
    assert found[2] >= 3


def test_a_job_gives_up_in_place_what_would_not_pay_for_a_requeue():
    c = Cluster(many(8, 8))
    part = Companion(1001, Allocation.of("a100", {"a1001": 1}), 0.0)
    c.add(1, elastic="1-32", on={"a1001": 6}, companions=(part,), record={"in_place": True})
    c.add(2, elastic="1-32", on={"a1003": 4})
    assert shares(c, {"a100": 10}, Config()) == {1: 5, 2: 5}


def test_limits_cap_the_jobs_they_name_together():
    c = Cluster(many())
    for i in (1, 2, 3):
        c.add(i, elastic="1-32", on={f"a100{i}": 1})
    c.add(4, on={"a1004": 2})
    c.limits = (Limit(name="L", resource="gpu", cap=7, jobs=frozenset({1, 2, 4})),)
    assert shares(c, {"a100": 24}) == {1: 3, 2: 2, 3: 18}


def test_sizes_without_an_even_share_are_stepped_over():
    c = Cluster(many(8, 8))
    c.add(1, elastic="1-64", on={"a1001": 1})
    assert shares(c, {"a100": 11}) == {1: 10}


def test_smaller_sizes_follow_in_case_the_best_finds_no_place():
    c = Cluster(many())
    c.add(1, elastic="1-16", on={"a1001": 1})
    sizes = [a.gpus for a in ask(c, {"a100": 16})[1].alternatives]
    assert sizes[0] == 16
    assert sizes[-1] == 1
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) > 4


def test_a_directive_that_was_narrowed_by_its_owner_binds():
    c = Cluster(many())
    c.add(1, elastic="1-16", on={"a1001": 4, "a1002": 4})
    directive = c.jobs[0].directive
    narrow = dataclasses.replace(directive, max_gpus=4)
    c.jobs[0] = dataclasses.replace(c.jobs[0], override=narrow)
    assert shares(c, {"a100": 16}) == {1: 4}


def test_thousands_of_gpus_are_divided_completely():
    c = Cluster(many(512, 8))
    for i in range(1, 401):
        c.add(i, elastic="1-4096", on={f"a100{i}": 1})
    found = shares(c, {"a100": 4096})
    assert sum(found.values()) == 4096
    assert set(found.values()) <= {8, 10, 12}


def test_a_busy_cluster_never_hands_out_more_than_there_is():
    c = busy(20, 60, seed=3)
    held = {j.job_id: j.allocation for j in c.jobs if j.allocation and j.submission}
    c.records = {j: c.records[j] for j in held}
    capacity = {"a100": 0, "v100": 0}
    for allocation in held.values():
        capacity[allocation.gpu_type] += allocation.gpus
    given = {"a100": 0, "v100": 0}
    for proposal in ask(c, capacity).values():
        given[proposal.alternatives[0].gpu_type] += proposal.alternatives[0].gpus
    assert all(given[t] <= capacity[t] for t in given)
