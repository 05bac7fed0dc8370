"""Which nodes may sleep: never one with something on it, or assigned to something."""

import dataclasses

import pytest

from slurm_elastic.core.cluster import Allocation, JobState
from slurm_elastic.core.plan import Action, Claim, Decision, JobRecord, Plan
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.sleep import sleep_choice
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node

ALL = ("a1", "a2", "a3")


def cluster():
    return Cluster([node(name, 4, "a100") for name in ALL])


def free(c, plan=None, records=None, **of_a1):
    snapshot = c.snapshot()
    first, *others = snapshot.nodes
    first = dataclasses.replace(first, **of_a1)
    snapshot = dataclasses.replace(snapshot, nodes=(first, *others))
    return sleep_choice.may_sleep(
        snapshot, sleep_choice.assigned_nodes(snapshot, plan, records or {})
    )


def test_idle_nodes_may_sleep():
    assert free(cluster()) == ALL


@pytest.mark.parametrize(
    "state",
    [
        {"used_cpus": 1},
        {"used_memory_mb": 100},
        {"used_gpus": 1},
        {"planned": True},
        {"available": False},
        {"state": "IDLE+DRAIN"},
        {"state": "IDLE+POWERING_UP"},
        {"state": "MIXED"},
        {"gpus": 0},
    ],
)
def test_nothing_on_it_and_nothing_beside_idle(state):
    assert free(cluster(), **state) == ("a2", "a3")


def test_no_node_of_a_job_of_any_kind():
    c = cluster()
    c.add(1, on={"a1": 1})
    c.add(2, elastic="1-4", on={"a2": 2}, state=JobState.COMPLETING)
    c.add(3, gpus=4, required_nodes=("a3",))
    assert free(c) == ()


def test_no_node_that_is_claimed_decided_or_a_target():
    a1, a2 = Allocation.of("a100", {"a1": 2}), Allocation.of("a100", {"a2": 2})
    claim = Claim(job_id=9, shares=(("a1", 4),), since=NOW, until=NOW + 60)
    assert free(cluster(), Plan(time=NOW, claims=(claim,))) == ("a2", "a3")
    decision = Decision(
        job_id=9, action=Action.GROW, current=a1, target=a2, reason=Reason("its-turn")
    )
    assert free(cluster(), Plan(time=NOW, decisions=(decision,))) == ("a3",)
    record = JobRecord(job_id=9, in_transition=True, target=a2)
    assert free(cluster(), records={9: record}) == ("a1", "a3")


def change(awake, asleep=None, idle_for=None, least_idle_s=600.0):
    idle_for = idle_for or dict.fromkeys(ALL, 1000.0)
    return sleep_choice.changes(
        ALL,
        asleep or {},
        {name: NOW - seconds for name, seconds in idle_for.items()},
        total=5,
        awake=awake,
        now=NOW,
        least_idle_s=least_idle_s,
    )


def test_the_longest_idle_sleep_first_and_none_that_was_just_in_use():
    idle_for = {"a1": 700.0, "a2": 3000.0, "a3": 100.0}
    assert change(4, idle_for=idle_for).sleep == ("a2",)
    assert change(2, idle_for=idle_for).sleep == ("a2", "a1")
    assert change(5).sleep == ()
    assert change(2, {"a1": NOW - 5, "a2": NOW - 9, "a3": NOW - 9}).sleep == ()


def test_as_many_wake_as_are_missing():
    asleep = {"a1": NOW - 50, "a2": NOW - 900}
    assert change(4, asleep).wake == ("a1",)
    assert change(5, asleep).wake == ("a1", "a2")
    assert change(3, asleep) == sleep_choice.SleepChanges()
