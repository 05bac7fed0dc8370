"""Switching of nodes: what is written, when, and how it goes wrong."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.core.cluster import Allocation, Reservation
from slurm_elastic.core.plan import Action, Claim, Decision, JobRecord, Plan
from slurm_elastic.core.reason import Reason
from slurm_elastic.slurm.scontrol import ScontrolError, SlurmUnreachableError
from tests.support.controller.powered_nodes import PoweredNodes
from tests.support.decisions.cluster_strategies import random_cluster
from tests.support.decisions.synthetic_clusters import Cluster, node

ALL = ("a1", "a2", "a3", "a4")


def site(names=ALL, **options):
    return PoweredNodes(Cluster([node(n, 4, "a100") for n in names]), **options)


def asleep(s):
    return sorted(n for n, state in s.states.items() if "POWERED_DOWN" in state)


def test_idle_nodes_sleep_after_the_window_and_the_spare_stays_awake():
    s = site()
    assert s.rounds(600) == []
    assert s.rounds(120) == [("down", "a1", "a2", "a3")]
    assert s.rounds(1200) == []
    shown = s.control.shown()
    assert (shown.acts, shown.asleep, shown.waking) == (True, ("a1", "a2", "a3"), ())
    assert any("Sleep=act Asleep=3 Nodes=4 Awake=1 ToSleep=a[1-3]" in x for x in s.log.lines)
    assert s.control.observer.history.record.total(None, None)["node_hours"] > 0.9


@pytest.mark.parametrize(
    "how",
    [{"mode": "observe"}, {"controller": "observe"}, {"missing": (("ResumeProgram", "is no"),)}],
)
def test_nothing_is_written_unless_site_controller_and_slurm_allow_it(how):
    s = site(**how)
    s.rounds(1800)
    assert s.writes == []
    assert len(s.control.shown().asleep) == 3  # it is observed instead
    assert not s.control.shown().acts
    assert (s.note is not None) == ("missing" in how)


def test_each_type_keeps_its_spare_and_excluded_nodes_stay_on():
    nodes = [node(n, 4, "a100") for n in ("a1", "a2")] + [node(n, 4, "v100") for n in ("v1", "v2")]
    s = PoweredNodes(Cluster(nodes))
    s.rounds(1200)
    assert asleep(s) == ["a1", "v1"]
    s = site(excluded=("a1", "a2"), spare=0)
    s.rounds(1200)
    assert asleep(s) == ["a3", "a4"]


def test_a_job_on_the_spare_wakes_the_next_one():
    s = site()
    s.rounds(1200)
    s.cluster.add(1, on={"a4": 4})
    s.states["a4"] = "ALLOCATED"
    (up,) = s.round()
    assert up[0] == "up"
    assert s.round() == []  # it boots: no further one
    s.boot()
    s.round()
    assert any(f"Node={up[1]} Power=on After=" in x for x in s.log.lines)


def test_a_claim_a_decision_and_a_reservation_wake_their_nodes():
    s = site()
    s.rounds(1200)
    claim = Claim(job_id=9, shares=(("a2", 4),), since=s.now, until=s.now + 60)
    assert ("up", "a2") in s.round(plan=Plan(time=s.now, claims=(claim,)))
    s = site()
    s.rounds(1200)
    s.cluster.add(1, elastic="1-4")
    record = JobRecord(job_id=1, in_transition=True, target=Allocation.of("a100", {"a3": 2}))
    assert ("up", "a3") in s.round(records={1: record})


def test_growth_that_is_worth_a_boot_wakes_a_node():
    s = site()
    s.cluster.add(1, elastic="1-8", on={"a4": 4}, time_limit_s=100_000)
    s.states["a4"] = "ALLOCATED"
    s.rounds(1200)
    assert asleep(s) == ["a1", "a2"]
    job = s.cluster.jobs[0]
    grown = Allocation.of("a100", {"a4": 4, "a1": 4})
    s.wished = Plan(
        time=s.now,
        decisions=(
            Decision(
                job_id=1, current=job.allocation, target=grown, action=Action.GROW,
                reason=Reason("its-turn"),
            ),
        ),
    )  # fmt: skip
    s.cluster.jobs[0] = dataclasses.replace(job, start_time=s.now, time_limit_s=600)
    assert s.round() == []  # it ends too soon
    s.cluster.jobs[0] = dataclasses.replace(job, start_time=s.now, time_limit_s=100_000)
    assert s.rounds(120) == [("up", "a1")]


def test_a_node_that_slurm_wakes_for_a_job_was_late():
    s = site()
    s.rounds(1200)
    s.states["a1"] = "ALLOCATED+POWERING_UP"
    s.cluster.add(1, on={"a1": 4})
    s.round()
    assert s.control.observer.history.record.at(s.now).late == 1
    assert s.control.shown().waking == ("a1",)


def test_a_node_that_does_not_come_up_is_left_alone():
    s = site()
    s.rounds(1200)
    s.states["a1"] = "DOWN+POWERED_DOWN"
    s.rounds(600)
    assert not any("a1" in w[1:] for w in s.writes[1:])
    assert any("Node=a1 Power=lost State=DOWN+POWERED_DOWN" in x for x in s.log.lines)
    assert "a1" not in s.ledger["sleeping_nodes"]["nodes"]


def test_nodes_that_others_switched_off_are_not_woken():
    s = site()
    s.states["a1"] = s.states["a2"] = s.states["a3"] = "IDLE+POWERED_DOWN"
    s.cluster.add(1, on={"a4": 4})
    s.states["a4"] = "ALLOCATED"
    s.rounds(1200)
    assert s.writes == []
    claim = Claim(job_id=9, shares=(("a2", 4),), since=s.now, until=s.now + 60)
    assert s.round(plan=Plan(time=s.now, claims=(claim,))) == [("up", "a2")]


def test_state_outlives_a_restart_and_another_mode_wakes_all():
    s = site()
    s.rounds(1200)
    s.start()
    assert s.rounds(300) == []
    assert s.control.shown().asleep == ("a1", "a2", "a3")
    s.config = dataclasses.replace(
        s.config, sleep=dataclasses.replace(s.config.sleep, mode="observe")
    )
    s.control.config = s.config
    assert s.round() == [("up", "a1", "a2", "a3")]
    assert s.round() == []


def test_power_cycles_of_a_day_are_bounded():
    s = site(("a1", "a2"), cycles_per_day=2)
    for number in range(6):
        s.rounds(900)
        s.cluster.add(number + 1, on={"a2": 4})
        s.states["a2"] = "ALLOCATED"
        s.rounds(60)
        s.boot()
        s.cluster.jobs.clear()
        s.states["a2"] = "IDLE"
    assert max(sum(n in w for w in s.writes if w[0] == "down") for n in ("a1", "a2")) == 2


def test_a_job_that_begins_between_reading_and_writing_keeps_its_node():
    s = site(("a1", "a2"))
    s.rounds(600)

    def begins():
        s.before_write = None
        s.states["a1"] = "ALLOCATED"
        s.cluster.add(1, on={"a1": 4})

    s.before_write = begins
    assert s.rounds(600) == [("down", "a1")]
    # Slurm switches it off when the job has ended; it is woken like any other.
    s.cluster.jobs.clear()
    s.states["a1"] = "IDLE+POWERING_DOWN"
    claim = Claim(job_id=9, shares=(("a1", 4),), since=s.now, until=s.now + 600)
    assert s.round(plan=Plan(time=s.now, claims=(claim,))) == []  # Slurm would ignore it now
    s.states["a1"] = "IDLE+POWERED_DOWN"
    assert s.round(plan=Plan(time=s.now, claims=(claim,))) == [("up", "a1")]


def test_a_restart_of_slurmctld_changes_nothing():
    s = site()
    s.rounds(1200)
    before, s.states = s.states, dict.fromkeys(s.states, "UNKNOWN")
    assert s.round() == []
    s.states = before
    s.round()
    assert s.control.shown().asleep == ("a1", "a2", "a3")


def test_nodes_that_are_not_idle_any_more_are_not_switched_off():
    s = site(("a1", "a2"))
    s.rounds(600)
    snapshot = s.snapshot()
    s.snapshot = lambda: dataclasses.replace(snapshot, time=s.now)
    s.states["a1"] = "MIXED"
    assert s.rounds(300) == []


def test_a_refusal_is_logged_once_and_tried_again_later():
    s = site()
    s.refuses = ScontrolError("scontrol update: Access denied")
    s.rounds(1200)
    assert len([x for x in s.log.lines if "Access denied" in x]) == 1
    assert s.note is not None
    assert s.note.code == "nodes-not-switched"
    s.refuses = None
    assert s.rounds(600)[0][0] == "down"
    assert s.note is None


def test_without_an_answer_the_next_round_sees_what_happened():
    s = site()
    s.rounds(600)
    s.refuses = SlurmUnreachableError("no answer")
    with pytest.raises(SlurmUnreachableError):
        s.rounds(120)
    s.refuses = None
    s.round()  # they are awake: nothing happened
    assert s.ledger["sleeping_nodes"]["nodes"] == {} or asleep(s)


@settings(max_examples=60)
@given(st.integers(1, 8), st.integers(0, 8), st.integers(0, 2**32), st.data())
def test_no_node_that_anything_is_meant_for_is_ever_switched_off(count, jobs, seed, data):
    cluster = random_cluster(count, jobs, seed)
    names = [n.name for n in cluster.nodes]
    some = st.sets(st.sampled_from(names))
    reserved, claimed, required, listed = (data.draw(some) for _ in range(4))
    s = PoweredNodes(cluster, spare=0)
    begin = s.now + data.draw(st.sampled_from([-100.0, 500.0]))
    reservation = Reservation(
        name="r", nodes=tuple(reserved), start_time=begin, end_time=s.now + 10_000
    )
    whole = cluster.snapshot
    cluster.snapshot = lambda: dataclasses.replace(whole(), reservations=(reservation,))
    if required:
        cluster.add(98, gpus=1, required_nodes=tuple(required))
    others = Cluster(cluster.nodes)
    for i, name in enumerate(sorted(listed)):
        others.add(200 + i, on={name: 1})
    claim = Claim(job_id=99, shares=tuple((n, 1) for n in claimed), since=s.now, until=s.now)
    for _ in range(15):
        s.round(plan=Plan(time=s.now, claims=(claim,)), others=others.jobs)
    off = {n for w in s.writes if w[0] == "down" for n in w[1:]}
    held = {n for j in cluster.jobs if j.allocation for n in j.allocation.nodes}
    targets = {n for r in cluster.records.values() if r.target for n in r.target.nodes}
    planned = {n.name for n in cluster.nodes if n.planned or not n.available}
    assert not off & (reserved | claimed | required | listed | held | targets | planned)
