"""Merging of profiles: configurations that are compared, left out, or contradictory."""

import math
import statistics
from dataclasses import replace

import pytest

from slurm_elastic.profiler.profile_file import MeasuredTime, ProfiledConfiguration, StepProfile
from slurm_elastic.profiler.profile_merge import ComparisonError, comparable, merged, subjects


def at(gpus, *, nodes=1, batch=64, repeats=3, compute=0.2, spread=0.002, gpu_type="a100", **stalls):
    stall_seconds = {"interconnect": 0.01, "network": 0.02, "prep": 0.0, "fetch": 0.05} | stalls
    return ProfiledConfiguration(
        gpu_type=gpu_type,
        nodes=nodes,
        gpus=gpus,
        batch=batch,
        repeats=repeats,
        compute=MeasuredTime(compute, spread),
        **{k: None if v is None else MeasuredTime(v, spread) for k, v in stall_seconds.items()},
    )


def net(*configured, **facts):
    return StepProfile(application="app", model="net", configurations=configured, **facts)


def compared(*profiles, **options):
    named = [(f"{'abcdef'[i]}.json", p) for i, p in enumerate(profiles)]
    return comparable(subjects(named)["net"], **options)


def test_a_profile_becomes_one_offer_per_configuration():
    merged_profiles = compared(net(at(8, nodes=2), at(1, interconnect=0.0, network=0.0)))
    assert [str(o.configuration) for o in merged_profiles.offers] == [
        "1 a100 on 1 node",
        "8 a100 on 2 nodes",
    ]
    wide = merged_profiles.offers[1].times
    assert (wide.compute_s, wide.interconnect_s, wide.network_s) == (0.2, 0.01, 0.02)
    assert wide.warm_s == pytest.approx(0.23)
    # Four parts of a warm step, each known to 2 ms.
    assert wide.spread_s == pytest.approx(0.004)
    assert (merged_profiles.batch, merged_profiles.unknown, merged_profiles.left_out) == (
        "64 samples per GPU",
        (),
        (),
    )


def test_single_measurements_are_left_out_unless_requested():
    profile = net(at(1), at(4, repeats=1, spread=math.nan))
    merged_profiles = compared(profile)
    assert [o.configuration.gpus for o in merged_profiles.offers] == [1]
    assert merged_profiles.left_out == (
        (
            "4 a100 on 1 node (a.json): measured once, so its spread is unknown; repeat it,"
            " or give --once"
        ),
    )
    taken = compared(profile, once=True)
    assert [o.configuration.gpus for o in taken.offers] == [1, 4]
    assert math.isnan(taken.offers[1].times.spread_s)
    with pytest.raises(ComparisonError, match=r"net: .* measured once.*give --once"):
        compared(net(at(4, repeats=1)))


def test_the_batch_of_most_configurations_is_compared():
    profile = net(at(1), at(4), at(4, batch=32), at(1, batch=128))
    merged_profiles = compared(profile)
    assert {o.configuration.batch for o in merged_profiles.offers} == {64}
    assert merged_profiles.left_out == (
        (
            "2 of 4 configurations, with 32, 128 instead of 64 samples per GPU; choose with --batch"
            " or --global-batch"
        ),
    )
    assert [o.configuration.batch for o in compared(profile, batch=32).offers] == [32]
    with pytest.raises(
        ComparisonError, match=r"--batch: nothing .* 5 samples per GPU; known: 32, 64, 128"
    ):
        compared(profile, batch=5)


def test_configurations_of_one_global_batch_are_compared():
    profile = net(at(1, batch=256), at(2, batch=128), at(4), at(8))
    merged_profiles = compared(profile)
    assert merged_profiles.batch == "256 samples per step"
    assert [o.configuration.gpus for o in merged_profiles.offers] == [1, 2, 4]
    assert merged_profiles.left_out[0].startswith(
        "1 of 4 configurations, with 512 instead of 256 samples"
    )
    assert len(compared(profile, batch=64).offers) == 2
    assert len(compared(profile, global_batch=512).offers) == 1
    with pytest.raises(ComparisonError, match=r"--global-batch: nothing .* known: 256, 512"):
        compared(profile, global_batch=64)


def test_configurations_without_a_stall_that_others_know_are_left_out():
    merged_profiles = compared(net(at(1), at(4, prep=None, fetch=None), at(2, network=None)))
    assert [o.configuration.gpus for o in merged_profiles.offers] == [1, 2]
    assert merged_profiles.left_out == (
        "4 a100 on 1 node: prep and fetch unknown, but known for others",
    )
    nobody = compared(net(at(1, fetch=None), at(4, fetch=None)))
    assert (len(nobody.offers), nobody.unknown) == (2, ("fetch",))


