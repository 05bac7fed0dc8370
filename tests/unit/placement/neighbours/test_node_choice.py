"""Places of jobs beside neighbours, and moves away from them."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.config.placement_settings import NeighbourSettings
from slurm_elastic.config.schema import Config
from slurm_elastic.models.colocation.shared_speeds import SharedSpeeds
from slurm_elastic.placement.neighbours.neighbour_table import NeighbourTable
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.round import decide_round
from tests.support.decisions.known_neighbours import speeds_of
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import Cluster, node

CONFIG = Config()
QUEUE = dataclasses.replace(
    CONFIG, controller=dataclasses.replace(CONFIG.controller, queue="controller")
)
SETTINGS = NeighbourSettings(mode="act")


def decide(cluster, speeds, config=CONFIG, settings=SETTINGS):
    snapshot = cluster.snapshot()
    table = speeds and NeighbourTable(snapshot, speeds, {}, settings)
    plan, _ = decide_round(
        snapshot,
        cluster.records,
        config=config,
        policy=FairShare(config),
        state={},
        neighbours=table,
    )
    return plan


def starting():
    """Return two half-full nodes, and a job that would take the first."""
    cluster = Cluster([node("g1"), node("g2")])
    cluster.add(1, elastic="2-2", on={"g1": 2})
    cluster.add(2, elastic="2-2", on={"g2": 2})
    cluster.add(3, elastic="2-2", gpus=2)
    return cluster


def place(plan, job_id=3):
    return plan.decision[job_id].target.nodes


def test_without_knowledge_the_place_is_that_of_a_site_without_neighbours():
    cluster = starting()
    assert place(decide(cluster, None, QUEUE)) == ("g1",)
    assert place(decide(cluster, SharedSpeeds(), QUEUE)) == ("g1",)


@pytest.mark.parametrize("pair", [(1, 3, 2), (3, 1, 2)])
def test_a_job_starts_beside_the_neighbour_that_does_not_hurt(pair):
    cluster = starting()
    assert place(decide(cluster, speeds_of(cluster, {pair: 0.6}), QUEUE)) == ("g2",)


def test_a_pair_that_was_measured_once_does_not_count_yet():
    cluster = starting()
    assert place(decide(cluster, speeds_of(cluster, {(3, 1, 2): 0.6}, times=1), QUEUE)) == ("g1",)


def test_where_no_other_place_is_free_a_job_starts_beside_any_neighbour():
    cluster = starting()
    pairs = {(3, 1, 2): 0.6, (3, 2, 2): 0.6}
    assert place(decide(cluster, speeds_of(cluster, pairs), QUEUE)) == ("g1",)


def sharing(free=2, **fields):
    """Return two jobs on the first node, and a second node with so many free GPUs."""
    cluster = Cluster([node("g1"), node("g2")])
    cluster.add(1, elastic="2-2", on={"g1": 2}, **fields)
    cluster.add(2, elastic="2-2", on={"g1": 2}, **fields)
    if free < 4:
        cluster.add(4, on={"g2": 4 - free})
    return cluster


def test_a_pair_that_hurts_is_separated():
    cluster = sharing()
    plan = decide(cluster, speeds_of(cluster, {(1, 2, 2): 0.5, (2, 1, 2): 0.9}))
    (change,) = plan.changes
    assert (change.job_id, change.target.nodes) == (1, ("g2",))
    assert words(change.reason).startswith(
        "moves away from job 2: side by side one of them is 42% slower"
    )


@pytest.mark.parametrize(("other", "moved"), [(2, []), (3, [1])], ids=["another's", "the same's"])
def test_a_job_makes_room_for_a_slowed_one_of_the_same_user_only(other, moved):
    """The slowed one, which is held, cannot move itself."""
    cluster = Cluster([node("g1"), node("g2")])
    cluster.add(1, elastic="2-2", on={"g1": 2})
    cluster.add(other, elastic="2-2", on={"g1": 2}, record={"held": True})
    plan = decide(cluster, speeds_of(cluster, {(other, 1, 2): 0.4}))
    assert [change.job_id for change in plan.changes] == moved


@pytest.mark.parametrize(
    ("cluster", "speed"),
    [
        (sharing(free=1), 0.5),
        (sharing(), 0.95),
        (sharing(record={"restart_s": 500.0}), 0.8),
        (sharing(record={"held": True}), 0.5),
    ],
    ids=["no room", "hardly slower", "too dear", "held"],
)
def test_a_pair_stays_together(cluster, speed):
    assert not decide(cluster, speeds_of(cluster, {(1, 2, 2): speed})).changes


def test_a_pair_that_was_not_measured_often_enough_stays_together():
    cluster = sharing()
    assert not decide(cluster, speeds_of(cluster, {(1, 2, 2): 0.5}, times=2)).changes


def test_a_job_does_not_move_to_a_neighbour_that_hurts_as_much():
    cluster = sharing()
    pairs = {(1, 2, 2): 0.6, (1, 4, 2): 0.6, (2, 4, 2): 0.55}
    assert not decide(cluster, speeds_of(cluster, pairs)).changes


def test_the_separated_pair_does_not_come_together_again():
    cluster = sharing()
    speeds = speeds_of(cluster, {(1, 2, 2): 0.5})
    cluster.carry_out(decide(cluster, speeds))
    for _ in range(3):
        cluster.time += 1000
        assert not decide(cluster, speeds).changes


SPEEDS = st.floats(0.3, 1.0)


@given(
    speeds=st.lists(SPEEDS, min_size=12, max_size=12),
    places=st.permutations(["g1", "g1", "g2", "g2"]),
    nodes=st.integers(2, 4),
)
def test_moves_away_from_neighbours_raise_the_total_speed(speeds, places, nodes):
    cluster = Cluster([node(f"g{i + 1}") for i in range(nodes)])
    for job_id, name in enumerate(places, start=1):
        cluster.add(job_id, elastic="2-2", on={name: 2})
    both = itertools.permutations(range(1, 5), 2)
    pairs = {(a, b, 2): s for (a, b), s in zip(both, speeds, strict=True)}
    learned = speeds_of(cluster, pairs)

    def total(allocations):
        snapshot, product = cluster.snapshot(), 0.0
        table = NeighbourTable(snapshot, learned, {}, SETTINGS)
        for job_id, held in allocations.items():
            others = [(o, 2) for o, a in allocations.items() if o != job_id and a == held]
            product += table.slowed(held.nodes[0], (job_id, 2), others)
        return product

    present = {job.job_id: job.allocation for job in cluster.jobs}
    plan = decide(cluster, learned)
    final = present | {d.job_id: d.target for d in plan.changes}
    assert all(sum(a == b for a in final.values()) <= 2 for b in final.values())
    if plan.changes:
        assert total(final) > total(present)
    assert decide(cluster, learned) == plan
