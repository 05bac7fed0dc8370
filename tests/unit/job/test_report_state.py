"""Report and orders of a job: merging of fields, order of orders, subscribers."""

import math
import threading

import pytest

from slurm_elastic.core.member_orders import MemberOrders
from slurm_elastic.core.report import Orders, Report
from slurm_elastic.job.report_state import GRACE_S, ReportState
from tests.support.job.simulated_clock import SimulatedClock


@pytest.fixture
def state(clock: SimulatedClock) -> ReportState:
    return ReportState(
        Report(job_id=7, run=1, phase="starting", kind="script", gpus=4), clock=clock
    )


def test_pieces_become_a_report(state: ReportState) -> None:
    state.update({"phase": "training", "step": 3, "step_time_s": 0.5})
    state.update({"step": 4, "progress": 0.25})
    report = state.report()
    assert (report.phase, report.step, report.progress, report.gpus) == ("training", 4, 0.25, 4)


def test_a_value_of_none_clears_a_field(state: ReportState) -> None:
    state.update({"notice": 3})
    state.update({"notice": None})
    assert state.report().notice is None


def test_a_job_cannot_report_for_another_or_claim_gpus(state: ReportState) -> None:
    state.update({"job_id": 8, "run": 0, "gpus": 400, "nodes": 9})
    report = state.report()
    assert (report.job_id, report.run, report.gpus, report.nodes) == (7, 1, 4, 1)