def test_a_single_node_needs_no_network_stall():
    merged_profiles = compared(net(at(1, interconnect=None, network=None), at(8, nodes=2)))
    assert len(merged_profiles.offers) == 2
    assert compared(net(at(1, interconnect=None, network=None))).unknown == ()


def test_repeats_in_two_files_are_one_sample():
    runs = [[0.200, 0.204, 0.199], [0.203, 0.198]]

    def measured(values):
        error = statistics.stdev(values) / math.sqrt(len(values))
        return at(1, repeats=len(values), compute=statistics.mean(values), spread=error)

    files = [(name, net(measured(v))) for name, v in zip("ab", runs, strict=True)]
    (row,) = merged("net", subjects(files)["net"].rows)
    everything = runs[0] + runs[1]
    assert row.measured.repeats == 5
    assert row.measured.compute.seconds == pytest.approx(statistics.mean(everything))
    assert row.measured.compute.spread == pytest.approx(statistics.stdev(everything) / math.sqrt(5))


def test_a_copy_of_a_file_counts_once():
    files = net(at(1), at(4)), net(at(1), at(4, compute=0.201)), net(at(1))
    merged_profiles = compared(*files)
    assert [merged_profiles.repeats[o.configuration] for o in merged_profiles.offers] == [3, 6]
    assert merged_profiles.left_out == ("b.json, c.json: a copy of measurements in another file",)


def test_stalls_of_several_nodes_that_were_not_separated():
    unseparated = at(16, nodes=2, interconnect=None, network=0.05)
    merged_profiles = compared(net(at(4), unseparated))
    assert [o.configuration.gpus for o in merged_profiles.offers] == [4, 16]
    assert merged_profiles.offers[1].times.warm_s == pytest.approx(0.25)
    unknown = at(16, nodes=2, interconnect=None, network=None)
    assert compared(net(at(4), at(8, nodes=2), unknown)).left_out == (
        "16 a100 on 2 nodes: interconnect and network unknown, but known for others",
    )


def test_contradicting_profiles_are_an_error():
    same = compared(net(at(1)), net(at(1, compute=0.203)))
    assert same.offers[0].times.compute_s == pytest.approx(0.2015)
    with pytest.raises(ComparisonError) as caught:
        compared(net(at(1)), net(at(1, compute=0.23)))
    assert str(caught.value) == (
        "a.json and b.json contradict each other: compute of net on 1 a100 on 1 node takes 200 ms a"
        " step in one and 230 ms in the other, a difference beyond their spread; leave out the"
        " wrong one, or measure again"
    )
    with pytest.raises(ComparisonError, match="network of net on 4 a100 on 2 nodes"):
        compared(net(at(4, nodes=2)), net(at(4, nodes=2, network=0.06)))
    # A wide spread explains it.
    compared(net(at(1, spread=0.01)), net(at(1, compute=0.23, spread=0.01)))


def test_layers_and_samples_come_from_any_file():
    model = subjects([("a", net(at(1), layers=50)), ("b", net(at(2), samples=9))])["net"]
    assert (model.layers, model.samples, model.gradient_bytes) == (50, 9, None)
    files = [("a", net(at(1), samples=9)), ("b", net(at(2), samples=10))]
    with pytest.raises(ComparisonError, match=r"a and b contradict .* 9 samples .* give --samples"):
        subjects(files)
    assert subjects(files, samples=7)["net"].samples == 7


def test_models_of_one_class_are_separated_by_their_size():
    small = net(at(1), layers=18, gradient_bytes=5e7)
    large = net(at(1, compute=0.9), layers=50, gradient_bytes=1e8)
    named = [replace(small, application="r18"), replace(large, application="r50")]
    files = [("a.json", named[0]), ("b.json", named[1]), ("c.json", replace(named[0], samples=3))]
    models = subjects(files)
    assert list(models) == ["net of r18", "net of r50"]
    assert (models["net of r18"].layers, models["net of r50"].layers) == (18, 50)
    assert [r.source for r in models["net of r18"].rows] == ["a.json", "c.json"]
    assert list(subjects([("a.json", small), ("b.json", large)])) == [
        "net of a.json",
        "net of b.json",
    ]


def test_models_without_a_name_are_named_after_application_or_file():
    files = [("x.json", StepProfile(application="job")), ("y.json", StepProfile(application=""))]
    assert list(subjects(files)) == ["job", "y.json"]
