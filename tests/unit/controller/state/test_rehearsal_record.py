"""Record of a job's rehearsal, and the time when another one may begin."""

import pytest

from slurm_elastic.controller.state.rehearsal_record import RehearsalRecord
from slurm_elastic.controller.state.stored_job import StoredJob
from slurm_elastic.core.report import Report
from tests.support.decisions.reasons import words


def report(**fields):
    return Report(job_id=7, **({"run": 0, "phase": "training", "kind": "script"} | fields))


def record_after(**fields):
    record = RehearsalRecord()
    record.record(report(**fields), now=0.0)
    return record


def test_each_new_checkpoint_of_a_job_that_waits_calls_for_a_round():
    record = RehearsalRecord()
    assert not record.record(report(), now=0.0)
    assert record.record(report(rehearsal="able", step=1), now=0.0)
    assert not record.record(report(rehearsal="able", step=1), now=0.0)
    assert record.record(report(rehearsal="able", step=2), now=0.0)
    record.end(5, 10.0, moved=True)
    assert not record.record(report(rehearsal="able", step=3), now=11.0)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"rehearsal": "refuted", "kept_in": "/home/a/kept"}, "/home/a/kept"),
        ({"rehearsal": "refuted"}, "option to resume"),
        ({"rehearsal": "failed"}, "see the job's log"),
        (
            {"rehearsal": "no-room", "kept_in": "/data", "kept_bytes": 12_340_000_000},
            "free 12.3 GB in /data",
        ),
        (
            {"rehearsal": "no-room", "kept_in": "/small", "kept_bytes": 33_940_000},
            "free 33.9 MB in /small",
        ),
        ({"rehearsal": "no-room"}, "free room in the directory"),
        ({"rehearsal": "not-writable", "kept_in": "/data"}, "make /data writable"),
        ({"rehearsal": "changes"}, "save less often"),
        (
            {"rehearsal": "accumulation", "needed_micro_batches": 4},
            "submit it again with esrun --micro-batches 4 (a script that sets its accumulation in",
        ),
        (
            {"rehearsal": "accumulation", "needed_micro_batches": 1},
            "--gradient_accumulation_steps N, an Nth of its batch size and esrun --micro-batches N",
        ),
        ({"rehearsal": "accumulation"}, "with esrun --micro-batches N"),
        ({"rehearsal": "no-watch"}, "max_user_instances"),
        (
            {"rehearsal": "node-local", "kept_in": "/tmp"},
            "checkpoints are in /tmp, which each node",
        ),
    ],
)
def test_why_a_job_is_not_proven_is_said_with_the_remedy(fields, why):
    record = record_after(**fields)
    assert why in words(record.why)
    assert not record.may_begin(0.0)
    assert RehearsalRecord.from_body(record.to_body()) == record


def test_another_script_of_the_job_is_rehearsed_too():
    record = record_after(rehearsal="able")
    record.begin()
    record.end(5, 10.0, moved=True)
    record.record(report(proven=True), now=20.0)
    assert not record.may_begin(20.0)
    record.record(report(rehearsal="able", step=9), now=30.0)
    assert record.may_begin(30.0)


def test_it_is_made_once():
    record = record_after(rehearsal="able")
    assert record.may_begin(0.0)
    record.begin()
    record.end(3, 100.0, moved=True)
    assert not record.may_begin(1e9)
    record.record(report(rehearsal="", proven=True, run=1), now=0.0)
    assert (record.result, record.why) == ("proven", None)


def test_one_that_was_undone_is_begun_again_later_and_not_for_ever():
    record = record_after(rehearsal="able")
    waits = []
    for _ in range(5):
        record.begin()
        record.end(3, 100.0, moved=False)
        waits.append(record.after - 100.0)
        assert not record.may_begin(record.after - 1)
    assert waits == [120.0, 240.0, 480.0, 960.0, 1920.0]
    assert not record.may_begin(1e9)


def test_a_ledger_of_an_older_release_has_none():
    body = StoredJob(7).to_body()
    del body["rehearsal"]
    assert StoredJob.from_body(body).rehearsal == RehearsalRecord()
