"""What jobs say, and what they are told then, without rounds and sockets."""

import dataclasses

import pytest

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.batch_tuning import BatchTuner
from slurm_elastic.controller.report_handler import ReportHandler
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.transition import Transition, TransitionState
from slurm_elastic.controller.transitions.requested_change import RequestedChange
from slurm_elastic.controller.transitions.transition_engine import TransitionEngine
from slurm_elastic.core.cluster import Snapshot
from slurm_elastic.core.plan import Action, Decision
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report
from tests.support.controller.job_records import FakeScontrol, Log, job, transition
from tests.support.decisions.reasons import words


class Site:
    """A report handler with job 7, and the jobs that it woke."""

    def __init__(self):
        self.ledger, self.log, self.woken = Ledger(":memory:"), Log(), []
        self.store = JobStore(self.ledger)
        self.engine = TransitionEngine(
            scontrol=FakeScontrol(),
            ledger=self.ledger,
            config=Config(),
            account="selastic",
            log=self.log,
        )
        self.engine.outbox.wake = self.woken.append
        self.report_handler = ReportHandler(
            store=self.store,
            engine=self.engine,
            tuner=BatchTuner(self.engine.outbox.tell),
            log=self.log,
        )

    def report(self, of, **fields):
        report = Report(job_id=7, **({"run": 0, "phase": "training"} | fields))
        return self.report_handler.handle(report, of, act=True)


@pytest.fixture
def site():
    site = Site()
    yield site
    site.engine.close()
    site.ledger.close()


def rehearsal(site, **fields):
    """Return a live rehearsal of job 7."""
    running = job({"n1": 4})
    site.engine.begin(
        [
            RequestedChange(
                Decision(
                    job_id=7,
                    current=running.allocation,
                    target=running.allocation,
                    action=Action.REHEARSE,
                    reason=Reason("resume-rehearsal"),
                ),
                running,
                notice_s=300.0,
            )
        ]
    )
    (begun,) = site.engine.live.values()
    site.engine.step({7: running}, sizes={"n1": 4}, per_node={})
    assert begun.state is TransitionState.NOTIFY
    return begun


def test_the_notice_of_a_rehearsal_asks_to_keep_the_checkpoint(site):
    begun = rehearsal(site)
    orders = site.report_handler.orders(7, 0, job=job({"n1": 4}))
    assert (orders.action, orders.notice, orders.rehearsal) == ("notice", begun.id, True)
    assert orders.deadline_s == 300.0


def test_a_rehearsal_for_which_there_is_no_room_is_undone_at_once(site):
    begun = rehearsal(site)
    running = job({"n1": 4})
    site.report(running, kind="script", rehearsal="able", step=1)
    assert not begun.given_up
    site.report(running, kind="script", rehearsal="no-room", kept_in="/data", kept_bytes=2 * 10**9)
    site.engine.step({7: running}, sizes={"n1": 4}, per_node={})
    assert begun.state is TransitionState.UNDONE
    assert "free 2 GB in /data" in words(begun.problem)
    assert site.report_handler.orders(7, 0, job=running).action == "resume"
    (record,) = site.store.records(Snapshot(time=1.0, nodes=(), jobs=(running,)), {}).values()
    assert "free 2 GB in /data" in words(record.unproven)


@pytest.mark.parametrize(
    ("fields", "result", "problem"),
    [
        ({"proven": True}, "proven", None),
        ({"rehearsal": "refuted", "kept_in": "/d"}, "refuted", "resume-refuted"),
        ({"rehearsal": "failed"}, "failed", "rehearsal-failed"),
    ],
)
def test_the_result_of_a_rehearsal_is_in_the_history(site, fields, result, problem):
    begun = rehearsal(site)
    begun.state, begun.entered["REQUEUE"] = TransitionState.DONE, 1.0
    site.engine.records.put(begun)
    site.store.record_end_of_change(begun, job({"n1": 4}), 5.0)
    site.report(job({"n1": 4}, run=1), run=1, kind="script", **fields)
    (row,) = [Transition.from_body(r) for r in site.ledger.transitions(7)]
    assert (row.action, row.state, row.result) == (
        Action.REHEARSE, TransitionState.DONE, result,
    )  # fmt: skip
    assert (row.problem and row.problem.code) == problem
    assert any(f"Result={result}" in line for line in site.log.lines)


@pytest.mark.parametrize("known", [True, False])
def test_who_saved_for_a_notice_that_nobody_gave_goes_on(site, known):
    running = job({"n1": 4}) if known else None
    site.report(running, phase="saved", notice=5)
    orders = site.report_handler.orders(7, 0, job=running)
    assert (orders.action, orders.notice) == ("resume", 5)
    assert set(site.woken) == {7}


