"""Who gets a longer limit, how much longer, and where that ends."""

import dataclasses

import pytest

from slurm_elastic.config.schema import Config, ResizeSettings, SpeedupSettings
from slurm_elastic.controller.state.stored_job import StoredJob
from slurm_elastic.controller.state.time_limits import (
    ExtensionTerms,
    TimeBudget,
    begun,
    fresh,
)
from slurm_elastic.controller.state.transition import Transition
from slurm_elastic.controller.transitions.limit_extension import allowed, most_s
from slurm_elastic.core.cluster import Limit, Node, Partition, Reservation, Snapshot
from slurm_elastic.core.plan import Action, Decision
from slurm_elastic.core.reason import Reason
from tests.support.controller.job_records import allocation, job, transition

LINEAR = SpeedupSettings(loss_in_node=0.0, loss_across_nodes=0.0)
ON = Config(resize=ResizeSettings(extend_time=True), speedup=LINEAR)
FOUR = {"tres_per_node": "gres/gpu:a100:4", "min_nodes": 1, "time_limit": 60}


def snapshot(**fields):
    nodes = tuple(
        Node(name=f"n{i}", gpu_type="a100", gpus=4, cpus=16, memory_mb=9000) for i in (1, 2)
    )
    day = Partition(name="gpu", nodes=("n1", "n2"), up=True, max_time_s=86400)
    return Snapshot(time=1000.0, nodes=nodes, partitions=(day,), **({"jobs": ()} | fields))


def terms(seen, target, *, config=ON, budget=None, site=None):
    decision = Decision(
        job_id=7,
        current=seen.allocation,
        target=allocation(target),
        action=Action.SHRINK,
        reason=Reason("waits"),
    )
    return allowed(seen, decision, budget, snapshot=site or snapshot(), records={}, config=config)


def running(gpus=4, **fields):
    values = {"shape": FOUR, "time_limit_s": 3600, "start_time": 900.0} | fields
    return job({"n1": gpus}, directive="1-8", **values)


def test_by_default_nothing_is_extended():
    assert terms(running(), {"n1": 2}, config=Config()) == (None, None)
    assert terms(running(time_limit_s=None), {"n1": 2}) == (None, None)


def test_fewer_gpus_are_as_slow_as_predicted_and_as_many_are_not():
    budget, found = terms(running(), {"n1": 2})
    assert budget == fresh(3600)
    assert found == ExtensionTerms(paces={"planned": 0.5, "old": 1.0, "queue": 0.25}, most_s=86400)
    assert terms(running(1), {"n1": 4, "n2": 4}).terms.paces["planned"] == 1.0
    beyond = running(shape=FOUR | {"tres_per_node": "gres/gpu:800"})  # MAX is 8
    assert terms(beyond, {"n1": 4}).terms.paces["planned"] == 0.5
    only_min = running(shape={})  # what it was submitted with is not known: MIN
    assert set(terms(only_min, {"n1": 1}).terms.paces.values()) == {1.0}


def test_switched_off_again_it_gives_back_what_is_left():
    budget = TimeBudget(work_s=1800.0, plain_s=1800.0, pace=0.5, set_s=3600)
    assert terms(running(2), {"n1": 1}, config=Config(), budget=budget) == (
        budget,
        ExtensionTerms(),
    )


def test_a_longer_limit_than_submitted_of_which_nothing_is_known_is_not_extended():
    budget, _ = terms(running(time_limit_s=7200), {"n1": 2})
    assert begun(budget, pace=0.5, most_s=None)[1] == 7200


def test_the_strictest_bound_counts():
    wall = (
        Limit(name="QOS q MaxWall", resource="wall", cap=7200, jobs=frozenset({7})),
        Limit(name="QOS r MaxWall", resource="wall", cap=60, jobs=frozenset({8})),
    )
    assert most_s(running(), snapshot(limits=wall)) == 7200
    assert most_s(running(partition="elsewhere"), snapshot()) is None


def test_a_reservation_of_others_on_its_nodes_ends_an_extension():
    def maintenance(name, node, start):
        return Reservation(name=name, nodes=(node,), start_time=start, end_time=start + 9000)

    ours = dataclasses.replace(maintenance("selastic_1", "n2", 1100.0), ours=True)
    site = snapshot(
        reservations=(ours, maintenance("late", "n2", 9000.0), maintenance("m", "n2", 5000.0))
    )
    _, found = terms(running(), {"n2": 2}, site=site)
    assert found.reserved == {"planned": 5000.0}
    budget, limit_s = begun(fresh(3600), pace=0.5, most_s=None, until_s=4000)
    assert (limit_s, budget.extended_s) == (3960, 360)
    assert begun(fresh(3600), pace=0.5, most_s=None, until_s=100)[1] == 3600


def test_ledger_rows_come_back_and_damaged_ones_count_as_none():
    t = transition(
        {"n1": 2}, {"n1": 4}, budget=fresh(3600), terms=ExtensionTerms(paces={"old": 0.5})
    )
    back = Transition.from_body(t.to_body())
    assert (back.budget, back.terms) == (t.budget, t.terms)
    entry = StoredJob(7, budget=fresh(3600))
    assert StoredJob.from_body(entry.to_body()).budget == entry.budget
    for body in (
        None,
        [],
        {"work_s": "x", "plain_s": 1},
        {"work_s": 1.0},
        {"work_s": 1.0, "plain_s": float("nan")},
    ):
        assert TimeBudget.from_body(body) is None


@pytest.mark.parametrize(("shown", "extended_s"), [(7200, 3600), (7260, 0)])
def test_only_the_limit_that_was_set_is_shown_as_extended(shown, extended_s):
    assert begun(fresh(3600), pace=0.5, most_s=None)[0].extended_of(shown) == extended_s
