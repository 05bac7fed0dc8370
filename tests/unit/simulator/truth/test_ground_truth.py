"""Truth about applications: look-ups, batches, and the published vectors."""

import json

import pytest

from slurm_elastic.core.cluster import Allocation
from slurm_elastic.simulator.applications import describe
from slurm_elastic.simulator.simulated_job import SimulatedJob
from slurm_elastic.simulator.truth.ground_truth import GroundTruth
from slurm_elastic.simulator.workloads import application_profiles, cluster_text
from slurm_elastic.simulator.workloads.application_profiles import (
    ApplicationProfile,
    ApplicationProfileError,
    MeasuredCurve,
    TypeTable,
)
from slurm_elastic.simulator.workloads.workload import SubmittedJob
from tests.support import published_data
from tests.support.decisions.synthetic_applications import synthetic_application


@pytest.fixture(scope="module")
def vectors():
    data = published_data.require("sia", "reference/unit_vectors.json")
    return json.loads((data / "reference" / "unit_vectors.json").read_text())


@pytest.fixture(scope="module")
def truth():
    data = published_data.require("sia", "traces")
    names = ("bert", "cifar10", "deepspeech2", "imagenet", "yolov3")
    read = application_profiles.read(data / "traces", names, ("aws", "dgx-ext", "rtx"))
    return {name: GroundTruth(profile) for name, profile in read.items()}


def close(found, expected):
    assert found == pytest.approx(expected, rel=1e-6)


def test_published_look_ups(vectors, truth):
    assert len(vectors["throughput"]) == 120
    for v in vectors["throughput"]:
        application = truth[v["app"]]
        close(application.step(v["type"], v["placement"], v["local_bsz"]), (v["step"], v["sync"]))
        assert application.most(v["type"], v["placement"]) == v["max_local"]


def test_published_gains(vectors, truth):
    for v in vectors["gain"]:
        noise = truth[v["app"]].noise(v["batch"], v["epoch"])
        close((noise.sqr, noise.var), (v["sqr"], v["var"]))
        close(truth[v["app"]].gain(v["batch"], v["epoch"]), v["gain"])


def test_published_progress(vectors, truth):
    for v in vectors["progress"]:
        application = truth[v["app"]]
        assert application.profile.epochs == v["epochs"]
        close((application.targets[0], application.total), (v["first"], v["total"]))


def test_published_ratios(vectors, truth):
    for v in vectors["ratio"]:
        close(truth[v["app"]].single(v["type"]), v["xput1"])


@pytest.fixture
def net():
    return GroundTruth(synthetic_application("net"))


def test_between_measured_micro_batches_time_is_linear(net):
    (low, _), (middle, _), (high, _) = (net.step("t4", (1,), m) for m in (8, 12, 16))
    assert middle == pytest.approx((low + high) / 2)


def test_rotations_and_zeros_do_not_matter(net):
    assert net.step("t4", (4, 0, 2), 8) == net.step("t4", (2, 4), 8)


def test_accumulated_steps_do_not_synchronise(net):
    step, sync = net.step("t4", (2, 2), 8)
    rate = net.goodput("t4", (2, 2), 8, 2, 0)
    assert rate == pytest.approx(net.gain(96, 0) / (step + 2 * (step - sync)))


def test_a_larger_batch_is_worth_less_than_linear(net):
    assert net.gain(16, 0) == 1.0
    assert 1.0 < net.gain(64, 0) < net.gain(64, 2) < 4.0


def test_gains_of_all_epochs_at_once(net):
    for batch in (16, 40, 64, 256):
        assert net.gains(batch).tolist() == pytest.approx([net.gain(batch, e) for e in range(3)])


def test_the_first_batch_on_a_type_is_the_initial_one(net):
    assert net.first_batch("t4", (1,)) == (16, 0)
    assert net.first_batch("t4", (2, 2)) == (4, 0)
    # Eight replicas of at least four samples need more than the initial batch of 16.
    assert net.first_batch("a100", (8,)) == (4, 0)


def test_a_fixed_batch_is_split_over_replicas_and_steps(net):
    assert net.fixed_batch("t4", (2, 2), 64) == (16, 0)
    assert net.fixed_batch("t4", (2,), 256) == (32, 3)
    # A lone replica with more than the initial batch accumulates: it measures noise that way.
    assert net.fixed_batch("t4", (1,), 32) == (16, 1)


def test_no_batch_beyond_the_largest_validation_run(net):
    micro, steps = net.fixed_batch("a100", (8, 8), 100_000)
    assert 16 * micro * (steps + 1) <= 256


