"""What is remembered of a job, from whom it is believed, and for how long."""

import dataclasses
import time

import pytest

from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.transition import TransitionState
from slurm_elastic.controller.state.trials.slurm_refusals import REFUSAL_S
from slurm_elastic.core.cluster import JobState, Node, Snapshot, Switch
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report
from slurm_elastic.core.submission import parse_admin_comment, parse_comment
from tests.support.controller.job_records import job, transition


@pytest.fixture
def ledger():
    return Ledger(":memory:")


@pytest.fixture
def store(ledger):
    return JobStore(ledger)


def snapshot(*jobs, at=1000.0):
    return Snapshot(time=at, nodes=(), jobs=jobs)


def report(**fields):
    values = {"job_id": 7, "run": 0, "phase": "training", "gpus": 4, "nodes": 1}
    return Report(**(values | fields))


FAST = {"step_time_s": 0.5, "global_batch": 64, "steps_measured": 10}


def test_speed_counts_for_the_shape_that_the_job_really_has(store):
    running = job({"n1": 4})
    for told in ({"gpus": 8}, {"run": 3}, {"steps_measured": 1}, {"step_time_s": 0.0}):
        store.record_report(report(**(FAST | told)), running, 0.0)
        assert store.entry(running).measurements == {}
    store = JobStore(Ledger(":memory:"))
    assert store.record_report(report(**FAST), running, 0.0)
    (measured,) = store.entry(running).measurements.values()
    assert (measured.gpu_type, measured.gpus, measured.samples_per_s) == ("a100", 4, 128.0)


def test_a_report_of_an_attempt_that_is_over_changes_nothing(store):
    running = job({"n1": 4}, run=2)
    store.record_report(report(run=2), running, 0.0)
    assert not store.record_report(report(run=1, proven=True), running, 1.0)
    assert not store.entry(running).proven


def test_a_jump_in_the_training_is_kept_until_the_script_reports_none(store, ledger):
    running = job({"n1": 4})
    assert store.record_report(report(kind="script", jump="epoch 3, 9"), running, 0.0)
    store.observe(snapshot(running))
    again = JobStore(ledger)
    assert again.records(snapshot(running), {})[7].jump == "epoch 3, 9"
    assert again.record_report(report(kind="script"), running, 1.0)
    assert again.records(snapshot(running), {})[7].jump == ""


@pytest.mark.parametrize(
    ("told", "proven"),
    [
        ({}, False),
        ({"rehearsal": "able"}, False),
        ({"proven": True}, True),
        ({"kind": "library"}, True),
        ({"run": 1}, True),  # its first report of a run: no other one is known
        ({"run": 1, "rehearsal": "able"}, False),
    ],
)
def test_another_script_of_the_job_is_not_proven(store, told, proven):
    told = {"kind": "script"} | told
    running = job({"n1": 4}, run=told.get("run", 0))
    store.record_report(report(kind="script", proven=True), running, 0.0)
    store.record_report(report(**told), running, 1.0)
    assert store.entry(running).proven is proven


def test_a_silent_job_is_left_alone_after_three_minutes(store):
    running = job({"n1": 4})
    store.record_report(report(), running, 1000.0)
    for at, speaks in ((1100.0, True), (1200.0, False)):
        record = store.records(snapshot(running, at=at), {})[7]
        assert record.reporting is speaks


def test_reports_of_an_attempt_that_slurmctld_has_gone_back_to_count(store):
    """As when its StateSaveLocation was restored, or another job has got the id."""
    store.record_report(report(run=4), job({"n1": 4}, run=4), 1000.0)
    store.record_report(report(run=1), job({"n1": 4}, run=4), 1001.0)
    assert store.last_report(7).run == 4
    store.record_report(report(run=1), job({"n1": 4}, run=1), 1002.0)
    assert store.last_report(7).run == 1


def test_it_survives_a_restart_and_a_requeue_but_not_another_job(store, ledger):
    running = job({"n1": 4})
    store.record_report(report(proven=True), running, 0.0)
    store.command(running, held=True)
    store.observe(snapshot(running))
    again = JobStore(ledger)
    requeued = job(run=1)
    assert again.entry(requeued).held
    assert again.entry(requeued).proven
    assert not again.entry(job({"n1": 4}, job_id=8)).held


