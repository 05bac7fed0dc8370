"""The partitioner: formulas worked out by hand, limits, and rejected arguments."""

import math

import pytest

from slurm_elastic.core.layers import Layer, LayerError, LayerProfile, chain
from slurm_elastic.models.pipedream import model_cuts
from slurm_elastic.models.pipedream.partitioner import (
    ArgumentError,
    Cost,
    Level,
    PipelineError,
    partition,
)


def row(*costs):
    return chain(Layer(f"n{i}", 0.0, *cost) for i, cost in enumerate(costs))


def replicas(found):
    return [stage.replicas for stage in found.stages]


def test_heavy_weights_are_not_replicated():
    net = row((6.0, 1.0, 0.0), (2.0, 1.0, 1e3))
    found = partition(net, [Level(4, 10.0)])
    assert replicas(found) == [3, 1]
    assert found.pipeline_time_s == 2.0
    # 8 s of compute, 4 * 3/4 * 1000 / 10 s of reduction, over 4
    assert found.data_parallel_time_s == pytest.approx((8 + 300) / 4)
    assert found.single_time_s == 8.0
    assert found.bound_s == found.pipeline_time_s


def test_what_crosses_counts_when_asked():
    net = row((4.0, 100.0, 0.0), (4.0, 1.0, 0.0))
    assert replicas(partition(net, [Level(2, 10.0)])) == [2]
    split = partition(net, [Level(2, 10.0)], straight=True, compression=1.0)
    assert split.pipeline_time_s == 20.0
    assert partition(net, [Level(2, 10.0)], straight=True, compression=4.0).pipeline_time_s == 5.0
    assert partition(net, [Level(2, 10.0)], straight=True).pipeline_time_s == 4.0
    paper = partition(net, [Level(2, 10.0)], straight=True, cost=Cost.PAPER)
    assert paper.pipeline_time_s == 20.0


def test_what_leaves_a_node_counts_on_its_inner_level():
    """The first node's inner pipeline pays for its output at the speed between its GPUs."""
    net = row((1.0, 0.0, 0.0), (1.0, 50.0, 0.0), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0))
    levels = [Level(2, 10.0), Level(2, 1000.0)]
    found = partition(net, levels, straight=True, compression=1.0)
    # As 1 + 3 layers the output of n1 stays inside a node, but three layers must be two stages.
    assert found.pipeline_time_s == 10.0
    assert partition(net, levels, straight=True).pipeline_time_s == 1.0


def test_the_papers_cost_overlaps_reduction():
    net = row((8.0, 0.0, 10.0))
    # max(8, 2 * 3 * 10 / 10) / 4 against (8 + 4 * 3/4 * 10 / 10) / 4
    assert partition(net, [Level(4, 10.0)], cost=Cost.PAPER).pipeline_time_s == 2.0
    assert partition(net, [Level(4, 10.0)]).pipeline_time_s == 2.75


def test_reduction_across_nodes_is_shared_by_their_gpus():
    net = row((8.0, 0.0, 10.0))
    found = partition(net, [Level(2, 10.0), Level(2, 1.0)])
    inner = (8 + 4 * 1 * 10 / (10.0 * 2)) / 2
    assert found.pipeline_time_s == pytest.approx((inner + 4 * 1 * 10 / (1.0 * 2) / 2) / 2)
    assert found.stages[0].replicas_by_level == (2, 2)


def test_memory_holds_a_version_per_minibatch_in_flight():
    net = row((1.0, 1.0, 9.0), (1.0, 1.0, 9.0))
    found = partition(net, [Level(2, 1e9)], straight=True)
    assert [(s.in_flight, s.memory_bytes) for s in found.stages] == [(2, 20.0), (1, 10.0)]
    assert found.in_flight == 2
    assert replicas(partition(net, [Level(2, 1e9)], memory=20.0)) == [1, 1]
    with pytest.raises(PipelineError, match=r"^no pipeline on 2 GPUs keeps to 19 bytes"):
        partition(net, [Level(2, 1e9)], memory=19.0)


def test_of_equal_plans_the_one_with_fewest_stages_then_least_output():
    net = row((4.0, 0.0, 0.0), (1.0, 9.0, 1e9), (1.0, 2.0, 1e9), (1.0, 9.0, 1e9), (1.0, 0.0, 1e9))
    found = partition(net, [Level(3, 1.0)], straight=True)
    assert found.pipeline_time_s == 4.0
    cuts = [stage.layers for stage in found.stages]
    # 4 | 1 1 | 1 1: three stages, and of the cuts after n1, n2 and n3 the lightest.
    assert cuts == [("n0",), ("n1", "n2"), ("n3", "n4")]


