"""What the ledger keeps, and what it says when it cannot."""

import sqlite3

import pytest

from slurm_elastic.controller.state.ledger import Ledger, LedgerError
from tests.support.controller.job_records import SEGMENT


def test_everything_is_there_after_a_restart(tmp_path):
    path = tmp_path / "ledger.sqlite"
    one = Ledger(path)
    first = one.add_transition(7, "7@1", {"reason": "grow"})
    second = one.add_transition(8, "8@1", {"reason": "move"})
    one.put_transition(second, "DONE", {"reason": "move"}, live=False)
    one.put_job("7@1", 7, {"held": True})
    one.put("policy_state", {"a": [1]})
    one.begin_segment(SEGMENT)
    one.close()
    again = Ledger(path)
    assert again.live_transitions() == [(first, "RESERVE", {"reason": "grow"})]
    assert [t["id"] for t in again.transitions(8)] == [second]
    assert again.get_job("7@1") == {"held": True}
    assert again.get("policy_state") == {"a": [1]}
    assert list(again.open_segments()) == ["7@1"]


@pytest.mark.parametrize("content", [b"not a database", b"SQLite format 3\0" + b"\xff" * 200])
def test_a_damaged_file_is_one_line_with_the_remedy(tmp_path, content):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(content)
    with pytest.raises(LedgerError, match="move the file away") as caught:
        Ledger(path)
    assert "\n" not in str(caught.value)


def test_a_full_disk_asks_for_room(tmp_path, monkeypatch):
    """A ledger that cannot grow is not to be moved away."""

    def full(*_args, **_options):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(sqlite3, "connect", full)
    with pytest.raises(LedgerError, match="is full; make room"):
        Ledger(tmp_path / "ledger.sqlite")


def test_a_newer_ledger_is_refused(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(LedgerError, match="newer slurm-elastic"):
        Ledger(path)


def test_many_jobs_are_written_all_or_none(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.put_jobs((f"{i}@1", i, {"n": i}) for i in range(100))
    assert ledger.get_job("99@1") == {"n": 99}
    with pytest.raises(LedgerError):
        ledger.put_jobs([("a", 1, {"n": 1}), ("b", None, {"n": 2})])
    assert ledger.get_job("a") is None
    ledger.put_jobs([])
    ledger.put_job("b", 3, {"n": 3})  # no transaction was left open
    assert ledger.get_job("b") == {"n": 3}