def test_after_a_change_that_its_owner_has_ruled_out_a_job_may_be_changed_at_once(store):
    running = job({"n1": 4})
    ruled_out = transition(
        {"n2": 4}, {"n1": 4}, TransitionState.UNDONE, problem=Reason("directive-changed")
    )
    store.record_end_of_change(ruled_out, running, 100.0)
    assert store.entry(running).last_change is None


def test_only_changes_that_touched_the_job_count(store):
    running = job({"n1": 4}, run=1)
    asked = transition(
        {"n2": 4}, {"n1": 4}, TransitionState.UNDONE, problem=Reason("no-checkpoint", notice_s=60)
    )
    asked.entered["unanswered"] = 90.0
    store.record_end_of_change(asked, running, 100.0)
    entry = store.entry(running)
    assert (entry.resizes, entry.changes, entry.last_change) == (0, [], 100.0)
    assert entry.deaf_until >= 400.0
    moved = transition({"n1": 4}, {"n2": 1}, TransitionState.DONE, limit_s=630)
    moved.entered["REQUEUE"] = 150.0
    moved.id = asked.id + 1
    store.record_end_of_change(moved, running, 200.0)
    assert (entry.resizes, entry.changes, entry.pin) == (1, [200.0], ["n1"])
    assert store.spare_s(running) == 30
    assert store.spare_s(job({"n1": 4}, run=2)) == 0


def test_a_preempted_job_is_leased_a_failed_plan_is_not(store):
    for number, (problem, leased) in enumerate(
        ((None, True), (Reason("gpus-taken"), False)), start=1
    ):
        waits = job(run=1)
        ended = transition(None, {"n1": 4}, TransitionState.DONE, problem=problem)
        ended.id = number
        ended.entered["REQUEUE"] = 1.0
        store.record_end_of_change(ended, waits, 1.0)
        assert store.entry(waits).leased is leased


def test_a_size_that_slurm_refuses_for_good_is_not_tried_a_third_time(store):
    waits, refusal = job({"n2": 1}, run=1), Reason("not-started", slurm_reason="BadConstraints")
    for number, barred in ((1, set()), (2, {("a100", n) for n in (5, 6, 7, 8)})):
        undone = transition({"n1": 4, "n3": 4}, {"n2": 1}, TransitionState.UNDONE, problem=refusal)
        undone.id, undone.target = number, undone.old
        undone.entered["REQUEUE"] = 1.0
        store.record_end_of_change(undone, waits, float(number))
        assert {shape.shape for shape in store.entry(waits).trials.shapes.barred} == barred


REFUSED = Reason("slurm-refused", error="scontrol update jobid=7: Requested partition …")


@pytest.mark.parametrize(
    ("problem", "is_barred"),
    [
        (REFUSED, True),
        (Reason("not-started", slurm_reason="QOSGrpGRESMinutes"), True),
        (Reason("not-started", slurm_reason="Resources"), True),
        (Reason("runs-elsewhere", gpus=4, gpu_type="a100", nodes=("n1",)), True),
        (Reason("runs-elsewhere", gpus=2, gpu_type="a100", nodes=("n3",)), False),
        (Reason("not-started", slurm_reason="ReqNodeNotAvail, Reserved for maintenance"), False),
        (Reason("gpus-taken"), False),
    ],
)
def test_a_change_that_slurm_refuses_is_not_repeated_without_end(store, problem, is_barred):
    waits = job({"n2": 1}, run=1)
    for number in (1, 2):
        undone = transition({"n1": 2}, {"n2": 1}, TransitionState.UNDONE, problem=problem)
        undone.id, undone.target = number, undone.old
        undone.entered["REQUEUE"] = 1.0
        store.record_end_of_change(undone, waits, 1000.0)
    assert (("a100", 2) in store.entry(waits).trials.shapes.excluded) is is_barred
    assert store.with_allowed_directive(waits).directive.allows(2, "a100") is not is_barred
    store.observe(snapshot(waits, at=1000.0 + REFUSAL_S))
    assert store.with_allowed_directive(waits).directive.allows(2, "a100")