def test_the_first_step_on_other_gpus_says_what_the_change_cost(site):
    body = transition({"n1": 2}, {"n1": 4}).to_body()
    moved = transition(
        {"n1": 2},
        {"n1": 4},
        state=TransitionState.DONE,
        id=site.ledger.add_transition(7, "7@100", body),
        entered={"NOTIFY": 1.0, "saved": 2.0, "REQUEUE": 2.0, "running": 5.0},
    )
    site.report_handler.await_first_step(moved)
    there = job({"n1": 2}, run=1)
    site.report(there, run=0, startup_s=9.0)
    site.report(there, run=1)
    assert site.store.entry(there).restart_s is None, "neither is that step"
    site.report(there, run=1, startup_s=2.0, restore_s=0.5, checkpoint_s=0.8)
    (row,) = site.ledger.transitions(7)
    assert (row["startup_s"], row["restore_s"], row["checkpoint_s"]) == (2.0, 0.5, 0.8)
    assert site.store.entry(there).restart_s == pytest.approx(row["entered"]["first_step"] - 1.0)
    assert "State=training" in site.log.lines[-1]


def failing(site, of, *, code=1, run=1):
    site.report(of, run=run, phase="ended", exit_code=code, failed_start=1, kind="script")
    orders = site.report_handler.orders(7, run, job=of)
    return orders.failed_start, orders.on_failure


def trained(site):
    site.report(job({"n1": 1}), kind="script", step=3, checkpoint_step=3)


def test_a_program_that_fails_in_a_new_shape_waits(site):
    trained(site)
    there = job({"n1": 4}, run=1)
    assert failing(site, there) == (1, "wait")
    reason = Reason("program-failed", exit_code=1)
    back = Reason("change-failed", gpus=4, gpu_type="a100", reason=reason)
    assert site.report_handler.reason(7, 1) == back
    seq = site.report_handler.orders(7, 1, job=there).seq
    assert failing(site, there) == (1, "wait")
    assert site.report_handler.orders(7, 1, job=there).seq == seq, "it is told once"
    assert site.report_handler.orders(7, 2, job=there).on_failure is None


def test_a_program_that_others_started_again_ends(site):
    trained(site)
    assert failing(site, job({"n1": 1}, run=1)) == (1, "end")


def test_a_move_that_is_not_over_yet_when_its_program_fails_is_a_change(site):
    trained(site)
    moving = transition({"n2": 1}, {"n1": 1}, TransitionState.CLEAR)
    site.engine._live[7] = moving
    assert failing(site, job({"n2": 1}, run=1)) == (1, "wait")
    assert site.store.trial_outcome(moving) == Reason("program-failed", exit_code=1)


def test_a_job_that_is_not_known_in_this_run_is_not_answered_yet(site):
    trained(site)
    assert failing(site, job({"n1": 1}, run=0)) == (None, None)


def test_exit_code_0_ends_a_job_where_it_worked(site):
    trained(site)
    assert failing(site, job({"n1": 1}, run=1), code=0) == (1, "end")
    assert failing(site, job({"n1": 4}, run=2), code=0, run=2) == (1, "wait")


def test_ranks_get_an_ordered_directive_without_sizes_and_plan(site):
    """A library of the release before does not have the keys."""
    running = job({"n1": 4})
    site.store.order(running, override="1-4,batch=8-64,sizes=1:2:4,plan=auto")
    site.report_handler.send_settings(running)
    assert site.report_handler.orders(7, 0, job=running).directive == "1-4,batch=8-64"
    assert site.store.allowed_directive(running).listed == (1, 2, 4)
    assert site.store.allowed_directive(running).plan == "auto"
    site.store.order(running, override="")
    site.report_handler.send_settings(running)
    assert site.report_handler.orders(7, 0, job=running).directive == ""


@pytest.mark.parametrize("allowed", [True, False])
def test_changes_in_place_are_prepared_where_site_and_job_allow_them(site, allowed):
    config = dataclasses.replace(Config().resize, in_place="auto" if allowed else "never")
    site.store.learning.config = dataclasses.replace(Config(), resize=config)
    running = job({"n1": 4})
    site.report_handler.send_settings(running)
    assert site.report_handler.orders(7, 0, job=running).in_place is allowed
    site.store.entry(running).override = "1-8,in-place=never"
    assert not site.report_handler.orders(7, 0, job=running).in_place