def test_rate_counts_iterations_of_the_fixed_batch(net):
    step, _ = net.step("t4", (2, 2), 16)
    assert net.rate("t4", (2, 2), 64) == pytest.approx(1 / step)


def test_pipelines_take_gpipe_time_and_scale_linearly():
    pipe = GroundTruth(synthetic_application("pipe", units={"t4": 4, "a100": 2}, micro_batches=8))
    forward, _ = pipe.step("t4", (4,), 1)
    assert pipe.iteration("t4", (4,), 1)[0] == pytest.approx(3 * (4 - 1 + 8) * forward)
    assert pipe.replicas("a100", (8, 8)) == 8
    assert pipe.batch("a100", (8, 8), 1, 0) == 64
    assert pipe.first_batch("t4", (4,)) == (1, 0)
    assert pipe.single("t4") == pytest.approx(8 / (33 * forward))


def test_micro_batches_that_were_not_measured_are_refused(net):
    with pytest.raises(ApplicationProfileError, match=r"placements-t4.csv.* 1 to 32, not at 64"):
        net.step("t4", (1,), 64)


def test_types_without_a_table_are_refused(net):
    with pytest.raises(
        ApplicationProfileError, match=r"no table for GPU type v100; add placements-v100"
    ):
        net.step("v100", (1,), 8)


def sparse(curves, scalability):
    """A profile with few rows, to interpolate between."""
    table = TypeTable("x", curves, scalability, least=1, most=8, source="net/placements-x.csv")
    runs = ((1.0,),)
    return GroundTruth(
        ApplicationProfile(
            name="net", batches=(8,), progress=runs, sqr=runs, var=runs, types={"x": table}
        )
    )


def test_shapes_without_rows_are_interpolated():
    rows = [
        (float(n), float(r), m, 0.1 * r + 0.01 * m, 0.02 * r)
        for n in (1, 3)
        for r in (2, 8)
        for m in (1.0, 8.0)
    ]
    truth = sparse({(1,): MeasuredCurve((1, 8), (0.1, 0.2), (0.0, 0.0))}, tuple(rows))
    step, sync = truth.step("x", (2, 2), 4)
    assert step == pytest.approx(0.44)
    assert sync == pytest.approx(0.08)


def test_outside_of_all_rows_more_gpus_do_not_help():
    curves = {
        (1,): MeasuredCurve((1, 8), (0.1, 0.2), (0.0, 0.0)),
        (2, 2): MeasuredCurve((1, 8), (0.2, 0.3), (0.1, 0.1)),
    }
    truth = sparse(curves, ())
    step, sync = truth.step("x", (2, 2, 2, 2), 8)
    assert (step, sync) == pytest.approx((0.6, 0.4))
    assert truth.step("x", (2,), 8) == pytest.approx((0.4, 0.2))
    assert truth.assumptions == (
        "net/placements-x.csv: placement 2 is not measured: taken to be no faster than 1",
        "net/placements-x.csv: placement 2+2+2+2 is not measured: taken to be no faster than 2+2",
    )
    with pytest.raises(ApplicationProfileError, match=r"has no row for placement 3 at local_bsz 9"):
        truth.step("x", (3,), 9)


def test_progress_that_cannot_be_is_an_error():
    truth = sparse({(1,): MeasuredCurve((1, 8), (-1.0, 0.2), (0.0, 0.0))}, ())
    with pytest.raises(ApplicationProfileError, match="would take -1 s per step; measure it"):
        truth.goodput("x", (1,), 1, 0, 0)


def test_the_pipeline_that_the_artifact_was_made_to_run():
    """Its tables filled in by hand, the artifact took 20,796 s and 137.8 GPU h for this job."""
    data = published_data.require("sia", "traces")
    truth = GroundTruth(
        application_profiles.read(data / "traces", ("gpt_pmp",), ("rtx",))["gpt_pmp"]
    )
    submitted = SubmittedJob(name="gpt_pmp-0", time_s=0.0, application="gpt_pmp", gpus=8, batch=384)
    described = describe(submitted, truth, cluster_text.parse("rtx:3x8"))
    assert str(described.directive) == "8-24,parallel=hybrid,unit=rtx:8"
    job = SimulatedJob(submitted, truth, described, job_id=1, restart_s=30.0)
    for at_s, nodes in ((60.0, 1), (120.0, 2), (180.0, 3)):
        job.advance(at_s)
        job.hold(Allocation("rtx", tuple((f"n{i}", 8) for i in range(nodes))))
    job.advance(1e6)
    assert job.completion_s == 20796.0
    assert round(job.gpu_s / 3600, 1) == 137.8
