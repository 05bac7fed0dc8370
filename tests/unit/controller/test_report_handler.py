"""What jobs say, and what they are told then, without rounds and sockets."""

import pytest

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.batch_tuning import BatchTuner
from slurm_elastic.controller.report_handler import ReportHandler
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.transition import TransitionState
from slurm_elastic.controller.transitions.transition_engine import TransitionEngine
from slurm_elastic.core.report import Orders, Report
from tests.support.job_records import FakeScontrol, Log, job, transition


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

    def hear(self, of, **fields):
        report = Report(job_id=7, **({"run": 0, "phase": "training"} | fields))
        return self.report_handler.handle(report, of, act=True)


@pytest.fixture
def site():
    site = Site()
    yield site
    site.engine.close()
    site.ledger.close()


def test_a_script_is_asked_once_to_prove_that_it_resumes(site):
    running = job({"n1": 4})
    site.hear(running, kind="script")
    for _ in range(2):
        site.report_handler.prove(running)
    orders = site.report_handler.orders(7, 0, job=running)
    assert orders.action == "rehearse"
    assert site.woken == [7]
    assert site.report_handler.orders(7, 1, job=running).action == "run", (
        "it is for this attempt only"
    )


@pytest.mark.parametrize(
    ("directive", "fields"),
    [
        ("4", {"kind": "script"}),
        ("1-8", {"kind": "library"}),
        ("1-8", {"kind": "script", "proven": True}),
        ("1-8", {"kind": "script", "run": 3}),
    ],
)
def test_who_need_not_or_cannot_prove_it_is_not_asked(site, directive, fields):
    running = job({"n1": 4}, directive=directive)
    site.hear(running, **fields)
    site.report_handler.prove(running)
    assert site.report_handler.orders(7, 0, job=running) == Orders()


def test_a_directive_that_was_replaced_by_one_size_needs_no_proof(site):
    running = job({"n1": 4})
    site.store.order(running, override="4")
    site.hear(running, kind="script")
    site.report_handler.prove(running)
    assert site.report_handler.orders(7, 0, job=running).action == "run"


@pytest.mark.parametrize("known", [True, False])
def test_who_saved_for_a_notice_that_nobody_gave_goes_on(site, known):
    running = job({"n1": 4}) if known else None
    site.hear(running, phase="saved", notice=5)
    orders = site.report_handler.orders(7, 0, job=running)
    assert (orders.action, orders.notice) == ("resume", 5)
    assert site.woken == [7]


def test_the_first_step_on_other_gpus_says_what_the_change_cost(site):
    body = transition({"n1": 2}, {"n1": 4}).to_body()
    moved = transition(
        {"n1": 2},
        {"n1": 4},
        state=TransitionState.DONE,
        id=site.ledger.add_transition(7, "7@100", body),
        entered={"NOTIFY": 1.0, "saved": 2.0, "REQUEUE": 2.0, "running": 5.0},
    )
    site.report_handler.expect(moved)
    there = job({"n1": 2}, run=1)
    site.hear(there, run=0, startup_s=9.0)
    site.hear(there, run=1)
    assert site.store.entry(there).restart_s is None, "neither is that step"
    site.hear(there, run=1, startup_s=2.0, restore_s=0.5, checkpoint_s=0.8)
    (row,) = site.ledger.transitions(7)
    assert (row["startup_s"], row["restore_s"], row["checkpoint_s"]) == (2.0, 0.5, 0.8)
    assert site.store.entry(there).restart_s == pytest.approx(row["entered"]["first_step"] - 1.0)
    assert "State=training" in site.log.lines[-1]