def test_what_a_death_left_uncounted_is_counted_once(ledger):
    """Killed after a change was done and before its outcome was written down."""
    running = job({"n1": 4}, run=1)
    JobStore(ledger).observe(snapshot(job({"n2": 1})))
    moved = transition({"n1": 4}, {"n2": 1}, TransitionState.DONE)
    moved.entered["REQUEUE"] = 150.0
    moved.id = ledger.add_transition(7, running.key, moved.to_body())
    ledger.put_transition(moved.id, "DONE", moved.to_body(), live=False)
    for _ in range(2):
        store = JobStore(ledger)
        assert (store.entry(running).pin, store.entry(running).resizes) == (["n1"], 1)
        store.record_end_of_change(moved, running, 200.0)
        assert store.entry(running).resizes == 1
        store.observe(snapshot(running))


def test_a_record_that_cannot_be_read_is_begun_anew(ledger):
    ledger.put_job("7@100", 7, {"job_id": 7, "measurements": 5})
    assert JobStore(ledger).entry(job({"n1": 1})).resizes == 0


PARTS = {"forward_s": 0.1, "backward_s": 0.2, "optimizer_s": 0.1, "sync_s": 0.1}
RACKS = (
    Switch("r1", 0, ("n1", "n2")),
    Switch("r2", 0, ("n3",)),
    Switch("top", 1, ("n1", "n2", "n3"), ("r1", "r2")),
)
NODES = tuple(Node(name=f"n{i}", gpu_type="a100", gpus=4) for i in (1, 2, 3))


def on_racks(*jobs):
    return Snapshot(time=1000.0, nodes=NODES, jobs=jobs, switches=RACKS)


def test_a_shape_over_two_racks_is_another_one(store, ledger):
    near, far = job({"n1": 2, "n2": 2}), job({"n1": 2, "n3": 2})
    store.observe(on_racks(near))
    store.record_report(report(**(FAST | PARTS)), near, 0.0)
    store.record_report(report(**(FAST | PARTS | {"step_time_s": 1.0, "sync_s": 0.6})), far, 1.0)
    store.observe(on_racks(far))
    for known in (store, JobStore(ledger)):
        seen = {m.racks: m for m in known.records(on_racks(far), {})[7].measurements}
        assert (seen[1].samples_per_s, seen[2].samples_per_s) == (128.0, 64.0)
        assert (seen[1].sync_s, seen[2].sync_s) == (pytest.approx(0.1), pytest.approx(0.6))
        assert seen[2].compute_s == pytest.approx(0.4)


def test_stalls_are_means_and_begin_anew_with_another_computing_time(store):
    running = job({"n1": 4})
    for sync in (0.1, 0.3, None, 0.2):
        store.record_report(report(**(FAST | PARTS | {"sync_s": sync})), running, 0.0)
    (seen,) = store.entry(running).measurements.values()
    assert (seen.sync_s, seen.reports) == (pytest.approx(0.2), 3)
    for told in ({"layout": "1x4"}, {"sync_s": 9.0}):  # stages wait for their neighbours, too
        store.record_report(report(**(FAST | PARTS | told)), running, 0.0)
    (seen,) = store.entry(running).measurements.values()
    assert (seen.sync_s, seen.reports) == (pytest.approx(0.2), 3)
    store.record_report(
        report(**(FAST | PARTS | {"forward_s": 1.0, "step_time_s": 1.5})), running, 0.0
    )
    (seen,) = store.entry(running).measurements.values()
    assert (seen.compute_s, seen.sync_s, seen.reports) == (pytest.approx(1.3), 0.1, 1)


