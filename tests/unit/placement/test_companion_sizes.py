"""Companions are as large as the steps in which their job may shrink."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.core.cluster import Allocation, Companion
from slurm_elastic.core.directive import Directive
from slurm_elastic.placement import in_place_places
from slurm_elastic.placement.companion_sizes import companion_sizes
from tests.unit.placement.test_in_place_places import smaller, with_job


def sizes(text, held, *joins):
    parts = companion_sizes(Directive.parse(text), "a100", held, joins)
    return [gpus for _, gpus in parts]


def test_a_range_is_cut_at_powers_of_two():
    assert sizes("1-8", 1, ("n1", 7)) == [1, 2, 4]
    assert sizes("1-4", 1, ("n1", 3)) == [1, 2]
    assert sizes("2-4", 2, ("n1", 2)) == [2], "there is no size between"
    assert sizes("4-8", 4, ("n1", 4)) == [4]


def test_replicas_stay_whole():
    assert sizes("2-16,unit=2", 2, ("n1", 6)) == [2, 4]
    assert sizes("8-16,unit=8", 8, ("n1", 4), ("n2", 4)) == [4, 4], "one node each"


def test_listed_sizes_are_cut_only_where_a_loss_leaves_one_of_them():
    assert sizes("1-8,sizes=1:2:4:8", 1, ("n1", 7)) == [7]
    assert sizes("1-4,sizes=1:2:3:4", 1, ("n1", 3)) == [1, 2]
    assert sizes("1-4,sizes=2:3:4", 2, ("n1", 2)) == [2]


def test_the_job_can_then_shrink_in_place_to_every_size():
    parts = companion_sizes(Directive.parse("1-4"), "a100", 1, (("n1", 3),))
    round_job, _ = with_job({"n1": 1}, *parts, elastic="1-4")
    assert [place["n1"] for place in smaller(round_job)] == [3, 2, 1]


@given(
    st.integers(1, 16),
    st.sampled_from([1, 2, 4]),
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
)
def test_companions_hold_what_joins_and_reach_every_size_of_a_range(held, unit, gpus):
    held, gpus = held * unit, [g * unit for g in gpus]
    joins = tuple((f"n{i}", g) for i, g in enumerate(gpus))
    directive = Directive.parse(f"{held}-{held + sum(gpus)},unit={unit}")
    parts = companion_sizes(directive, "a100", held, joins)
    by_node = Counter()
    for node, each in parts:
        assert each > 0
        assert each % unit == 0
        by_node[node] += each
    assert by_node == dict(joins)
    assert len(parts) <= len(joins) + sum(gpus).bit_length()
    companions = [Companion(i, Allocation.of("a100", dict([p]))) for i, p in enumerate(parts)]
    if len(joins) == 1:
        left = {sum(c.allocation.gpus for c in s) for s in in_place_places._subsets(companions)}
        doubled = [held * 2**i - held for i in range(1, 6) if held * 2**i < held + sum(gpus)]
        assert left.issuperset(doubled)
