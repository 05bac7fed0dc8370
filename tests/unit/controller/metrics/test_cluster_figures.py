"""Figures that Prometheus gets, of the example round."""

import dataclasses

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.metrics import metric_definitions as metrics
from slurm_elastic.controller.metrics.cluster_figures import figures
from slurm_elastic.controller.queries.view import View
from slurm_elastic.core.cluster import Allocation, Job, JobState, Node, Reservation, Snapshot
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import JobRecord
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.submission import Submission

NODES = (
    Node(name="g1", gpu_type="a100", gpus=4, used_gpus=3),
    Node(name="g2", gpu_type="a100", gpus=4, available=False),
    Node(name="g3", gpu_type="v100", gpus=4, used_gpus=0),
)


def job(job_id, directive="", **fields):
    submission = Submission(Directive.parse(directive)) if directive else None
    values = {"name": "x", "user": "alice", "uid": 2001, "partition": "gpu",
              "state": JobState.RUNNING, "submission": submission}  # fmt: skip
    return Job(job_id=job_id, display_id=str(job_id), **(values | fields))


JOBS = (
    job(1, "1-4", allocation=Allocation.of("a100", {"g1": 2})),
    job(2, allocation=Allocation.of("a100", {"g1": 1})),
    job(3, "2-65536", state=JobState.PENDING),
    job(4, state=JobState.PENDING, gpus=3, gpu_type='evil"\n'),
)


def exported(now=1000.0, **fields):
    view = View(snapshot=Snapshot(time=990.0, nodes=NODES, jobs=JOBS), **fields)
    return {d.name: dict(values) for d, values in figures(view, Config(), now)}


def test_gpus_of_each_type_by_use():
    assert exported()["gpus"] == {
        ("a100", "elastic"): 2, ("a100", "rigid"): 1, ("a100", "idle"): 1,
        ("a100", "unavailable"): 4, ("v100", "elastic"): 0, ("v100", "rigid"): 0,
        ("v100", "idle"): 4, ("v100", "unavailable"): 0,
    }  # fmt: skip


def test_a_huge_max_counts_as_the_cluster():
    assert exported()["gpus_wanted"] == {(): 2 + 12}


def test_pending_gpus_are_the_min_of_elastic_jobs():
    assert exported()["gpus_pending"] == {("elastic",): 2, ("rigid",): 3}


def test_a_type_that_no_node_has_is_no_label():
    elsewhere = job(5, allocation=Allocation.of('evil"\n', {"g9": 1}))
    view = View(snapshot=Snapshot(time=0.0, nodes=NODES, jobs=(elsewhere,)))
    values = {d.name: dict(v) for d, v in figures(view, Config(), 1.0)}
    assert {gpu_type for gpu_type, _ in values["gpus"]} == {"a100", "v100", "any"}


def test_jobs_held_by_the_guard_and_leases():
    records = {
        3: JobRecord(job_id=3, stopped=Reason("no-progress", attempts=2, step=1), leased=True),
        1: JobRecord(job_id=1, on_trial=5.0),
    }
    values = exported(records=records)
    assert values["jobs_stopped"] == values["leases"] == values["jobs_on_trial"] == {(): 1}


def test_age_of_the_lease_that_was_renewed_longest_ago():
    waiting = [
        job(i, "1-4", state=JobState.PENDING, begin_time=1000.0 + left)
        for i, left in ((5, 290), (6, 40))
    ]
    records = {j.job_id: JobRecord(job_id=j.job_id, leased=True) for j in waiting}
    view = View(snapshot=Snapshot(time=1.0, nodes=NODES, jobs=tuple(waiting)), records=records)
    values = {d.name: dict(v) for d, v in figures(view, Config(), 1000.0)}
    assert values["lease_length_seconds"] == {(): 300.0}
    assert values["lease_oldest_seconds"] == {(): 260.0}


def test_age_of_snapshot_and_of_own_reservations():
    view = View(snapshot=Snapshot(time=990.0, nodes=NODES, jobs=JOBS))
    own = Reservation(name="selastic_1", nodes=("g1",), start_time=400.0, end_time=2e3, ours=True)
    foreign = Reservation(name="other", nodes=("g2",), start_time=1.0, end_time=2e3)
    snapshot = dataclasses.replace(view.snapshot, reservations=(own, foreign))
    view = dataclasses.replace(view, snapshot=snapshot)
    values = {d.name: dict(v) for d, v in figures(view, Config(), 1000.0)}
    assert values["reservations"] == {(): 1}
    assert values["reservation_oldest_seconds"] == {(): 600.0}
    assert values["snapshot_age_seconds"] == {(): 10.0}


def test_each_defined_metric_is_exported_with_its_labels():
    view = View(snapshot=Snapshot(time=990.0, nodes=NODES, jobs=JOBS))
    given = list(figures(view, Config(), 1000.0))
    assert tuple(d for d, _ in given) == metrics.OF_CLUSTER
    assert all(len(key) == len(d.labels) for d, values in given for key in values)
