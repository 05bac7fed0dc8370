"""Spatial groups are placed only on linked GPUs, as far as `spatial_reach` says."""

import pytest

from slurm_elastic.config.placement_settings import TopologySettings
from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.placement.link_domains import NodeLinks, grouped
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import Cluster, node

TWO_PAIRS = ((0, 1), (2, 3))
QUADS = ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("free", "domains", "group", "gpus"),
    [
        ((0, 1, 2, 3), TWO_PAIRS, 2, 4),
        ((1, 2, 3), TWO_PAIRS, 2, 0),  # Slurm would take 1 and 2
        ((0, 1, 3), TWO_PAIRS, 2, 2),
        (tuple(range(8)), QUADS, 4, 8),
        ((0, 1, 2, 3, 5, 6, 7), QUADS, 4, 4),
        (tuple(range(8)), QUADS, 3, 3),  # the second group would be 3, 4, 5
        ((0, 1, 2, 3), TWO_PAIRS, 4, 0),
        ((5, 6), TWO_PAIRS, 2, 0),  # no domain has them
    ],
)
def test_groups_of_the_lowest_free_gpus(free, domains, group, gpus):
    assert grouped(free, domains, group) == gpus


def test_gpus_that_other_jobs_leave_first_count_by_domain():
    unknown = NodeLinks(QUADS, None)
    assert unknown.room(6, (), 4) == 4
    assert unknown.room(6, (), 3) == 6
    left = NodeLinks(QUADS, (4, 5))
    assert left.room(3, (6,), 3) == 3
    assert left.room(3, (3,), 3) == 0  # 3 is in the other domain
    assert left.room(7, (), 4) == 4  # other jobs leave first
    assert left.room(8, (), 4) == 8


def decided(c, reach="domain", domains=None):
    settings = Config(
        controller=ControllerSettings(queue="controller"),
        topology=TopologySettings(domains=domains or {}, spatial_reach=reach),
    )
    plan, _ = decide_round(
        c.snapshot(), c.records, config=settings, policy=FairShare(settings), state={}
    )
    return plan.decision[1]


def place(decision):
    return dict(decision.target.shares) if decision.target else {}


def waiting(elastic, used, nodes=2):
    """Return nodes of four GPUs, of which jobs hold the used ones, and job 1 that waits."""
    c = Cluster([node(f"g{i}") for i in range(1, nodes + 1)])
    for at, (name, indexes) in enumerate(used.items()):
        c.add(90 + at, on={name: len(indexes)}, devices=((name, ",".join(map(str, indexes))),))
    c.add(1, elastic=elastic, gpus=int(elastic.split(",")[0].split("-")[0]))
    return c


def test_a_group_starts_only_where_its_gpus_are_linked():
    c = waiting("2,parallel=spatial,unit=2", {"g1": (0, 2), "g2": (0, 1)})
    assert place(decided(c, domains={"a100": 2})) == {"g2": 2}
    c = waiting("2,parallel=spatial,unit=2", {"g1": (0, 2), "g2": (1, 3)})
    decision = decided(c, domains={"a100": 2})
    assert decision.target is None
    assert "a spatial group of 2 GPUs would leave one link domain" in words(decision.waiting_for)
    assert place(decided(c, "node", domains={"a100": 2})) in ({"g1": 2}, {"g2": 2})
    assert place(decided(c)) in ({"g1": 2}, {"g2": 2})  # domains are not known


def test_a_group_larger_than_a_node_waits_unless_it_may_cross_nodes():
    c = waiting("8,parallel=spatial,unit=8", {})
    for reach in ("domain", "node"):
        decision = decided(c, reach)
        assert decision.target is None
        assert "would leave one" in words(decision.waiting_for)
    assert place(decided(c, "any")) == {"g1": 4, "g2": 4}


def test_without_a_unit_all_gpus_are_one_group():
    c = waiting("4,parallel=spatial", {"g1": (0,)})
    assert place(decided(c)) == {"g2": 4}
    assert place(decided(c, domains={"a100": 2})) == {}


def test_replicas_of_the_whole_model_are_not_bound_to_domains():
    c = waiting("2,unit=2", {"g1": (0, 2), "g2": (1, 3)})
    assert sum(place(decided(c, domains={"a100": 2})).values()) == 2


def test_a_running_job_grows_by_whole_groups():
    c = Cluster([node("g1", 8)])
    c.add(90, on={"g1": 1}, devices=(("g1", "3"),))
    c.add(
        1, elastic="2-8,parallel=spatial,unit=2", on={"g1": 2}, devices=(("g1", "0-1"),),
        record={"measurements": ()},
    )  # fmt: skip
    # 0, 1, then 2 and 4: the second group would have GPUs of two domains.
    assert place(decided(c, domains={"a100": 4})) == {"g1": 2}
    assert place(decided(c, domains={"a100": 8})) == {"g1": 6}
