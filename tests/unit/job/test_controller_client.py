"""Client of the controller, with a fake controller."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slurm_elastic.core.report import Orders, Report
from slurm_elastic.job import controller_client
from slurm_elastic.job.controller_client import ControllerClient
from slurm_elastic.job.report_state import ReportState
from slurm_elastic.rpc import frames
from tests.support.patience import PATIENCE_S


class Controller:
    """Fake controller: answers each call with its orders, or raises its error."""

    def __init__(self) -> None:
        self.reports: queue.Queue[dict[str, Any]] = queue.Queue()
        self.polls: queue.Queue[dict[str, Any]] = queue.Queue()
        self.orders = Orders(report_every_s=1000)
        self.trouble: Exception | None = None
        self.changed = threading.Event()
        self.calls = 0

    def call(self, address: str, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        assert address == "ctl:1"
        self.calls += 1
        if self.trouble:
            raise self.trouble
        if request["op"] == "report":
            self.reports.put(request["report"])
        else:
            self.polls.put(request)
            if request["seen"] == self.orders.seq:
                self.changed.wait(5)
                self.changed.clear()
        return {"orders": self.orders.to_wire()}

    def give(self, orders: Orders) -> None:
        self.orders = orders
        self.changed.set()


@pytest.fixture(autouse=True)
def _all_end() -> Iterator[None]:
    """Wait for the client's threads: they would call the next test's controller."""
    yield
    for thread in threading.enumerate():
        if thread.name in ("report", "orders"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    controller = Controller()
    monkeypatch.setattr(frames, "call", controller.call)
    monkeypatch.setattr(controller_client, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(controller_client, "_LAST_PAUSE_S", 0.05)
    return controller


@pytest.fixture
def state() -> ReportState:
    return ReportState(Report(job_id=7, run=2, phase="starting"))


@pytest.fixture
def running(controller: Controller, state: ReportState) -> Iterator[ControllerClient]:
    running = ControllerClient(state, "ctl:1")
    running.start()
    yield running
    controller.give(Orders(seq=99))
    running.stop(final_report_s=5)


def eventually(true: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_it_reports_at_once_and_on_every_change_of_phase(
    controller: Controller, state: ReportState, running: ControllerClient
) -> None:
    assert controller.reports.get(timeout=PATIENCE_S)["phase"] == "starting"
    state.update({"step": 4})
    state.update({"phase": "saved", "notice": 3})
    report = controller.reports.get(timeout=PATIENCE_S)
    assert (report["phase"], report["notice"], report["step"]) == ("saved", 3, 4)


def test_it_reports_regularly(controller: Controller, state: ReportState) -> None:
    controller.orders = Orders(report_every_s=0.05)
    running = ControllerClient(state, "ctl:1")
    running.start()
    for _ in range(4):
        controller.reports.get(timeout=PATIENCE_S)
    running.stop(final_report_s=5)


def test_the_long_poll_brings_orders(
    controller: Controller, state: ReportState, running: ControllerClient
) -> None:
    poll = controller.polls.get(timeout=PATIENCE_S)
    assert {k: poll[k] for k in ("v", "job_id", "run", "seen")} == {
        "v": 1,
        "job_id": 7,
        "run": 2,
        "seen": 0,
    }
    controller.give(Orders(seq=5, action="notice", notice=1))
    eventually(lambda: state.orders().action == "notice")
    assert controller.polls.get(timeout=PATIENCE_S)["seen"] == 5


def test_a_silent_controller_is_said_once_and_its_return_too(
    controller: Controller, state: ReportState, capfd: pytest.CaptureFixture[str]
) -> None:
    controller.trouble = frames.ControllerUnreachableError("controller ctl:1: Connection refused")
    running = ControllerClient(state, "ctl:1")
    running.start()
    time.sleep(0.5)
    assert state.orders() == Orders()
    controller.trouble = None
    controller.reports.get(timeout=PATIENCE_S)
    report, end = "", time.monotonic() + PATIENCE_S
    while "answers again" not in report and time.monotonic() < end:  # its thread says it
        report += capfd.readouterr().err
        time.sleep(0.01)
    running.stop(final_report_s=5)
    report += capfd.readouterr().err
    assert report.count("Connection refused; the job continues without it") == 1
    assert report.count("answers again") == 1


def test_a_notice_runs_out_although_the_controller_is_dead(
    controller: Controller,
    state: ReportState,
    running: ControllerClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slurm_elastic.job.report_state.GRACE_S", 0.1)
    controller.polls.get(timeout=PATIENCE_S)
    controller.give(Orders(seq=5, action="notice", notice=1, deadline_s=0.1))
    eventually(lambda: state.orders().action == "notice")
    controller.trouble = frames.ControllerUnreachableError("controller ctl:1: Connection refused")
    state.update({"phase": "saved", "notice": 1})
    eventually(lambda: state.orders().action == "resume")


def test_a_refusal_is_said_once(
    controller: Controller, state: ReportState, capfd: pytest.CaptureFixture[str]
) -> None:
    controller.trouble = frames.RequestRejectedError("job 7 is not elastic")
    running = ControllerClient(state, "ctl:1")
    running.start()
    time.sleep(0.3)
    running.stop(final_report_s=0)
    assert capfd.readouterr().err.count("ctl:1 rejects the report: job 7 is not elastic") == 1


def test_a_controller_that_does_not_know_the_job_yet_is_no_news(
    controller: Controller, state: ReportState, capfd: pytest.CaptureFixture[str]
) -> None:
    controller.trouble = frames.RequestRejectedError("job 7 is not known", "unknown_job")
    running = ControllerClient(state, "ctl:1")
    running.start()
    time.sleep(0.2)
    controller.trouble = None
    controller.reports.get(timeout=PATIENCE_S)
    controller.give(Orders(seq=1))
    running.stop(final_report_s=5)
    assert capfd.readouterr().err == ""


def test_orders_that_are_not_understood_are_said(
    controller: Controller, state: ReportState, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(frames, "call", lambda *_, **__: {"orders": {"action": "dance"}})
    running = ControllerClient(state, "ctl:1")
    running.start()
    time.sleep(0.3)
    running.stop(final_report_s=1)
    assert capfd.readouterr().err.count("'dance' is invalid: expected one of") == 1
    assert state.orders() == Orders()


def test_the_last_report_is_waited_for(controller: Controller, state: ReportState) -> None:
    running = ControllerClient(state, "ctl:1")
    running.start()
    controller.reports.get(timeout=PATIENCE_S)
    state.update({"phase": "ended", "exit_code": 3})
    controller.give(Orders(seq=1))
    running.stop(final_report_s=5)
    reports = [controller.reports.get(timeout=PATIENCE_S)]
    while not controller.reports.empty():
        reports.append(controller.reports.get())
    assert (reports[-1]["phase"], reports[-1]["exit_code"]) == ("ended", 3)


def test_a_controller_that_never_answered_is_not_waited_for(
    controller: Controller, state: ReportState
) -> None:
    controller.trouble = frames.ControllerUnreachableError("nobody")
    running = ControllerClient(state, "ctl:1")
    running.start()
    began = time.monotonic()
    running.stop(final_report_s=30)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("trouble", "expected"),
    [
        (frames.RequestRejectedError("job 7 is not known", "unknown_job"), "expected"),
        (frames.RequestRejectedError("job 7 is not elastic"), "none"),
        (frames.ControllerUnreachableError("controller ctl:1: Connection refused"), "none"),
    ],
)
def test_whether_the_first_orders_are_still_to_come(
    controller: Controller, state: ReportState, trouble: Exception, expected: str
) -> None:
    state.expect_controller()
    controller.trouble = trouble
    running = ControllerClient(state, "ctl:1")
    calls = controller.calls
    running.start()
    eventually(lambda: controller.calls > calls + 1)
    assert state.orders_and_source()[1] == expected
    controller.trouble = None
    controller.reports.get(timeout=PATIENCE_S)
    eventually(lambda: state.orders_and_source()[1] == "heard")
    controller.give(Orders(seq=1))
    running.stop(final_report_s=5)


def test_a_program_that_fails_at_once_is_heard_all_the_same(
    controller: Controller, state: ReportState
) -> None:
    """A job that fails before the controller has answered is reported."""
    controller.trouble = frames.RequestRejectedError("not known yet", "unknown_job")
    running = ControllerClient(state, "ctl:1")
    running.start()
    state.update({"phase": "ended", "exit_code": 3})
    eventually(lambda: controller.calls)
    timer = threading.Timer(0.3, lambda: setattr(controller, "trouble", None))
    timer.start()
    running.stop(final_report_s=5, failed=True)
    timer.join()
    report = controller.reports.get(timeout=0)
    assert (report["phase"], report["exit_code"]) == ("ended", 3)
