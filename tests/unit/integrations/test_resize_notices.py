"""Notices of a resize in a training: one save each, one wait, and reports of a script."""

import threading

import pytest

pytest.importorskip("torch")

from slurm_elastic.integrations.resize_notices import ResizeNotices
from slurm_elastic.job.rank_socket import SOCKET_VARIABLE
from tests.integrations.worlds import FakeEsrun


@pytest.fixture
def esrun(monkeypatch):
    server = FakeEsrun()
    server.order("run")
    monkeypatch.setenv(SOCKET_VARIABLE, server.path)
    monkeypatch.setenv("SLURM_ELASTIC_WORLD_SIZE", "1")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return server


@pytest.fixture
def training():
    """Return a function that makes connected notices, which are closed after the test."""
    made = []

    def make(**options):
        made.append(ResizeNotices(**options))
        while made[-1]._link.connected and made[-1]._link.orders().report_every_s:
            threading.Event().wait(0.01)  # the first orders are on their way
        return made[-1]

    yield make
    for notices in made:
        notices.close()


def save_is_requested(notices):
    """Return whether a save is requested within ten seconds: the order is on its way."""
    for _ in range(1000):
        if notices.save_requested():
            return True
        threading.Event().wait(0.01)
    return False


def test_without_esrun_nothing_is_requested(training, monkeypatch):
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    notices = training()
    assert not notices.save_requested()
    notices.trained(1)
    notices.saved(1)
    notices.close()


def test_a_save_that_answers_a_notice_waits_until_it_is_withdrawn(esrun, training):
    notices = training()
    esrun.order("notice", 5)
    assert save_is_requested(notices)
    threading.Timer(0.3, lambda: esrun.order("resume")).start()
    notices.saved(12)
    assert esrun.state.orders().action == "resume"
    assert not notices.save_requested()
    esrun.wait_for("checkpoint_step", 12)
    esrun.order("notice", 6)
    assert save_is_requested(notices), "the next notice is another one"


def test_a_notice_that_is_not_withdrawn_holds_it_for_a_limited_time(esrun, training):
    notices = training(wait_s=0.2)
    esrun.order("notice", 5)
    assert save_is_requested(notices)
    notices.saved(12)
    assert not notices.save_requested(), "answered once"


def test_the_end_of_the_process_ends_the_wait(esrun, training):
    signals = []
    notices = training(ended=lambda: bool(signals))
    esrun.order("notice", 5)
    assert save_is_requested(notices)
    threading.Timer(0.2, lambda: signals.append("TERM")).start()
    notices.saved(12)
    assert esrun.state.orders().action == "notice"


def test_an_ordinary_save_does_not_wait(esrun, training):
    notices = training()
    notices.saved(3)
    esrun.wait_for("checkpoint_step", 3)


def test_a_notice_withdrawn_before_the_save_does_not_hold_it(esrun, training):
    notices = training()
    esrun.order("notice", 5)
    assert save_is_requested(notices)
    esrun.order("resume")
    while notices._link.orders().action == "notice":
        threading.Event().wait(0.01)
    notices.saved(3)
    esrun.wait_for("checkpoint_step", 3)


def test_reports_are_those_of_a_script(esrun, training):
    notices = training()
    for step in range(1, 5):
        notices.trained(step, progress=step / 4, global_batch=32)
    esrun.wait_for("step", 4)
    assert all(report["kind"] == "script" for report in esrun.reports)
    first, *others = esrun.reports
    assert first["startup_s"] > 0
    assert [report.get("steps_measured") for report in others] == [None, None, 3]
    assert others[-1]["progress"] == 1.0


def test_an_older_esrun_gets_no_reports_but_is_obeyed(esrun, training, monkeypatch):
    """It would take them for those of slurm_elastic.training, and ignore --checkpoint."""
    monkeypatch.delenv("SLURM_ELASTIC_WORLD_SIZE")
    notices = training(wait_s=0.1)
    esrun.order("notice", 5)
    assert save_is_requested(notices)
    notices.trained(1)
    notices.trained(2)
    notices.saved(2)
    notices.close()
    assert esrun.reports == []


def test_other_ranks_are_not_connected(esrun, training, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    notices = training()
    esrun.order("notice", 5)
    threading.Event().wait(0.1)
    assert not notices.save_requested()
