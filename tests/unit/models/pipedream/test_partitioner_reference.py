"""Equal to what PipeDream's published optimiser computes (data/pipedream/oracle.json)."""

import json

import numpy as np
import pytest

from slurm_elastic.models.pipedream import model_cuts, profile_reader
from slurm_elastic.models.pipedream.partitioner import Level, partition
from tests.support import published_data

DATA = published_data.require("pipedream")


def cases():
    """The runs of the original; without them one test that is skipped and says why."""
    try:
        path = published_data.locate("pipedream", "oracle.json") / "oracle.json"
    except published_data.MissingDataError as error:
        return [pytest.param(None, id="none", marks=pytest.mark.skip(str(error)))]
    return json.loads(path.read_text())


def read(model):
    return profile_reader.read(DATA / "profiles" / f"{model}.txt")


def name(case):
    shape = "x".join(map(str, case["all_num_machines"]))
    speeds = "-".join(f"{b / 1e9:g}" for b in case["network_bandwidths"])
    return f"{case['model']}-{shape}-{speeds}-{case['activation_compression_ratio']}"


@pytest.mark.parametrize("case", cases(), ids=name)
def test_objective_and_replication(case):
    levels = [
        Level(n, b)
        for n, b in zip(case["all_num_machines"], case["network_bandwidths"], strict=True)
    ]
    profile = read(case["model"])
    found = partition(profile, levels, compression=case["activation_compression_ratio"])
    assert found.exact
    assert found.pipeline_time_s == pytest.approx(case["pipeline_time_s"], rel=1e-9)
    assert found.data_parallel_time_s == pytest.approx(case["dp_time_s"], rel=1e-9)
    if case["single_time_s"] is not None:
        assert found.single_time_s == pytest.approx(case["single_time_s"], rel=1e-9)
    # Our states are the published ones: the last stage ends at the last of them.
    assert found.states == case["stages_by_level"]["1"][-1][1]
    theirs = [case["replication_by_level"][str(i + 1)] for i in range(len(levels))]
    ours = [list(widths) for widths in found.replication_by_level]
    if ours != theirs:
        tied = best_with(profile, levels, theirs, case["activation_compression_ratio"])
        assert tied == pytest.approx(case["pipeline_time_s"], rel=1e-9), (ours, theirs)
        assert len(ours[-1]) <= len(theirs[-1])


@pytest.mark.parametrize(
    ("model", "gpus", "bandwidth", "conf"),
    [
        ("vgg16", 4, 1e9, "vgg16-4"),
        ("vgg16", 8, 1.25e9, "vgg16-8"),
        ("vgg16", 16, 3.125e9, "vgg16-16"),
        ("alexnet", 16, 1.25e9, "alexnet-16"),
        ("gnmt", 4, 1e9, "gnmt-4"),
    ],
)
def test_published_partitions(model, gpus, bandwidth, conf):
    ranks = json.loads((DATA / "published" / f"{conf}-hybrid_conf.json").read_text())
    published = [len(r) for _, r in sorted(ranks["stage_to_rank_map"].items())]
    found = partition(read(model), [Level(gpus, bandwidth)], compression=1.0)
    assert [stage.replicas for stage in found.stages] == published


@pytest.mark.parametrize("model", ["squeezenet1_0", "resnet18", "resnet50"])
def test_the_approximation_is_near(model):
    profile = read(model)
    for levels in ([Level(4, 1e9)], [Level(16, 3.125e9)], [Level(4, 1e10), Level(4, 1.25e9)]):
        exact = partition(profile, levels)
        near = partition(profile, levels, limit=exact.states - 1)
        assert not near.exact
        assert near.bound_s <= exact.pipeline_time_s * (1 + 1e-12)
        assert exact.pipeline_time_s <= near.pipeline_time_s * (1 + 1e-12)
        assert near.pipeline_time_s <= exact.pipeline_time_s * 1.01


def test_a_source_may_be_placed_on_its_own():
    levels = [Level(16, 3.125e9)]
    bound, free = (partition(read("gnmt"), levels, free_sources=f) for f in (False, True))
    assert (bound.states, free.states) == (99, 561)
    assert free.pipeline_time_s < 0.97 * bound.pipeline_time_s


def best_with(profile, levels, replication, compression):
    """Seconds of the best plan with this replication, by plain formulas: shows a tie."""
    known = model_cuts.states(profile, limit=5000)
    count = len(known)
    below = known.below(0, count)
    parameters = known.parameter_bytes[None, :] - known.parameter_bytes[:, None]
    compute = known.compute_s[None, :] - known.compute_s[:, None]

    def crossing(bandwidth, r):
        if compression is None:
            return np.zeros((count, count))
        seconds = 2 * known.output_bytes / (bandwidth * r * compression)
        leaving = np.where(np.arange(count) == count - 1, 0.0, seconds)
        return np.maximum(seconds[:, None], leaving[None, :])

    def reduced(value, bandwidth, r, shared):
        return (value + 4 * (r - 1) * parameters / (bandwidth * r) / shared) / r

    def sequence(values, widths, bandwidth, shared):
        """Of each range the seconds of stages with these replicas and these V."""
        total = np.where(below, reduced(values[0], bandwidth, widths[0], shared), np.inf)
        for value, r in zip(values[1:], widths[1:], strict=True):
            last = np.where(
                below,
                np.maximum(reduced(value, bandwidth, r, 1), crossing(bandwidth, r)),
                np.inf,
            )
            total = np.array([np.maximum(row[:, None], last).min(axis=0) for row in total])
        return total

    if len(levels) == 1:
        (widths,) = replication
        return sequence([compute] * len(widths), widths, levels[0].bandwidth, 1)[0, -1]
    inner, outer = levels
    groups, used = [[]], 0
    for r in replication[0]:
        if used == inner.machines:
            groups.append([])
            used = 0
        groups[-1].append(r)
        used += r
    values = [sequence([compute] * len(g), g, inner.bandwidth, 1) for g in groups]
    return sequence(values, replication[1], outer.bandwidth, inner.machines)[0, -1]