def test_branches_are_cut_together():
    """Two branches: five states hold the first layer; the outputs of both cross in between."""
    names = ["in", "left", "right", "join"]
    net = LayerProfile(
        tuple(Layer(n, 1.0, 1.0, 10.0, 0.0) for n in names),
        (("in", "left"), ("in", "right"), ("left", "join"), ("right", "join")),
    )
    known = model_cuts.states(net, limit=100)
    assert len(known) == 1 + 5
    assert known.complete
    outputs = dict(zip([s.bit_count() for s in known.sets], known.output_bytes, strict=True))
    assert outputs == {0: 0.0, 1: 10.0, 2: 20.0, 3: 20.0, 4: 10.0}
    few = partition(net, [Level(2, 1.0)], limit=4)
    assert not few.exact
    assert few.bound_s == 4.0


def test_more_layers_than_the_limit_are_thinned_to_the_lightest_cuts():
    net = row(*[(1.0, 5.0 if i % 3 else 1.0, 0.0) for i in range(30)])
    known = model_cuts.states(net, limit=10)
    assert not known.complete
    assert len(known) == 1 + 10
    assert set(known.output_bytes[1:-1].tolist()) == {1.0}
    assert partition(net, [Level(2, 1e3)], limit=10).states == 10


def test_layers_without_cost_still_use_machines():
    net = row((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    found = partition(net, [Level(4, 1.0)], compression=1.0)
    assert found.pipeline_time_s == 0.0
    assert sum(replicas(found)) == 4


def test_a_straight_pipeline_over_three_levels_of_links():
    net = row(*[(1.0, 1.0, 1.0)] * 8)
    found = partition(net, [Level(2, 1e3), Level(2, 1e2), Level(2, 1e1)], straight=True)
    assert found.pipeline_time_s == 1.0
    assert replicas(found) == [1] * 8
    assert [s.in_flight for s in found.stages] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [len(widths) for widths in found.replication_by_level] == [8, 4, 2]


@pytest.mark.parametrize(
    ("levels", "options", "said"),
    [
        ([], {}, "no machines: give at least one level"),
        ([Level(0, 1.0)], {}, "0 machines on a level: give 1-256"),
        ([Level(257, 1.0)], {}, "257 machines on a level: give 1-256"),
        ([Level(2, 0.0)], {}, "bandwidth 0: must be above 0, in bytes/s"),
        ([Level(2, 1e-300)], {}, "bandwidth 1e-300: give 1e-06 or more, in bytes/s"),
        ([Level(2, math.nan)], {}, "bandwidth nan: must be above 0"),
        ([Level(2, math.inf)], {}, "bandwidth inf: must be above 0"),
        ([Level(2, 1.0)], {"memory": -1.0}, "memory -1: must be above 0, in bytes"),
        ([Level(2, 1.0)], {"compression": 0.0}, "compression 0: must be above 0"),
        ([Level(2, 1.0)], {"limit": 0}, "a limit of 0 states: give at least 1"),
    ],
)
def test_invalid_arguments_are_refused(levels, options, said):
    with pytest.raises(ArgumentError) as caught:
        partition(row((1.0, 1.0, 1.0)), levels, **options)
    assert str(caught.value).startswith(said)


def test_absurd_costs_stay_finite():
    net = row(*[(1e18, 1e18, 1e18)] * 20)
    found = partition(net, [Level(4, 1e-6), Level(4, 1e-6)], compression=1e-6)
    assert math.isfinite(found.pipeline_time_s)
    with pytest.raises(LayerError, match=r"layer big: forward_s 2e\+18 is invalid: expected 0"):
        Layer("big", 2e18, 0.0, 0.0, 0.0)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(PipelineError, match=r"no straight pipeline of 3 stages: .* 2 layers"):
        partition(row((1.0, 1.0, 1.0), (1.0, 1.0, 1.0)), [Level(3, 1.0)], straight=True)


def test_tables_that_would_not_fit_are_refused_at_once():
    net = row(*[(1.0, 1.0, 1.0)] * 600)
    with pytest.raises(PipelineError, match=r"256 machines on level 1 and 601 states need 0\.7 GB"):
        partition(net, [Level(256, 1.0), Level(2, 1.0)])
