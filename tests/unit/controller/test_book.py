"""What is remembered of a job, from whom it is believed, and for how long."""

import pytest
from desk_jobs import job, transition

from slurm_elastic.cluster import JobState, Snapshot
from slurm_elastic.controller.book import Book
from slurm_elastic.controller.ledger import Ledger
from slurm_elastic.controller.transition import State
from slurm_elastic.report import Report


@pytest.fixture
def ledger():
    return Ledger(":memory:")


@pytest.fixture
def book(ledger):
    return Book(ledger)


def snapshot(*jobs, at=1000.0):
    return Snapshot(time=at, nodes=(), jobs=jobs)


def report(**fields):
    values = {"job_id": 7, "run": 0, "phase": "training", "gpus": 4, "nodes": 1}
    return Report(**(values | fields))


FAST = {"step_time_s": 0.5, "global_batch": 64, "steps_measured": 10}


def test_speed_counts_for_the_shape_that_the_job_really_has(book):
    running = job({"n1": 4})
    for told in ({"gpus": 8}, {"run": 3}, {"steps_measured": 1}, {"step_time_s": 0.0}):
        book.take(report(**(FAST | told)), running, 0.0)
        assert book.entry(running).measurements == {}
    book = Book(Ledger(":memory:"))
    assert book.take(report(**FAST), running, 0.0)
    (measured,) = book.entry(running).measurements.values()
    assert (measured.gpu_type, measured.gpus, measured.samples_per_s) == ("a100", 4, 128.0)


def test_a_report_of_an_attempt_that_is_over_changes_nothing(book):
    running = job({"n1": 4}, run=2)
    book.take(report(run=2), running, 0.0)
    assert not book.take(report(run=1, proven=True), running, 1.0)
    assert not book.entry(running).proven


def test_a_silent_job_is_left_alone_after_three_minutes(book):
    running = job({"n1": 4})
    book.take(report(), running, 1000.0)
    for at, speaks in ((1100.0, True), (1200.0, False)):
        record = book.records(snapshot(running, at=at), {})[7]
        assert record.reporting is speaks


def test_it_survives_a_restart_and_a_requeue_but_not_another_job(book, ledger):
    running = job({"n1": 4})
    book.take(report(proven=True), running, 0.0)
    book.command(running, held=True)
    book.observe(snapshot(running))
    again = Book(ledger)
    requeued = job(run=1)
    assert again.entry(requeued).held
    assert again.entry(requeued).proven
    assert not again.entry(job({"n1": 4}, job_id=8)).held


def test_only_changes_that_touched_the_job_count(book):
    running = job({"n1": 4}, run=1)
    asked = transition({"n2": 4}, {"n1": 4}, State.UNDONE, problem="no checkpoint")
    asked.entered["unanswered"] = 90.0
    book.changed(asked, running, 100.0)
    entry = book.entry(running)
    assert (entry.resizes, entry.changes, entry.last_change) == (0, [], 100.0)
    assert entry.deaf_until >= 400.0
    moved = transition({"n1": 4}, {"n2": 1}, State.DONE, limit_s=630)
    moved.entered["REQUEUE"] = 150.0
    moved.id = asked.id + 1
    book.changed(moved, running, 200.0)
    assert (entry.resizes, entry.changes, entry.pin) == (1, [200.0], ["n1"])
    assert book.spare_s(running) == 30
    assert book.spare_s(job({"n1": 4}, run=2)) == 0


def test_a_preempted_job_is_leased_a_failed_plan_is_not(book):
    for number, (problem, leased) in enumerate((("", True), ("taken", False)), start=1):
        waits = job(run=1)
        ended = transition(None, {"n1": 4}, State.DONE, problem=problem)
        ended.id = number
        ended.entered["REQUEUE"] = 1.0
        book.changed(ended, waits, 1.0)
        assert book.entry(waits).leased is leased


def test_what_a_death_left_uncounted_is_counted_once(ledger):
    """Killed after a change was done and before its outcome was written down."""
    running = job({"n1": 4}, run=1)
    Book(ledger).observe(snapshot(job({"n2": 1})))
    moved = transition({"n1": 4}, {"n2": 1}, State.DONE)
    moved.entered["REQUEUE"] = 150.0
    moved.id = ledger.add_transition(7, running.key, moved.to_body())
    ledger.put_transition(moved.id, "DONE", moved.to_body(), live=False)
    for _ in range(2):
        book = Book(ledger)
        assert (book.entry(running).pin, book.entry(running).resizes) == (["n1"], 1)
        book.changed(moved, running, 200.0)
        assert book.entry(running).resizes == 1
        book.observe(snapshot(running))


def test_who_held_what_when(book, ledger):
    book.observe(snapshot(job({"n1": 1}, start_time=900.0), at=1000.0))
    book.observe(snapshot(job({"n1": 4}, start_time=1100.0, run=1), at=1100.0))
    gone = job({"n1": 4}, run=1, state=JobState.ENDED, end_time=1500.0)
    book.observe(snapshot(gone, at=1600.0))
    rows = [(r["gpus"], r["start"], r["end"]) for r in ledger.segments()]
    assert rows == [(1, 900.0, 1100.0), (4, 1100.0, 1500.0)]


def test_a_record_that_cannot_be_read_is_begun_anew(ledger):
    ledger.put_job("7@100", 7, {"job_id": 7, "measurements": 5})
    assert Book(ledger).entry(job({"n1": 1})).resizes == 0