def test_the_next_job_of_its_name_is_taken_for_it_until_it_reports(store, ledger):
    first, other = job({"n1": 2, "n3": 2}), job({"n1": 2, "n3": 2}, user="bob", job_id=9)
    store.observe(on_racks(first))
    for _ in range(3):
        store.record_report(
            report(**(FAST | PARTS | {"step_time_s": 1.0, "sync_s": 0.6})), first, 0.0
        )
    store.observe(on_racks(first))
    store.observe(on_racks())
    following = job({"n1": 2, "n2": 2}, job_id=8, submit_time=500.0)
    for known in (store, JobStore(ledger)):
        known.observe(on_racks(following, other))
        records = known.records(on_racks(following, other), {})
        (seen,) = records[8].measurements
        assert (seen.racks, seen.reports, seen.sync_s) == (2, 3, pytest.approx(0.6))
        assert records[9].measurements == ()
        known.record_report(report(job_id=8, **FAST), following, 1.0)
        (seen,) = known.records(on_racks(following), {})[8].measurements
        assert (seen.racks, seen.samples_per_s) == (1, 128.0)


def test_records_of_other_versions_are_read_and_an_earlier_one_is_one_rack(store, ledger):
    running = job({"n1": 4})
    old = {"gpu_type": "a100", "gpus": 4, "nodes": 1, "samples_per_s": 5.0, "steps": 9, "new": 1}
    body = store.entry(running).to_body() | {"measurements": {"a100:4:1": old}}
    del body["gradient_bytes"], body["frozen"]
    ledger.put_job(running.key, 7, body)
    (seen,) = JobStore(ledger).records(on_racks(running), {})[7].measurements
    assert (seen.racks, seen.sync_s, seen.samples_per_s) == (1, None, 5.0)


LAYERS = (("a", 0.1, 0.2, 10, 400), ("b", 0.1, 0.2, 10, 100))


def test_gradient_bytes_are_those_of_layers_that_are_trained(store, ledger):
    running = job({"n1": 4})

    def told(**fields):
        store.record_report(report(**fields), running, 0.0)
        return store.records(on_racks(running), {})[7].gradient_bytes

    assert told() is None
    assert told(profile=LAYERS) == 500.0
    assert told(layers=2, frozen=1) == 100.0
    assert told() == 100.0
    assert told(layers=2, frozen=0) == 500.0
    store.observe(on_racks(running))
    again = JobStore(ledger).records(on_racks(running), {})[7]
    assert again.gradient_bytes == 500.0
    assert told(layout="1x4") is None, "stages reduce their own parts"


def test_a_job_that_has_not_run_knows_its_applications_gradients(store, ledger):
    running = job({"n1": 4})
    store.record_report(report(**FAST, profile=LAYERS), running, 0.0)
    store.observe(on_racks(running))
    fresh = job(None, job_id=8, submit_time=20.0, state=JobState.PENDING)
    both = on_racks(running, fresh)
    assert store.records(both, {})[8].gradient_bytes == 500.0
    other = job(None, job_id=9, name="other", state=JobState.PENDING)
    assert store.records(on_racks(other), {})[9].gradient_bytes is None


def ended_job(**fields):
    values = {"state": JobState.ENDED, "end_state": "COMPLETED", "end_time": 2000.0}
    return job(**(values | fields))


def test_how_a_job_ended_is_kept_when_slurm_forgets_it(store, ledger):
    running = job({"n1": 2, "n2": 2}, run=1, start_time=1000.0)
    store.observe(snapshot(running))
    store.record_report(report(run=1, proven=True), running, 1001.0)
    store.observe(snapshot(running))
    for _ in range(2):
        store.observe(snapshot(ended_job(run=1), at=2001.0))
    store.observe(snapshot(at=3000.0))
    ended = JobStore(ledger).ended.of(7)
    assert (ended.job.end_state, ended.job.end_time, ended.job.state) == (
        "COMPLETED", 2000.0, JobState.ENDED,
    )  # fmt: skip
    assert (ended.job.name, ended.job.uid, ended.job.elastic) == (
        running.name, running.uid, True,
    )  # fmt: skip
    assert (str(ended.held), ended.runs) == ("4 a100 on n1, n2", 1)
    assert ended.reported
    assert ended.record.proven
    assert store.ended.of(8) is None


