"""Layer profiles: kept by application, over restarts, within bounds."""

import contextlib
import json
import sqlite3

import pytest

from slurm_elastic.controller.state import ledger as ledgers
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.ledger_schema import VERSIONS
from slurm_elastic.controller.state.reported import layer_profiles
from slurm_elastic.controller.state.reported.layer_profiles import StoredProfile
from slurm_elastic.core.cluster import Snapshot
from slurm_elastic.core.report import Report
from tests.support.controller.job_records import job

ROWS = (("conv", 0.01, 0.02, 4096, 1024), ("head", 0.001, 0.002, 40, 40960))


def report(job_id=7, **fields):
    return Report(job_id=job_id, run=0, phase="training", **fields)


def snapshot(*jobs):
    return Snapshot(time=1000.0, nodes=(), jobs=jobs)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite"


def test_it_survives_a_restart_and_serves_later_jobs_of_the_application(path):
    store = JobStore(Ledger(path))
    running = job({"n1": 4}, name="net")
    assert store.profile(running) is None
    store.record_report(report(application="gpt", profile=ROWS, profile_batch=8), running, 0.0)
    store.record_report(report(application="gpt", step=9), running, 1.0)
    assert store.profile(running) == StoredProfile(ROWS, 8)
    store.observe(snapshot(running))
    store = JobStore(Ledger(path))
    assert store.profile(running) == StoredProfile(ROWS, 8)
    for job_id, name, known in ((8, "net", StoredProfile(ROWS, 8)), (9, "other", None)):
        other = job({"n1": 4}, name=name, job_id=job_id)
        store.record_report(report(job_id, application="gpt", global_batch=8), other, 2.0)
        assert store.profile(other) == known
    foreign = job({"n1": 4}, name="net", job_id=10, user="bob")
    store.record_report(report(10, application="gpt", global_batch=8), foreign, 2.0)
    assert store.profile(foreign) is None, "users share with themselves only"


def test_the_newest_counts(path):
    store = JobStore(Ledger(path))
    running = job({"n1": 4})
    for batch in (8, 16):
        store.record_report(report(profile=ROWS[: batch // 8], profile_batch=batch), running, 0.0)
        store.observe(snapshot(running))
    assert JobStore(Ledger(path)).profile(running) == StoredProfile(ROWS, 16)


def test_names_without_end_fill_neither_memory_nor_ledger(path, monkeypatch):
    monkeypatch.setattr(ledgers, "PROFILES", 5)
    monkeypatch.setattr(layer_profiles, "_STATED", 3)
    ledger = Ledger(path)
    store = JobStore(ledger)
    running = job({"n1": 4})
    for i in range(40):
        store.record_report(report(application=f"a{i}", profile=ROWS), running, float(i))
        assert len(store._profiles._known) <= 3
        if i % 4 == 3:
            store.observe(snapshot(running))
    kept = [i for i in range(40) if ledger.profile("alice", "", f"a{i}")]
    assert len(kept) == 5
    assert kept[-1] == 39


@pytest.mark.parametrize(
    "body", [[], {}, {"rows": 5}, {"rows": []}, {"rows": [["a", -1, 0, 0, 0]]}, {"rows": [[1] * 5]}]
)
def test_what_cannot_be_read_back_is_nothing(path, body):
    ledger = Ledger(path)
    ledger.put_profile("alice", "", "", body)
    assert JobStore(ledger).profile(job({"n1": 4})) is None


def test_a_ledger_without_profiles_gets_room_for_them(path):
    record = json.dumps({"held": True, "measurements": {}, "job_id": 7})
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript("".join(VERSIONS[:2]))
        db.execute("PRAGMA user_version = 2")
        db.execute("INSERT INTO jobs VALUES ('7@100', 7, 1.0, ?)", (record,))
        db.commit()
    ledger = Ledger(path)
    ledger.put_profile("alice", "", "", StoredProfile(ROWS).to_body())
    assert JobStore(ledger).entry(job({"n1": 4})).held
    assert JobStore(ledger).profile(job({"n1": 4})) == StoredProfile(ROWS)
    ledger.forget(4e9, keep_days=90, keep_mb=1024)
    assert ledger.profile("alice", "", "") is None
