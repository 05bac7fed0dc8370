"""What the ledger keeps, and what it says when it cannot."""

import sqlite3

import pytest

from slurm_elastic.controller.ledger import Ledger, LedgerError

SEGMENT = {
    "key": "7@1",
    "job_id": 7,
    "user": "alice",
    "name": "gpt",
    "run": 0,
    "gpu_type": "a100",
    "gpus": 4,
    "nodes": "n1:4",
    "start": 100.0,
}


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


def test_old_entries_are_forgotten_and_live_ones_kept(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    done, live = (ledger.add_transition(i, "k", {"a": 1}) for i in (1, 2))
    ledger.put_transition(done, "DONE", {"a": 1}, live=False)
    ledger.begin_segment(SEGMENT)
    ledger.end_segment("7@1", 200.0)
    ledger.forget(4e9)
    assert [t["id"] for t in ledger.transitions()] == [live]
    assert ledger.segments() == []


@pytest.mark.parametrize("content", [b"not a database", b"SQLite format 3\0" + b"\xff" * 200])
def test_a_damaged_file_is_one_line_with_the_remedy(tmp_path, content):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(content)
    with pytest.raises(LedgerError, match="move the file away") as caught:
        Ledger(path)
    assert "\n" not in str(caught.value)


def test_a_newer_ledger_is_refused(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(LedgerError, match="newer slurm-elastic"):
        Ledger(path)
