"""The choice of an attempt's layout."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.core.directive import Directive
from slurm_elastic.core.layers import Layer, chain
from slurm_elastic.training.parallel.layout_choice import AvailableRanks, balanced, choose

NET = [("a", True), ("act", False), ("b", True), ("c", True), ("d", True)]
#: Small weights that compute, then large ones that hardly do: where pipelines win (SOSP'19, VGG).
HEAVY = chain(
    [
        Layer("a", 0.02, 0.04, 1e5, 1e5),
        Layer("act", 0.0, 0.0, 1e5, 0.0),
        Layer("b", 0.02, 0.04, 1e5, 1e5),
        Layer("c", 0.01, 0.01, 1e4, 4e8),
        Layer("d", 0.005, 0.005, 1e3, 4e8),
    ]
)


def chosen(world: int, text: str, **options: object) -> str:
    layers = options.pop("layers", NET)
    directive = Directive.parse(text) if text else None
    return str(choose(AvailableRanks(world), layers, directive=directive, **options).text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("world", "directive", "layout"),
    [
        (4, "", "4x1"),
        (4, "1-8", "4x1"),
        (4, "1-8,parallel=pipeline", "1x4"),
        (1, "1-8,parallel=pipeline", "1x1"),
        (6, "1-8,parallel=pipeline", "2x3"),  # five layers make no six stages
        (4, "2-8,parallel=hybrid,unit=2", "2x2"),
        (8, "2-8,parallel=hybrid,types=a100:v100,unit=a100:2/v100:4", "2x4"),
        (4, "1-8,parallel=hybrid", "4x1"),  # the layers are not known yet
    ],
)
def test_the_directive_determines_the_layout(world: int, directive: str, layout: str) -> None:
    assert chosen(world, directive) == layout


def test_hybrid_uses_the_partitioner_where_a_profile_is_known() -> None:
    choice = choose(
        AvailableRanks(4, nodes=4),
        NET,
        directive=Directive.parse("1-8,parallel=hybrid"),
        profile=HEAVY,
    )
    assert choice.text.stages > 1
    assert sum(choice.lengths) == len(NET)
    assert not choice.provisional
    assert "times as fast as 4x1" in choice.remark
    other = chain([Layer("x", 1, 1, 1, 1), Layer("y", 1, 1, 1, 1)])
    assert chosen(4, "1-8,parallel=hybrid", profile=other) == "4x1"


def test_an_ordered_layout_applies_if_it_fits_ranks_and_layers() -> None:
    assert chosen(4, "1-8,parallel=hybrid", ordered="2x2") == "2x2"
    assert chosen(2, "1-8,parallel=hybrid", ordered="1x2x2") == "1x2x2"
    assert chosen(3, "1-8,parallel=hybrid,unit=1", ordered="2-1") == "2-1"
    for ordered, why in {
        "2x2": "for 4 GPUs, these are 3",
        "1x3x2": "needs 6 layers, the model has 5",
        "x": "is invalid: expected RxS",
    }.items():
        choice = choose(
            AvailableRanks(3),
            NET,
            directive=Directive.parse("1-8,parallel=hybrid"),
            ordered=ordered,
        )
        assert str(choice.text) == "3x1"
        assert why in choice.remark


def test_an_ordered_plan_divides_parameters_of_groups_that_share_weights() -> None:
    def ordered(plan: str) -> tuple[str, int, str]:
        choice = choose(
            AvailableRanks(4), NET, directive=Directive.parse("4"), ordered=plan, tensor=1
        )
        return str(choice.text), choice.tensor, choice.remark or str(choice.plan)

    for both in ("2x1+tensor=2+shard=full", "2x1+tensor=2+shard=optimizer"):
        assert ordered(both) == ("2x1", 2, both)
    *layout, remark = ordered("2x1+tensor=2+shard=offload")
    assert layout == ["4x1", 1]
    assert "shard=offload cannot be trained with" in remark


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel=hybrid in the directive needs layers in order"):
        chosen(2, "1-8,parallel=hybrid", layers=[])
    assert chosen(2, "1-8", layers=[]) == "2x1"


def test_the_partitioner_gets_the_bandwidths_of_the_site() -> None:
    ranks = AvailableRanks(8, nodes=2)
    assert [(x.machines, x.bandwidth) for x in ranks.levels({})] == [(4, 20e9), (2, 2.5e9)]
    levels = ranks.levels({"SLURM_ELASTIC_BANDWIDTH": "2e10,5e9"})
    assert [x.bandwidth for x in levels] == [4e10, 10e9]
    assert [x.machines for x in AvailableRanks(3, nodes=2).levels({})] == [3]
    with pytest.raises(
        ValueError, match="SLURM_ELASTIC_BANDWIDTH: 'fast' is invalid: expected two"
    ):
        ranks.levels({"SLURM_ELASTIC_BANDWIDTH": "fast"})


@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=8), data=st.data())
def test_no_other_cut_has_a_smaller_largest_part(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    lengths = balanced(costs, parts)
    assert sum(lengths) == len(costs)
    assert min(lengths) >= 1

    def worst(ends: tuple[int, ...]) -> int:
        cuts = [0, *ends, len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(cuts))

    all_of_them = itertools.combinations(range(1, len(costs)), parts - 1)
    assert worst(tuple(itertools.accumulate(lengths))[:-1]) == min(map(worst, all_of_them))