def test_nonsense_is_left_out_and_said_once(
    state: ReportState, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        state.update({"step_time_s": math.nan, "phase": "flying", "step": 5, "unknown": 1})
    assert state.report().step == 5
    assert state.report().phase == "starting"
    log = capfd.readouterr().err
    assert log.count("field step_time_s: nan") == 1
    assert log.count("field phase: 'flying'") == 1


def test_whole_numbers_may_come_as_floats(state: ReportState) -> None:
    state.update({"step": 12.0, "step_time_s": 2.0})
    assert state.report().step == 12
    assert state.report().step_time_s == 2.0


def test_a_checkpoint_grows_older(state: ReportState, clock: SimulatedClock) -> None:
    state.update({"checkpoint_age_s": 2.0})
    clock.now += 5
    state.update({"step": 9})
    assert state.report().checkpoint_age_s == 7.0


def test_a_measurement_is_reported_once(state: ReportState) -> None:
    state.update({"step_time_s": 0.5, "steps_measured": 20})
    state.mark_reported(state.report())
    assert (state.report().step_time_s, state.report().steps_measured) == (None, 0)
    sent = state.report()
    state.update({"step_time_s": 0.6, "steps_measured": 10})
    state.mark_reported(sent)
    assert state.report().step_time_s == 0.6, "a newer one is still to be reported"


def test_what_is_urgent(state: ReportState) -> None:
    state.update({"step": 3})
    assert not state.wait_urgent(0)
    state.update({"phase": "saved", "notice": 2})
    assert state.wait_urgent(0)
    assert not state.wait_urgent(0)
    threading.Timer(0.05, state.update, [{"proven": True}]).start()
    assert state.wait_urgent(10)


def test_orders_reach_subscribers_when_they_change(
    state: ReportState, clock: SimulatedClock
) -> None:
    heard: list[Orders] = []
    state.subscribe(heard.append)
    notice = Orders(seq=4, action="notice", notice=9, deadline_s=30)
    state.receive(notice, authoritative=True)
    state.receive(Orders(seq=4, action="notice", notice=9, deadline_s=20), authoritative=False)
    assert heard == [Orders(), notice]
    clock.now += 10
    assert state.orders().deadline_s == 20


def test_the_first_answer_counts_whatever_its_number(state: ReportState) -> None:
    state.receive(Orders(seq=0, report_every_s=2), authoritative=False)
    assert state.orders().report_every_s == 2


def test_an_overtaken_answer_does_not_count_and_a_lost_ledger_does(state: ReportState) -> None:
    state.receive(Orders(seq=5, action="notice", notice=1), authoritative=True)
    state.receive(Orders(seq=4), authoritative=False)
    assert state.orders().action == "notice"
    state.receive(Orders(seq=0), authoritative=True)
    assert state.orders().action == "run"


def test_a_notice_of_a_controller_that_has_gone_is_withdrawn(
    state: ReportState, clock: SimulatedClock
) -> None:
    state.receive(Orders(seq=5, action="notice", notice=1, deadline_s=60), authoritative=True)
    clock.now += 60 + GRACE_S - 1
    state.expire_notice()
    assert state.orders().action == "notice"
    same = Orders(seq=5, action="notice", notice=1, deadline_s=0)
    state.receive(same, authoritative=True)
    clock.now += GRACE_S - 1
    state.expire_notice()
    assert state.orders().action == "notice", "a controller that is there may take its time"
    clock.now += 2
    state.expire_notice()
    orders = state.orders()
    assert (orders.action, orders.seq, orders.notice) == ("resume", 5, 1)
    state.receive(Orders(seq=5, action="notice", notice=1, deadline_s=60), authoritative=False)
    assert state.orders().action == "resume", "an old answer does not bring it back"


def test_a_profile_is_reported_once(state: ReportState) -> None:
    rows = [["conv", 0.01, 0.02, 4096, 1024.0], ["head", 0.01, 0.02, 40, 1e6]]
    state.update({"profile": rows, "profile_batch": 8})
    state.update({"step": 3})
    assert state.report().profile == tuple(map(tuple, rows))
    state.mark_reported(state.report())
    assert (state.report().profile, state.report().profile_batch) == ((), None)


def test_a_profile_too_large_is_left_out_with_a_word(
    state: ReportState, capfd: pytest.CaptureFixture[str]
) -> None:
    state.update({"step": 3, "profile": [[f"{i:0100}", 1, 1, 1, 1] for i in range(900)], "gpus": 9})
    assert (state.report().step, state.report().profile) == (3, ())
    assert "field profile: has" in capfd.readouterr().err


def test_an_attempt_in_place_begins_anew(state: ReportState) -> None:
    state.update({"phase": "ended", "exit_code": 83, "step": 9, "layout": "2x2", "notice": 4})
    state.update(
        {"startup_s": 3.0, "profile": [["a", 1, 1, 1, 1]], "forward_s": 0.5, "proven": True}
    )
    assert state.wait_urgent(0)
    state.begin_attempt()
    report = state.report()
    assert (report.phase, report.exit_code, report.layout, report.notice) == (
        "starting", None, "", None,
    )  # fmt: skip
    assert (report.startup_s, report.forward_s, report.profile) == (None, None, ())
    assert (report.step, report.proven, report.gpus) == (9, True, 4)
    assert state.wait_urgent(0), "the controller is told at once"


def test_what_the_orders_are(state: ReportState) -> None:
    heard: list[Orders] = []
    state.subscribe(heard.append)
    assert state.orders_and_source() == (Orders(), "none")
    state.expect_controller()
    assert state.orders_and_source() == (Orders(), "expected")
    state.receive(Orders(), authoritative=False)
    assert state.orders_and_source() == (Orders(), "heard")
    assert heard == [Orders(), Orders()], "the first word is news whatever it says"
    state.receive(Orders(), authoritative=False)
    assert len(heard) == 2


def test_a_controller_out_of_reach_is_expected_no_more(state: ReportState) -> None:
    heard: list[Orders] = []
    state.subscribe(heard.append)
    state.give_up_controller()
    state.expect_controller()
    state.give_up_controller()
    state.give_up_controller()
    assert state.orders_and_source() == (Orders(), "none")
    assert len(heard) == 2, "said once, to those who wait"
    state.receive(Orders(seq=3, layout="2x1"), authoritative=False)
    assert state.orders_and_source() == (Orders(seq=3, layout="2x1"), "heard")


def test_the_program_cannot_say_what_its_members_are(state: ReportState) -> None:
    state.update({"in_place": True, "change": 4, "companions": [[1, 2, "joined"]]})
    report = state.report()
    assert (report.in_place, report.change, report.companions) == (None, None, ())
    state.set_own({"in_place": True, "companions": ((1, 2, "joined"),)})
    assert state.report().companions == ((1, 2, "joined"),)
    assert state.wait_urgent(0)


def test_measurements_of_another_world_are_not_reported(state: ReportState) -> None:
    state.update({"step_time_s": 0.5, "steps_measured": 20, "profile": [["a", 1, 1, 1, 1]]})
    state.set_own({"gpus": 4, "generation": 0})
    assert state.report().step_time_s == 0.5
    state.set_own({"gpus": 6, "generation": 1})
    report = state.report()
    assert (report.gpus, report.step_time_s, report.steps_measured) == (6, None, 0)
    assert report.profile, "that of a layer does not depend on the number of ranks"


def test_orders_whose_deadline_counts_down_are_the_same(state: ReportState) -> None:
    heard: list[Orders] = []
    state.subscribe(heard.append)
    for deadline_s in (30.0, 20.0):
        members = MemberOrders(change=3, join=(2,), deadline_s=deadline_s)
        state.receive(Orders(seq=4, members=members), authoritative=True)
    assert len(heard) == 2


def test_only_the_notice_of_the_change_is_served_by_a_restart(state: ReportState) -> None:
    """A program is also started again as it has lost a companion."""
    heard: list[Orders] = []
    state.subscribe(heard.append)
    notice = Orders(seq=4, action="notice", notice=17, deadline_s=60.0)
    state.receive(notice, authoritative=True)
    for change in (None, 16):
        state.serve_notice(change)
        assert (state.orders().action, state.orders().notice) == ("notice", 17)
    state.serve_notice(17)
    state.receive(notice, authoritative=True)
    assert [orders.action for orders in heard] == ["run", "notice", "run"]
