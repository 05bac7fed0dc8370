"""A profile that its owner sends: what it changes, and what it cannot."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.controller.server import profile_import
from slurm_elastic.controller.server.request_dispatcher import RequestRefusedError
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.core.cluster import Allocation, JobState, Node, Snapshot
from slurm_elastic.core.report import Report
from slurm_elastic.models.colocation.shared_speeds import MeasuredUse
from slurm_elastic.profiler.profile_file import (
    MeasuredTime,
    ProfiledConfiguration,
    ProfiledUse,
    StepProfile,
    to_body,
)
from tests.support.controller.job_records import job

NODES = tuple(Node(name=f"n{i}", gpu_type="a100", gpus=4) for i in (1, 2))


def configured(gpus, nodes=1, *, waits=0.0, kind="a100", compute=0.5, prep=0.1):
    return ProfiledConfiguration(
        gpu_type=kind, nodes=nodes, gpus=gpus, batch=16, repeats=3,
        compute=MeasuredTime(compute, 0.01),
        interconnect=MeasuredTime(waits if nodes == 1 else 0.0),
        network=MeasuredTime(waits if nodes > 1 else 0.0),
        prep=MeasuredTime(prep, 0.01), fetch=MeasuredTime(9.0, 0.1),
    )  # fmt: skip


def body(*configurations, **fields):
    rows = configurations or (configured(1), configured(4, waits=0.2), configured(4, 2, waits=1.0))
    return to_body(StepProfile(configurations=rows, application="", **fields))


def waiting(user="alice", name="net", job_id=7):
    return job(job_id=job_id, name=name, user=user, directive="1-8")


def record(store, of):
    return store.records(Snapshot(time=1000.0, nodes=NODES, jobs=(of,)), {})[of.job_id]


def test_what_a_training_uses_of_a_node_is_that_of_its_largest_shape_there():
    uses = [ProfiledUse(busy_cpus=n, gpu_busy=2.0 if n == 2.0 else 0.5) for n in (1.0, 2.0, 9.0)]
    shapes = [configured(1), configured(4), configured(8, 2)]
    rows = [replace(shape, use=use) for shape, use in zip(shapes, uses, strict=True)]
    assert profile_import.use_of(body(*rows)) == MeasuredUse(cpus=2.0)
    assert profile_import.use_of(body()) == MeasuredUse()
    assert profile_import.use_of(body(configured(8, 2))) == MeasuredUse()
    wrong = body(*rows)
    wrong["configurations"][0]["use"]["busy_cpus"] = -1
    with pytest.raises(
        RequestRefusedError, match=r"configurations\[0\].use.busy_cpus: -1 is invalid"
    ):
        profile_import.use_of(wrong)


def test_a_job_that_has_not_run_is_known_by_its_profile():
    store, of = JobStore(Ledger(":memory:")), waiting()
    assert record(store, of).learned is None
    observations, text = profile_import.observations_of(body(), {"a100"})
    assert text == "3 configurations learned"
    store.import_observations(of, observations)
    known = record(store, of)
    seen = {(m.gpus, m.nodes): m for m in known.measurements}
    assert set(seen) == {(1, 1), (4, 1)}  # which racks two nodes were in is not in a profile
    assert (seen[4, 1].compute_s, seen[4, 1].sync_s) == (0.5, pytest.approx(0.2))
    assert seen[4, 1].samples_per_s == pytest.approx(4 * 16 / 0.8)
    assert [t.single for t in known.learned.application.types] == [pytest.approx(16 / 0.6)]
    observations, _ = profile_import.observations_of(body(), {"a100"})
    found = {(p.gpus, p.nodes): (p.step_s, p.micro_step_s) for p in observations.points.values()}
    assert found == {
        (1, 1): (0.6, 0.6), (4, 1): pytest.approx((0.8, 0.6)), (4, 2): pytest.approx((1.6, 0.6)),
    }  # fmt: skip


def test_nobody_else_is_told_and_a_jobs_own_measurements_come_first():
    store, of = JobStore(Ledger(":memory:")), waiting()
    for other in (waiting(user="bob", job_id=8), waiting(name="other", job_id=9)):
        store.import_observations(of, profile_import.observations_of(body(), {"a100"})[0])
        assert record(store, other).learned is None
        assert record(store, other).measurements == ()
    held = Allocation.of("a100", {"n1": 1})
    runs = job(
        job_id=7, name="net", directive="1-8", allocation=held, state=JobState.RUNNING, gpus=1
    )
    said = Report(
        job_id=7, run=0, phase="training", gpus=1, global_batch=16, step_time_s=2.0,
        steps_measured=10, micro_batch=16, accumulation=0, micro_step_s=2.0, initial_batch=16,
    )  # fmt: skip
    store.record_report(said, runs, 1.0)
    (own,) = record(store, runs).measurements
    assert own.samples_per_s == pytest.approx(8.0)


def test_it_survives_a_restart(tmp_path):
    path, of = tmp_path / "ledger", waiting()
    store = JobStore(Ledger(path))
    store.import_observations(of, profile_import.observations_of(body(), {"a100"})[0])
    store.observe(Snapshot(time=1000.0, nodes=NODES, jobs=(of,)))
    known = record(JobStore(Ledger(path)), of)
    assert len(known.measurements) == 2
    assert known.learned.application.batch == 64


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (None, "profile: the file: None is invalid"),
        ([], "profile: the file"),
        ({}, "profile: None is invalid"),
        (body() | {"configurations": 7}, "configurations"),
        (body(configured(1, kind="b200")), r"no configuration on a GPU type.*a100"),
        (body(configured(1, compute=1e9)), "no configuration"),
    ],
)
def test_what_is_no_profile_is_refused_in_one_line(wrong, line):
    with pytest.raises(RequestRefusedError, match=line) as caught:
        profile_import.observations_of(wrong, {"a100"})
    assert "\n" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("profile", "application", "configurations", "layers")
INNER = ("gpu_type", "nodes", "gpus", "batch", "repeats", "compute", "interconnect", "prep")


@given(st.sampled_from(FIELDS + INNER), JSON)
def test_whatever_is_sent_is_learned_or_refused(name, value):
    sent = json.loads(json.dumps(body()))
    (sent if name in FIELDS else sent["configurations"][1])[name] = value
    try:
        observations, _ = profile_import.observations_of(sent, {"a100"})
    except RequestRefusedError:
        return
    again = type(observations).from_body(json.loads(json.dumps(observations.to_body())))
    assert list(again.points) == list(observations.points)  # the ledger can hold it
    assert again.shapes == observations.shapes


def test_a_large_profile_is_bounded():
    rows = [configured(g) for g in range(1, 400)]
    observations, _ = profile_import.observations_of(body(*rows), {"a100"})
    assert len(observations.points) <= 128
    assert len(observations.shapes) <= 128
