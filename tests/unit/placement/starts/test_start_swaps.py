"""Jobs that start in one round choose their places together."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.config.placement_settings import NeighbourSettings
from slurm_elastic.config.schema import Config
from slurm_elastic.placement.neighbours.neighbour_table import NeighbourTable
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.round import decide_round
from tests.support.decisions.known_neighbours import speeds_of
from tests.support.decisions.synthetic_clusters import Cluster, node

CONFIG = dataclasses.replace(
    Config(), controller=dataclasses.replace(Config().controller, queue="controller")
)
#: Speed of a job of the first kind beside one of the second.
UNLIKE = {
    ("computing", "computing"): 0.5, ("computing", "loading"): 0.77,
    ("loading", "computing"): 0.8, ("loading", "loading"): 0.98,
}  # fmt: skip


def learned(cluster, speed_of):
    """Return the measurements after job a ran at `speed_of(a, b)` beside job b."""
    pairs = itertools.permutations([job.job_id for job in cluster.jobs], 2)
    speeds = speeds_of(cluster, {(a, b, 1): speed_of(a, b) for a, b in pairs}, times=50)
    return NeighbourTable(cluster.snapshot(), speeds, {}, NeighbourSettings(mode="act"))


def places(cluster, table):
    plan, _ = decide_round(
        cluster.snapshot(), cluster.records, config=CONFIG, policy=FairShare(CONFIG), state={},
        neighbours=table,
    )  # fmt: skip
    return {j: d.target.nodes for j, d in plan.decision.items() if d.target}


@pytest.mark.parametrize(
    "order", sorted(set(itertools.permutations(["computing", "computing", "loading", "loading"])))
)
def test_unlike_jobs_share_a_node_in_whatever_order_they_come(order):
    cluster = Cluster([node("g1", gpus=2), node("g2", gpus=2)])
    cluster.add(1, elastic="1-1", on={"g1": 1})
    for job_id in (2, 3, 4):
        cluster.add(job_id, elastic="1-1", gpus=1)
    kinds = dict(enumerate(order, 1))
    found = places(cluster, learned(cluster, lambda a, b: UNLIKE[kinds[a], kinds[b]]))
    (beside_first,) = (j for j in (2, 3, 4) if found[j] == ("g1",))
    assert kinds[beside_first] != kinds[1]


def test_places_that_one_of_them_may_not_have_are_not_exchanged():
    cluster = Cluster([node("g1", gpus=2), node("g2", gpus=2)])
    cluster.add(1, elastic="1-1", on={"g1": 1})
    cluster.add(2, elastic="1-1", gpus=1, excluded_nodes=("g1",))
    cluster.add(3, elastic="1-1", gpus=1, excluded_nodes=("g1",))
    cluster.add(4, elastic="1-1", gpus=1)
    kinds = {1: "computing", 2: "loading", 3: "loading", 4: "computing"}
    found = places(cluster, learned(cluster, lambda a, b: UNLIKE[kinds[a], kinds[b]]))
    assert found == {1: ("g1",), 2: ("g2",), 3: ("g2",), 4: ("g1",)}


@given(st.lists(st.floats(0.3, 1.0), min_size=12, max_size=12))
def test_four_jobs_on_two_nodes_get_about_the_best_pairs(numbers):
    speed = dict(zip(itertools.permutations(range(1, 5), 2), numbers, strict=True))
    cluster = Cluster([node("g1", gpus=2), node("g2", gpus=2)])
    for job_id in range(1, 5):
        cluster.add(job_id, elastic="1-1", gpus=1)
    found = places(cluster, learned(cluster, lambda a, b: speed[a, b]))
    partner = next(j for j in (2, 3, 4) if found[j] == found[1])

    def total(other):
        rest = [j for j in (2, 3, 4) if j != other]
        return speed[1, other] + speed[other, 1] + speed[*rest] + speed[*rest[::-1]]

    assert sorted(found) == [1, 2, 3, 4]
    # Measured speeds are drawn to 1 by the weight n / (n + 1).
    assert total(partner) >= 0.97 * max(map(total, (2, 3, 4)))
