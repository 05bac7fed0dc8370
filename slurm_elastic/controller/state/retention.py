"""Retention of the ledger's rows, and the size of its file.

Rows older than `keep_days` are deleted, and the oldest earlier when the file would be larger
than `keep_mb`. Rows that a live transition or a present job needs stay. Only so many rows are
deleted at once, and pages given back to the file system, that other calls are not delayed; the
next call goes on.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Collection
from typing import NamedTuple

#: Rows of a table that one call deletes at most, and pages that it gives back.
PIECE, PAGES = 5000, 2000
#: Share of the kept time that is deleted at once when the file is too large.
_SLICE = 0.1


class _Table(NamedTuple):
    """Rows with a time; those that must stay are left out by a condition."""

    name: str
    time: str
    where: str = "1"


_TABLES = (
    _Table("transitions", "updated", "live = 0"),
    _Table("segments", "end", "end IS NOT NULL"),
    _Table("applications", "seen"),
    _Table("profiles", "seen"),
)

#: Tables that `since` reads, created when the ledger is new or older than this.
SCHEMA = """
INSERT OR IGNORE INTO meta SELECT 'kept_since', coalesce(min(t), strftime('%s', 'now')) FROM (
    SELECT min(updated) AS t FROM transitions UNION ALL SELECT min(start) FROM segments);
CREATE INDEX IF NOT EXISTS transitions_ended ON transitions (updated) WHERE live = 0;
CREATE INDEX IF NOT EXISTS segments_ended ON segments (end) WHERE end IS NOT NULL;
CREATE INDEX IF NOT EXISTS jobs_seen ON jobs (seen);
"""


def prepare(db: sqlite3.Connection) -> None:
    """Let the file shrink: a new one at once, an older one after it is rewritten once.

    Raises:
        sqlite3.Error: there is no room for that; the file stays usable.
    """
    if db.execute("PRAGMA auto_vacuum").fetchone()[0] == 0:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("VACUUM")


def since(db: sqlite3.Connection) -> float:
    """Return the epoch s from which on all rows are kept."""
    row = db.execute("SELECT value FROM meta WHERE name = 'kept_since'").fetchone()
    return float(row[0]) if row else 0.0


def used_bytes(db: sqlite3.Connection) -> int:
    """Return the bytes of the file without free pages."""
    size, pages, free = (
        db.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_size", "page_count", "freelist_count")
    )
    return int(size * (pages - free))


def forget(
    db: sqlite3.Connection,
    now: float,
    *,
    keep_days: float,
    keep_mb: float,
    alive: Collection[str],
) -> int:
    """Delete some of the rows that are too old or too many.

    Args:
        db: the ledger.
        now: epoch s.
        keep_days: what is older goes.
        keep_mb: the size to stay below.
        alive: keys of jobs that Slurm still knows.

    Returns:
        Rows deleted; as long as there are any, there may be more.

    Raises:
        sqlite3.Error: it cannot be written; a call later goes on.
    """
    began = since(db)
    old = max(began, now - keep_days * 86400)
    db.execute("BEGIN IMMEDIATE")
    try:
        deleted = _delete_before(db, old, alive)
        if not deleted and used_bytes(db) > keep_mb * 2**20:
            old = began + _SLICE * (now - began)
            deleted = _delete_before(db, old, alive)
        if old > began:
            put = "INSERT OR REPLACE INTO meta VALUES ('kept_since', ?)"
            db.execute(put, (json.dumps(old),))
        db.execute("COMMIT")
    except sqlite3.Error:
        with contextlib.suppress(sqlite3.Error):  # it may have been undone already
            db.execute("ROLLBACK")
        raise
    # By `execute` a statement without columns is stepped once, and frees one page.
    db.executescript(f"PRAGMA incremental_vacuum({PAGES});")
    return deleted


def _delete_before(db: sqlite3.Connection, old: float, alive: Collection[str]) -> int:
    deleted = sum(_delete(db, table, old) for table in _TABLES)
    return deleted + _delete_jobs(db, old, alive)


def _delete(db: sqlite3.Connection, table: _Table, old: float) -> int:
    oldest = (
        f"SELECT rowid FROM {table.name} "  # noqa: S608 - names from above
        f"WHERE {table.where} AND {table.time} < ? ORDER BY {table.time} LIMIT {PIECE}"
    )
    cursor = db.execute(f"DELETE FROM {table.name} WHERE rowid IN ({oldest})", (old,))  # noqa: S608
    return int(cursor.rowcount)


def _delete_jobs(db: sqlite3.Connection, old: float, alive: Collection[str]) -> int:
    """Delete the records of jobs that are gone; those of living jobs may be old as well."""
    rows = db.execute(
        "SELECT key FROM jobs WHERE seen < ? ORDER BY seen LIMIT ?", (old, PIECE + len(alive))
    )
    keys = [(key,) for (key,) in rows if key not in alive][:PIECE]
    db.executemany("DELETE FROM jobs WHERE key = ?", keys)
    return len(keys)
