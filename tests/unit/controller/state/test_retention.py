"""The ledger stays small, whatever happens in years."""

import sqlite3
from pathlib import Path

import pytest

from slurm_elastic.controller.state import retention
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.ledger_schema import VERSIONS
from tests.support.controller.job_records import SEGMENT

DAY = 86400.0
NOW = 1_800_000_000.0


def fill(path: Path, *, days: int, per_day: int, now: float = NOW) -> None:
    """Years of rows of every kind, as large as real ones, the newest from today."""
    body = '{"reason": "' + "x" * 700 + '"}'
    times = [now - DAY * (d + i / per_day) for d in range(days) for i in range(per_day)]
    with sqlite3.connect(path) as db:
        db.executemany(
            "INSERT INTO transitions (job_id, key, state, live, updated, body) "
            "VALUES (?, ?, 'DONE', 0, ?, ?)",
            [(i, f"{i}@1", t, body) for i, t in enumerate(times)],
        )
        db.executemany(
            "INSERT INTO segments VALUES (?, ?, 'alice', 'gpt', 0, 'a100', 4, 'n1:4', ?, ?, NULL)",
            [(f"{i}@1", i, t - 600, t) for i, t in enumerate(times)],
        )
        db.executemany(
            "INSERT INTO jobs VALUES (?, ?, ?, ?)",
            [(f"{i}@1", i, t, body) for i, t in enumerate(times)],
        )
        for table in ("applications", "profiles"):
            db.executemany(
                f"INSERT INTO {table} VALUES (?, ?, '', ?, ?)",
                [(f"user{i % 50}", f"n{i}", t, body) for i, t in enumerate(times)],
            )
        db.execute("UPDATE meta SET value = ? WHERE name = 'kept_since'", (str(min(times)),))
    db.close()


def settle(ledger: Ledger, now: float = NOW, **more) -> int:
    """Calls that it took until nothing was left to do."""
    for count in range(1, 1000):
        if not ledger.forget(now, **({"keep_days": 90, "keep_mb": 1024} | more)):
            return count
    raise AssertionError("it never ends")


def counted(path: Path) -> dict[str, int]:
    with sqlite3.connect(path) as db:
        names = ("transitions", "segments", "jobs", "applications", "profiles")
        found = {n: db.execute(f"SELECT count(*) FROM {n}").fetchone()[0] for n in names}
    db.close()
    return found


def test_three_years_shrink_to_what_is_kept_and_so_does_the_file(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    fill(path, days=1100, per_day=10)
    before = path.stat().st_size
    ledger = Ledger(path)
    assert 1 < settle(ledger) < 10, "in pieces, but not for ever"
    for _ in range(20):  # pages go back little by little
        ledger.forget(NOW, keep_days=90, keep_mb=1024)
    assert ledger.since() == NOW - 90 * DAY
    ledger.close()
    assert set(counted(path).values()) <= {900, 901}
    assert path.stat().st_size < before / 8


def test_one_call_deletes_a_bounded_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(retention, "PIECE", 50)
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    fill(path, days=200, per_day=2)
    ledger = Ledger(path)
    assert ledger.forget(NOW, keep_days=90, keep_mb=1024) == 5 * 50
    ledger.close()
    assert set(counted(path).values()) == {350}


def test_the_oldest_go_earlier_when_the_file_would_be_too_large(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    fill(path, days=80, per_day=100)
    ledger = Ledger(path)
    settle(ledger, keep_mb=10)
    for _ in range(20):
        ledger.forget(NOW, keep_days=90, keep_mb=10)
    left, since = ledger.transitions(last=100_000), ledger.since()
    ledger.close()
    assert path.stat().st_size <= 10 * 2**20
    assert len(left) > 1000, "no more than needed"
    assert NOW - 80 * DAY < since <= min(t["updated"] for t in left)


def test_what_is_needed_stays_however_old(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    live = ledger.add_transition(7, "7@1", {"a": 1})
    ledger.put_job("7@1", 7, {"held": True})
    ledger.put_job("8@1", 8, {"held": True})
    ledger.put("policy_state", {"a": 1})
    ledger.begin_segment(SEGMENT)
    settle(ledger, now=4e9, keep_days=1, alive={"7@1"})
    assert [t["id"] for t in ledger.transitions()] == [live]
    assert list(ledger.open_segments()) == ["7@1"]
    assert ledger.get_job("7@1") == {"held": True}, "pending for months, held by its owner"
    assert ledger.get_job("8@1") is None
    assert ledger.get("policy_state") == {"a": 1}


def test_a_ledger_of_an_older_release_learns_to_shrink_and_says_since_when(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as db:  # as version 3 made it
        for part in VERSIONS[:3]:
            db.executescript(part)
        db.execute("PRAGMA user_version = 3")
        db.execute(
            "INSERT INTO transitions (job_id, key, state, live, updated, body) "
            "VALUES (1, 'k', 'DONE', 0, 5000.0, '{}')"
        )
    db.close()
    ledger = Ledger(path)
    assert ledger.since() == 5000.0
    assert ledger.stored_version == 3
    ledger.close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA auto_vacuum").fetchone()[0] == 2
    db.close()


def test_a_new_one_keeps_records_from_now_on(tmp_path):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    first = ledger.since()
    ledger.close()
    assert first > 1.6e9
    again = Ledger(path)
    assert again.since() == first


@pytest.mark.parametrize(
    "keep", [{"keep_days": 90, "keep_mb": 1024}, {"keep_days": 1, "keep_mb": 16}]
)
def test_a_young_ledger_loses_nothing(tmp_path, keep):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    done = ledger.add_transition(7, "7@1", {"a": 1})
    ledger.put_transition(done, "DONE", {"a": 1}, live=False)
    since = ledger.since()
    assert ledger.forget(since + 3600, **keep) == 0
    assert ledger.since() == since
    assert len(ledger.transitions()) == 1
