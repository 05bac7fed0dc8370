"""Execution plans of a model that only a layer profile describes."""

import doctest

import pytest

from slurm_elastic.core.layers import Layer, chain
from slurm_elastic.models.execution import profile_plans
from slurm_elastic.models.execution.profile_plans import ProfiledCluster, profiled_plans
from slurm_elastic.models.pipedream.partitioner import Level, partition

NET = chain(Layer(f"block{i}", 0.01, 0.02, 4e6, 1e8) for i in range(4))


def plans(cluster, **values):
    rows = profiled_plans(NET, cluster, **({"samples": 8, "batch": 32} | values))
    return {str(row.plan): row for row in rows}


def test_examples():
    assert doctest.testmod(profile_plans).failed == 0


def test_numbers_of_gpus_are_powers_of_two_and_whole_nodes():
    cluster = ProfiledCluster(node_gpus=6, nodes=3)
    assert cluster.sizes() == [(1,), (2,), (4,), (6,), (6, 6), (6, 6, 6)]
    assert ProfiledCluster(node_gpus=1).sizes() == [(1,)]


def test_step_times_are_those_of_the_partitioner_where_both_have_one():
    by_plan = plans(ProfiledCluster(node_gpus=4, bandwidths=((4, 1e9),)))
    result = partition(NET, [Level(4, 1e9)])
    # A step has 32 samples: one minibatch of 8 on each of the four.
    assert by_plan["4x1"].step_s == pytest.approx(4 * result.data_parallel_time_s)
    assert by_plan["1x4"].step_s == pytest.approx(4 * 0.03)
    assert by_plan["2x2"].step_s == pytest.approx(2 * 0.06 + 4 * 2e8 / 2e9)
    assert by_plan["4x1+shard=full"].step_s is None


def test_links_between_nodes_count_where_gpus_of_several_are_used():
    cluster = ProfiledCluster(node_gpus=2, nodes=2, bandwidths=((2, 1e10), (4, 1e9)))
    by_plan = plans(cluster)
    assert by_plan["2x1"].step_s == pytest.approx(2 * 0.12 + 2 * 4e8 / 1e10)
    assert by_plan["4x1"].step_s == pytest.approx(0.12 + 3 * 4e8 / 1e9)
    assert "1x1+tensor=4" not in by_plan  # ranks that share weights are on one node
    assert plans(ProfiledCluster(node_gpus=2))["2x1"].step_s is None


def test_a_plan_that_does_not_fit_gets_micro_batches_or_is_left_out():
    cluster = ProfiledCluster(node_gpus=2)
    whole = plans(cluster)["2x1"].memory_bytes
    assert whole == pytest.approx(4 * 4e8 + 16 * 4 * 4e6 / 8)
    assert plans(cluster, gpu_bytes=whole)["2x1"].memory_bytes == whole
    fewer = plans(cluster, gpu_bytes=whole - 1)
    assert "2x1" not in fewer
    assert fewer["2x1+accumulation=1"].memory_bytes < whole
    least = plans(cluster, gpu_bytes=9e8)
    assert least
    assert not any(name.startswith("2x1") and "shard" not in name for name in least)
