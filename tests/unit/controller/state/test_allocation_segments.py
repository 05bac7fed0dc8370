"""Segments of the ledger over the runs of a job."""

import pytest

from slurm_elastic.controller.state.allocation_segments import (
    AllocationSegments,
    base_of_segment,
)
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.core.cluster import Companion, JobState, Snapshot
from tests.support.controller.job_records import allocation, job


@pytest.fixture
def ledger():
    return Ledger(":memory:")


def observe(segments, job_of_snapshot, *, at):
    snapshot = Snapshot(time=at, nodes=(), jobs=(job_of_snapshot,))
    alive = {j.key: j for j in snapshot.jobs if j.state is not JobState.ENDED}
    segments.observe(snapshot, alive)


def rows(ledger):
    return [(r["gpus"], r["start"], r["end"]) for r in ledger.segments()]


def test_each_run_has_a_segment_from_its_start_to_its_end(ledger):
    segments = AllocationSegments(ledger)
    observe(segments, job({"n1": 1}, start_time=900.0), at=1000.0)
    observe(segments, job({"n1": 4}, start_time=1100.0, run=1), at=1100.0)
    ended = job({"n1": 4}, run=1, state=JobState.ENDED, end_time=1500.0)
    observe(segments, ended, at=1600.0)
    assert rows(ledger) == [(1, 900.0, 1100.0), (4, 1100.0, 1500.0)]


def test_an_open_segment_goes_on_after_a_restart_of_the_controller(ledger):
    running = job({"n1": 2}, start_time=900.0)
    observe(AllocationSegments(ledger), running, at=1000.0)
    segments = AllocationSegments(ledger)
    observe(segments, running, at=1200.0)
    assert rows(ledger) == [(2, 900.0, None)]
    observe(segments, job(run=1), at=1300.0)
    assert rows(ledger) == [(2, 900.0, 1300.0)]


def test_companions_have_segments_of_their_own_that_count_for_their_base(ledger):
    segments = AllocationSegments(ledger)
    observe(segments, job({"n1": 1}, start_time=900.0), at=1000.0)
    companion = Companion(8, allocation({"n2": 2}), 1100.0)
    grown = job({"n1": 1, "n2": 2}, start_time=900.0, companions=(companion,))
    observe(segments, grown, at=1101.0)
    segments = AllocationSegments(ledger)  # a restart of the controller
    observe(segments, grown, at=1102.0)
    observe(segments, job({"n1": 1}, start_time=900.0), at=1200.0)
    assert rows(ledger) == [(1, 900.0, None), (2, 1100.0, 1200.0)]
    assert [r["job_id"] for r in ledger.segments()] == [7, 8]
    assert [base_of_segment(r) for r in ledger.segments()] == [7, 7]