def test_a_job_that_ended_while_no_controller_ran(ledger):
    running = job({"n1": 4})
    first = JobStore(ledger)
    first.record_report(report(proven=True), running, 0.0)
    first.observe(snapshot(running))
    late = JobStore(ledger)
    end = time.time() + 3600  # the ledger keeps nothing from before it was made
    failed = ended_job(end_state="FAILED", exit_code=3, end_time=end)
    late.observe(snapshot(failed, at=end + 60))
    ended = late.ended.of(7)
    assert (ended.job.end_state, ended.job.exit_code) == ("FAILED", 3)
    assert ended.record.proven
    assert str(ended.held) == "4 a100 on n1"


def test_a_job_that_was_cancelled_before_it_ran(store):
    store.observe(snapshot(job()))
    store.observe(snapshot(ended_job(end_state="CANCELLED"), at=2001.0))
    ended = store.ended.of(7)
    assert (ended.runs, ended.held, ended.reported) == (0, None, False)


def test_a_job_that_came_back_ends_again(store):
    store.observe(snapshot(job({"n1": 4})))
    store.observe(snapshot(ended_job(end_state="CANCELLED"), at=2001.0))
    store.observe(snapshot(job({"n2": 1}, run=1, start_time=2100.0), at=2101.0))
    store.observe(snapshot(ended_job(run=1, end_time=2200.0), at=2201.0))
    ended = store.ended.of(7)
    assert (ended.job.end_state, ended.job.end_time, ended.runs) == ("COMPLETED", 2200.0, 2)
    assert str(ended.held) == "1 a100 on n2"


def test_a_record_without_an_end_or_with_a_strange_one(store, ledger):
    running = job({"n1": 4})
    store.observe(snapshot(running))
    assert store.ended.of(7) is None
    body = ledger.get_job(running.key)
    for strange in (7, {}, {"state": "FAILED", "later": 1}, [1]):
        ledger.put_job(running.key, 7, {**body, "ending": strange})
        assert store.ended.of(7) is None
    shown = store.ended.of(7, ended_job())
    assert (shown.job.end_state, str(shown.held)) == ("COMPLETED", "4 a100 on n1")


def test_a_job_that_slurm_forgot_before_its_end_was_seen(store):
    store.observe(snapshot(job({"n1": 4})))
    store.observe(snapshot(at=9000.0))
    ended = store.ended.of(7)
    assert (ended.job.end_state, ended.job.end_time) == ("", 9000.0)
    assert str(ended.held) == "4 a100 on n1"
    store.observe(snapshot(ended_job(), at=9001.0))  # it was only not shown
    assert store.ended.of(7).job.end_state == "COMPLETED"


def test_the_submission_of_a_job_that_is_over_is_not_kept_over_restarts(store, ledger):
    """Its id may be that of another job then."""
    record = parse_admin_comment('{"at":90,"elastic":"1-4","shape":{},"v":1}')
    first = job({"n1": 4}, submission=record, submit_time=100.0)
    store.observe(snapshot(first))
    assert set(JobStore(ledger).kept_submissions()) == {7}
    store.observe(snapshot())
    assert not JobStore(ledger).kept_submissions()
    store.observe(snapshot(first))
    assert set(JobStore(ledger).kept_submissions()) == {7}, "it was only not shown"


def test_the_submission_of_each_attempt_is_kept_over_restarts(store, ledger):
    record = '{"at":90,"elastic":"1-4","shape":{},"v":1}'
    first = job({"n1": 4}, submission=parse_admin_comment(record), submit_time=100.0)
    for running in (first, dataclasses.replace(first, run=1, submit_time=200.0)):
        store.observe(snapshot(running))
        (kept,) = JobStore(ledger).kept_submissions().values()
        assert kept.belongs_to(
            uid=running.uid, run=running.run, submit_time=running.submit_time, name=running.name
        )
        assert kept.submission == running.submission
    portable = job({"n1": 4}, job_id=8, submission=parse_comment("elastic:1-4"))
    store.observe(snapshot(running, portable))
    assert set(JobStore(ledger).kept_submissions()) == {7}
    ledger.put_job("9@1", 9, {"recorded": 5})
    assert set(JobStore(ledger).kept_submissions()) == {7}, "an unreadable one is left out"
