"""The ledger: persistent state in SQLite, written before a job is changed.

Its loss loses no job: with an empty ledger the controller recognises its own traces in Slurm
and clears them (`transitions.orphan_cleanup`). Measurements and history are lost then.

A full disk or an unreadable file raises `LedgerError` with one line; callers
begin nothing new while it lasts.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import structlog

from slurm_elastic.controller.state import retention
from slurm_elastic.controller.state.ledger_schema import VERSION, VERSIONS
from slurm_elastic.core.errors import SlurmElasticError

#: Applications and profiles kept of each user, the latest: names cost nothing.
APPLICATIONS, PROFILES = 500, 50

Body = dict[str, Any]


class LedgerError(SlurmElasticError):
    """Error: the ledger cannot be read or written; the text names cause and remedy."""


class Ledger:
    """One SQLite file in WAL mode, never on a network file system. Thread-safe.

    Args:
        path: the file; created when missing. ":memory:" for a ledger in memory.

    Raises:
        LedgerError: it cannot be opened, or a newer version wrote it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = path
        #: The version in the file when it was opened; 0: it is new.
        self.stored_version = 0
        self._lock = threading.RLock()
        try:
            self._db = sqlite3.connect(
                path, timeout=5.0, check_same_thread=False, isolation_level=None
            )
            self._db.row_factory = sqlite3.Row
            if not self._db.execute("PRAGMA page_count").fetchone()[0]:
                retention.prepare(self._db)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version < VERSION:
                missing = " ".join(VERSIONS[version:])
                self._db.executescript(f"BEGIN; {missing} PRAGMA user_version = {VERSION}; COMMIT;")
            self.stored_version = version
            with contextlib.suppress(sqlite3.Error):  # full or read-only: it just stays large
                retention.prepare(self._db)
            damage = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.Error as error:
            raise LedgerError(f"ledger {path}: {error}; {_remedy(path, error)}") from None
        if damage != "ok":
            raise LedgerError(f"ledger {path}: {' '.join(damage.split())}; {_remedy(path)}")
        if version > VERSION:
            raise LedgerError(
                f"ledger {path}: written by a newer slurm-elastic (version {version}, "
                f"this one knows {VERSION}); install that one or move the file away"
            )

    def close(self) -> None:
        """Write everything back into one file."""
        with self._lock:
            self._db.close()

    @property
    def size(self) -> int:
        """Bytes of its file and of the log that is not yet written back; 0 in memory."""
        return sum(_size(f"{self.path}{end}") for end in ("", "-wal"))

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._db
            except sqlite3.Error as error:
                raise LedgerError(f"ledger {self.path}: {error}") from None

    def raw(self) -> AbstractContextManager[sqlite3.Connection]:
        """Return the database itself, for copies of whole tables (`leader.standby_sync`)."""
        return self._open()

    # --- small named values: policy state, claims ---

    def put(self, name: str, value: Any) -> None:
        """Keep a JSON value under a name."""
        with self._open() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, json.dumps(value)))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value kept under a name."""
        with self._open() as db:
            row = db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        try:
            return json.loads(row["value"]) if row else default
        except ValueError:
            _left_out(f"{name} cannot be read")
            return default

    # --- what is known of jobs ---

    def put_job(self, key: str, job_id: int, record: Mapping[str, Any]) -> None:
        """Keep the record of a job; `key` distinguishes reused ids."""
        with self._open() as db:
            db.execute(
                "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?)",
                (key, job_id, time.time(), json.dumps(record)),
            )

    def put_jobs(self, rows: Iterable[tuple[str, int, Mapping[str, Any]]]) -> None:
        """Keep many records, all or none: each page of the file is written once."""
        now = time.time()
        values = [(key, job_id, now, json.dumps(record)) for key, job_id, record in rows]
        if not values:
            return
        with self._open() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                db.executemany("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?)", values)
                db.execute("COMMIT")
            except sqlite3.Error:
                with contextlib.suppress(sqlite3.Error):  # it may have been undone already
                    db.execute("ROLLBACK")
                raise

    def get_job(self, key: str) -> Body | None:
        """Return the record of a job, or None."""
        with self._open() as db:
            row = db.execute("SELECT record FROM jobs WHERE key = ?", (key,)).fetchone()
        return _body(row["record"], f"job {key}") if row else None

    def key_of(self, job_id: int) -> str:
        """Return the key of the last job with this id; "": none."""
        with self._open() as db:
            row = db.execute(
                "SELECT key FROM jobs WHERE job_id = ? ORDER BY seen DESC LIMIT 1", (job_id,)
            ).fetchone()
        return str(row["key"]) if row else ""

    def submissions(self) -> list[tuple[int, Body, int | None]]:
        """Return (id, submission, run) of every job whose record has one, the newest last.

        The run is that in which the job was seen to end; None without one.

        SQLite takes them out of the records: reading 10,000 whole ones takes seconds.
        """
        with self._open() as db:
            rows = db.execute(
                "SELECT job_id, json_extract(record, '$.recorded') AS submission,"
                " CASE WHEN json_type(record, '$.ending.run') = 'integer'"
                " THEN json_extract(record, '$.ending.run') END AS ended_run FROM jobs"
                " WHERE CASE WHEN json_valid(record)"
                " THEN json_type(record, '$.recorded') END = 'object' ORDER BY seen"
            ).fetchall()
        return [
            (r["job_id"], _body(r["submission"], f"job {r['job_id']}"), r["ended_run"])
            for r in rows
        ]

    def named_jobs(self) -> list[tuple[str, str, Body]]:
        """Return (user, name, record) of every job that ever held GPUs, the newest last."""
        with self._open() as db:
            rows = db.execute(
                "SELECT DISTINCT segments.user, segments.name, jobs.record, jobs.seen "
                "FROM jobs JOIN segments ON segments.key = jobs.key ORDER BY jobs.seen"
            ).fetchall()
        return [
            (r["user"], r["name"], body)
            for r in rows
            if (body := _body(r["record"], f"a job {r['name']}"))
        ]

    # --- what jobs of one application share ---

    def put_application(self, user: str, name: str, stated: str, body: Mapping[str, Any]) -> None:
        """Keep the data of an application: a user's jobs of one name and stated application."""
        with self._open() as db:
            db.execute(
                "INSERT OR REPLACE INTO applications VALUES (?, ?, ?, ?, ?)",
                (user, name, stated, time.time(), json.dumps(body)),
            )
            db.execute(
                "DELETE FROM applications WHERE user = ? AND seen < (SELECT min(seen) FROM "
                "(SELECT seen FROM applications WHERE user = ? ORDER BY seen DESC LIMIT ?))",
                (user, user, APPLICATIONS),
            )

    def applications(self, user: str, name: str) -> dict[str, Body]:
        """Return the data of a user's jobs of this name, by stated application; newest first."""
        with self._open() as db:
            rows = db.execute(
                "SELECT stated, body FROM applications WHERE user = ? AND name = ? "
                "ORDER BY seen DESC",
                (user, name),
            ).fetchall()
        return {r["stated"]: _body(r["body"], f"application {name}") for r in rows}

    def put_profile(self, user: str, name: str, stated: str, body: Mapping[str, Any]) -> None:
        """Keep the newest layer profile of an application."""
        with self._open() as db:
            db.execute(
                "INSERT OR REPLACE INTO profiles VALUES (?, ?, ?, ?, ?)",
                (user, name, stated, time.time(), json.dumps(body)),
            )
            db.execute(
                "DELETE FROM profiles WHERE user = ? AND seen < (SELECT min(seen) FROM "
                "(SELECT seen FROM profiles WHERE user = ? ORDER BY seen DESC LIMIT ?))",
                (user, user, PROFILES),
            )

    def profile(self, user: str, name: str, stated: str) -> Body | None:
        """Return the newest layer profile of an application."""
        with self._open() as db:
            row = db.execute(
                "SELECT body FROM profiles WHERE user = ? AND name = ? AND stated = ?",
                (user, name, stated),
            ).fetchone()
        return _body(row["body"], f"profile of {name}") if row else None

    # --- transitions ---

    def add_transition(self, job_id: int, key: str, body: Mapping[str, Any]) -> int:
        """Begin a transition; return its id, which is larger than all before."""
        with self._open() as db:
            cursor = db.execute(
                "INSERT INTO transitions (job_id, key, state, live, updated, body) "
                "VALUES (?, ?, 'RESERVE', 1, ?, ?)",
                (job_id, key, time.time(), json.dumps(body)),
            )
            return int(cursor.lastrowid or 0)

    def put_transition(self, id_: int, state: str, body: Mapping[str, Any], *, live: bool) -> None:
        """Keep a transition's state; called before the state is acted on."""
        with self._open() as db:
            db.execute(
                "UPDATE transitions SET state = ?, live = ?, updated = ?, body = ? WHERE id = ?",
                (state, int(live), time.time(), json.dumps(body), id_),
            )

    def live_transitions(self) -> list[tuple[int, str, Body]]:
        """Return (id, state, body) of each transition under way; the body {} if unreadable."""
        with self._open() as db:
            rows = db.execute(
                "SELECT id, state, body FROM transitions WHERE live = 1 ORDER BY id"
            ).fetchall()
        return [(r["id"], r["state"], _body(r["body"], f"transition {r['id']}")) for r in rows]

    def transitions(self, job_id: int | None = None, *, last: int = 100) -> list[Body]:
        """Return the newest transitions, oldest first, of one job or of all."""
        where, args = ("", [last]) if job_id is None else ("WHERE job_id = ?", [job_id, last])
        with self._open() as db:
            rows = db.execute(
                f"SELECT * FROM transitions {where} ORDER BY id DESC LIMIT ?",  # noqa: S608
                args,
            ).fetchall()
        return _transitions(reversed(rows))

    def ended_transitions(self, job_id: int, key: str) -> list[Body]:
        """Return the ended transitions of one job, oldest first."""
        with self._open() as db:
            rows = db.execute(
                "SELECT * FROM transitions WHERE job_id = ? AND key = ? AND live = 0 ORDER BY id",
                (job_id, key),
            ).fetchall()
        return _transitions(rows)

    def ended_since(self, since: float) -> list[Body]:
        """Return the transitions that ended after a time (epoch s), oldest first."""
        with self._open() as db:
            rows = db.execute(
                "SELECT * FROM transitions WHERE live = 0 AND updated > ? ORDER BY id", (since,)
            ).fetchall()
        return _transitions(rows)

    # --- allocations over time ---

    def begin_segment(self, row: Mapping[str, Any]) -> None:
        """Begin a segment of GPUs held. Keys: the columns of `segments` but `end`."""
        with self._open() as db:
            db.execute(
                "INSERT OR IGNORE INTO segments VALUES "
                "(:key, :job_id, :user, :name, :run, :gpu_type, :gpus, :nodes, :start, NULL, NULL)",
                dict(row),
            )

    def end_segment(self, key: str, end: float) -> None:
        """End the present segment of a job."""
        with self._open() as db:
            db.execute("UPDATE segments SET end = ? WHERE key = ? AND end IS NULL", (end, key))

    def unsettled(self, since: float) -> float | None:
        """Return the start of the oldest unsettled segment that ended after `since`, or None."""
        with self._open() as db:
            row = db.execute(
                "SELECT min(start) AS start FROM segments WHERE seconds IS NULL AND end > ?",
                (since,),
            ).fetchone()
        return row["start"] if row else None

    def settle(
        self, job_id: int, run: int | None, start: float, *, end: float, seconds: int
    ) -> bool:
        """Set end and length of a segment by accounting; return whether it exists.

        Args:
            job_id: of the segment.
            run: restart count; None: unknown, the segment is found by its start.
            start: of the segment, within a second (epoch s).
            end: to be set (epoch s).
            seconds: length to be set.
        """
        with self._open() as db:
            cursor = db.execute(
                "UPDATE segments SET end = ?, seconds = ? "
                "WHERE job_id = ? AND run = coalesce(?, run) AND start BETWEEN ? AND ?",
                (end, seconds, job_id, run, start - 1, start + 1),
            )
        return cursor.rowcount > 0

    def add_settled(self, row: Mapping[str, Any]) -> int:
        """Add a segment that only accounting has; return how many were added.

        A run None is numbered after the segments of its job that began before it.
        """
        with self._open() as db:
            cursor = db.execute(
                "INSERT OR IGNORE INTO segments VALUES (:key, :job_id, :user, '', coalesce(:run, "
                "(SELECT max(run) + 1 FROM segments WHERE key = :key AND start < :start), 0), "
                ":gpu_type, :gpus, '', :start, :end, :seconds)",
                dict(row),
            )
        return cursor.rowcount

    def open_segments(self) -> dict[str, dict[str, Any]]:
        """Return the segments that have not ended, by job key."""
        with self._open() as db:
            rows = db.execute("SELECT * FROM segments WHERE end IS NULL").fetchall()
        return {r["key"]: dict(r) for r in rows}

    def last_segment(self, key: str) -> dict[str, Any] | None:
        """Return the newest segment of a job, with the number of its attempts as `runs`."""
        with self._open() as db:
            row = db.execute(
                "SELECT *, (SELECT count(DISTINCT run) FROM segments WHERE key = :key) AS runs "
                "FROM segments WHERE key = :key ORDER BY start DESC LIMIT 1",
                {"key": key},
            ).fetchone()
        return dict(row) if row else None

    def segments(self, *, since: float = 0.0, user: str | None = None) -> list[dict[str, Any]]:
        """Return the segments that end after `since`, in order of their start."""
        with self._open() as db:
            rows = db.execute(
                "SELECT * FROM segments WHERE (end IS NULL OR end > ?) "
                "AND (? IS NULL OR user = ?) ORDER BY start",
                (since, user, user),
            ).fetchall()
        return [dict(r) for r in rows]

    # --- how long ---

    def forget(
        self, now: float, *, keep_days: float, keep_mb: float, alive: Collection[str] = ()
    ) -> int:
        """Delete some of the rows that are too old or too many; see `retention.forget`."""
        with self._open() as db:
            return retention.forget(
                db, now, keep_days=keep_days, keep_mb=keep_mb, alive=frozenset(alive)
            )

    def since(self) -> float:
        """Return the epoch s from which on all transitions and segments are kept."""
        with self._open() as db:
            return retention.since(db)


def _transitions(rows: Iterable[sqlite3.Row]) -> list[Body]:
    return [
        {
            **body,
            "id": r["id"],
            "job_id": r["job_id"],
            "state": r["state"],
            "live": bool(r["live"]),
            "updated": r["updated"],
        }
        for r in rows
        if (body := _body(r["body"], f"transition {r['id']}"))
    ]


def _body(text: str, name: str) -> Body:
    """Return a record, {} when it cannot be read."""
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        _left_out(f"{name} cannot be read")
        return {}
    return body


def _left_out(problem: str) -> None:
    structlog.get_logger("ledger").warning(f"ledger: {problem} and is left out")


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def _remedy(path: Path | str, error: sqlite3.Error | None = None) -> str:
    if "disk is full" in str(error):
        return "make room there, then start again"
    if not Path(path).parent.is_dir():
        return "create its directory, owned by the account that runs selasticd"
    return "move the file away to start with an empty one"
