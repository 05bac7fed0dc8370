import time
from types import SimpleNamespace

from slurm_elastic.controller.published_view import PublishedView
from slurm_elastic.core.reason import Reason

PARTS = ("reader", "store", "engine", "tuner", "neighbours", "lengths", "sleep")
RIVAL = Reason("other-controller", error="it runs on h2")
SLURM = Reason("slurm-unreachable", error="timed out")


def published(**parts):
    return PublishedView("act", **(dict.fromkeys(PARTS) | parts))


def test_notes_are_shown_in_the_order_in_which_their_names_came():
    shown = published()
    shown.note("rival", None)
    shown.note("slurm", SLURM)
    shown.note("rival", RIVAL)
    assert shown.view.notes == (RIVAL, SLURM)
    assert (shown.noted("rival"), shown.noted("ledger")) == (RIVAL, None)
    shown.note("rival", None)
    assert (shown.view.notes, shown.noted("rival")) == ((SLURM,), None)


def test_a_note_that_is_shown_already_makes_no_new_view():
    shown = published()
    shown.note("slurm", SLURM)
    view = shown.view
    shown.note("slurm", SLURM)
    assert shown.view is view


def test_all_is_private_until_slurm_conf_is_read_and_it_is_read_again(monkeypatch):
    now, answers = [1000.0], [("jobs", "users"), ()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    reader = SimpleNamespace(settings=lambda: {"private_data": answers.pop(0)})
    shown = published(reader=reader)
    assert shown.private == {"jobs", "usage", "nodes", "partitions"}
    shown.read_private()
    assert shown.private == {"jobs"}
    now[0] += 300
    shown.read_private()
    assert shown.private == {"jobs"}
    now[0] += 1
    shown.read_private()
    assert shown.private == frozenset()


def test_changes_under_way_and_the_newest_reports_are_shown():
    live = SimpleNamespace(
        id=3, job_id=7, since=5.0, target=None, problem=None, reason=RIVAL,
        state=SimpleNamespace(value="DRAIN"),
    )  # fmt: skip
    engine = SimpleNamespace(live={7: live})
    shown = published(engine=engine, store=SimpleNamespace(last_reports=lambda _: {7: "report"}))
    shown.show_changes()
    (row,) = shown.view.transitions
    assert (row["id"], row["job_id"], row["state"], row["reason"]) == (3, 7, "DRAIN", RIVAL)
    assert shown.view.reports == {7: "report"}
