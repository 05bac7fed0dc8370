"""The desk: reports from pieces, orders in order."""

import math
import threading

import pytest

from slurm_elastic.core.report import Orders, Report
from slurm_elastic.job.report_state import GRACE_S, ReportState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def desk(clock: Clock) -> ReportState:
    return ReportState(
        Report(job_id=7, run=1, phase="starting", kind="script", gpus=4), clock=clock
    )


def test_pieces_become_a_report(desk: ReportState) -> None:
    desk.tell({"phase": "training", "step": 3, "step_time_s": 0.5})
    desk.tell({"step": 4, "progress": 0.25})
    report = desk.report()
    assert (report.phase, report.step, report.progress, report.gpus) == ("training", 4, 0.25, 4)


def test_none_clears(desk: ReportState) -> None:
    desk.tell({"notice": 3})
    desk.tell({"notice": None})
    assert desk.report().notice is None


def test_a_job_cannot_report_for_another_or_claim_gpus(desk: ReportState) -> None:
    desk.tell({"job_id": 8, "run": 0, "gpus": 400, "nodes": 9})
    report = desk.report()
    assert (report.job_id, report.run, report.gpus, report.nodes) == (7, 1, 4, 1)


def test_nonsense_is_left_out_and_said_once(
    desk: ReportState, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        desk.tell({"step_time_s": math.nan, "phase": "flying", "step": 5, "unknown": 1})
    assert desk.report().step == 5
    assert desk.report().phase == "starting"
    said = capfd.readouterr().err
    assert said.count("field step_time_s: nan") == 1
    assert said.count("field phase: 'flying'") == 1


def test_whole_numbers_may_come_as_floats(desk: ReportState) -> None:
    desk.tell({"step": 12.0, "step_time_s": 2.0})
    assert desk.report().step == 12
    assert desk.report().step_time_s == 2.0


def test_a_checkpoint_grows_older(desk: ReportState, clock: Clock) -> None:
    desk.tell({"checkpoint_age_s": 2.0})
    clock.now += 5
    desk.tell({"step": 9})
    assert desk.report().checkpoint_age_s == 7.0


def test_a_measurement_is_reported_once(desk: ReportState) -> None:
    desk.tell({"step_time_s": 0.5, "steps_measured": 20})
    desk.reported(desk.report())
    assert (desk.report().step_time_s, desk.report().steps_measured) == (None, 0)
    sent = desk.report()
    desk.tell({"step_time_s": 0.6, "steps_measured": 10})
    desk.reported(sent)
    assert desk.report().step_time_s == 0.6, "a newer one is still to be reported"


def test_what_is_urgent(desk: ReportState) -> None:
    desk.tell({"step": 3})
    assert not desk.wait_urgent(0)
    desk.tell({"phase": "saved", "notice": 2})
    assert desk.wait_urgent(0)
    assert not desk.wait_urgent(0)
    threading.Timer(0.05, desk.tell, [{"proven": True}]).start()
    assert desk.wait_urgent(10)


def test_orders_reach_subscribers_when_they_change(desk: ReportState, clock: Clock) -> None:
    heard: list[Orders] = []
    desk.subscribe(heard.append)
    notice = Orders(seq=4, action="notice", notice=9, deadline_s=30)
    desk.take(notice, authoritative=True)
    desk.take(Orders(seq=4, action="notice", notice=9, deadline_s=20), authoritative=False)
    assert heard == [Orders(), notice]
    clock.now += 10
    assert desk.orders().deadline_s == 20


def test_the_first_answer_counts_whatever_its_number(desk: ReportState) -> None:
    desk.take(Orders(seq=0, report_every_s=2), authoritative=False)
    assert desk.orders().report_every_s == 2


def test_an_overtaken_answer_does_not_count_and_a_lost_ledger_does(desk: ReportState) -> None:
    desk.take(Orders(seq=5, action="notice", notice=1), authoritative=True)
    desk.take(Orders(seq=4), authoritative=False)
    assert desk.orders().action == "notice"
    desk.take(Orders(seq=0), authoritative=True)
    assert desk.orders().action == "run"


def test_a_notice_of_a_controller_that_has_gone_is_withdrawn(
    desk: ReportState, clock: Clock
) -> None:
    desk.take(Orders(seq=5, action="notice", notice=1, deadline_s=60), authoritative=True)
    clock.now += 60 + GRACE_S - 1
    desk.expire()
    assert desk.orders().action == "notice"
    same = Orders(seq=5, action="notice", notice=1, deadline_s=0)
    desk.take(same, authoritative=True)
    clock.now += GRACE_S - 1
    desk.expire()
    assert desk.orders().action == "notice", "a controller that is there may take its time"
    clock.now += 2
    desk.expire()
    orders = desk.orders()
    assert (orders.action, orders.seq, orders.notice) == ("resume", 5, 1)
    desk.take(Orders(seq=5, action="notice", notice=1, deadline_s=60), authoritative=False)
    assert desk.orders().action == "resume", "an old answer does not bring it back"


def test_a_profile_is_reported_once(desk: ReportState) -> None:
    rows = [["conv", 0.01, 0.02, 4096, 1024.0], ["head", 0.01, 0.02, 40, 1e6]]
    desk.tell({"profile": rows, "profile_batch": 8})
    desk.tell({"step": 3})
    assert desk.report().profile == tuple(map(tuple, rows))
    desk.reported(desk.report())
    assert (desk.report().profile, desk.report().profile_batch) == ((), None)


def test_a_profile_too_large_is_left_out_with_a_word(
    desk: ReportState, capfd: pytest.CaptureFixture[str]
) -> None:
    desk.tell({"step": 3, "profile": [[f"{i:0100}", 1, 1, 1, 1] for i in range(900)], "gpus": 9})
    assert (desk.report().step, desk.report().profile) == (3, ())
    assert "field profile: has" in capfd.readouterr().err


def test_an_attempt_in_place_begins_anew(desk: ReportState) -> None:
    desk.tell({"phase": "ended", "exit_code": 83, "step": 9, "layout": "2x2", "notice": 4})
    desk.tell({"startup_s": 3.0, "profile": [["a", 1, 1, 1, 1]], "forward_s": 0.5, "proven": True})
    assert desk.wait_urgent(0)
    desk.begin_attempt()
    report = desk.report()
    assert (report.phase, report.exit_code, report.layout, report.notice) == (
        "starting", None, "", None,
    )  # fmt: skip
    assert (report.startup_s, report.forward_s, report.profile) == (None, None, ())
    assert (report.step, report.proven, report.gpus) == (9, True, 4)
    assert desk.wait_urgent(0), "the controller is told at once"


def test_what_the_orders_are(desk: ReportState) -> None:
    heard: list[Orders] = []
    desk.subscribe(heard.append)
    assert desk.news() == (Orders(), "none")
    desk.expect()
    assert desk.news() == (Orders(), "expected")
    desk.take(Orders(), authoritative=False)
    assert desk.news() == (Orders(), "heard")
    assert heard == [Orders(), Orders()], "the first word is news whatever it says"
    desk.take(Orders(), authoritative=False)
    assert len(heard) == 2


def test_a_controller_out_of_reach_is_expected_no_more(desk: ReportState) -> None:
    heard: list[Orders] = []
    desk.subscribe(heard.append)
    desk.despair()
    desk.expect()
    desk.despair()
    desk.despair()
    assert desk.news() == (Orders(), "none")
    assert len(heard) == 2, "said once, to those who wait"
    desk.take(Orders(seq=3, layout="2x1"), authoritative=False)
    assert desk.news() == (Orders(seq=3, layout="2x1"), "heard")
