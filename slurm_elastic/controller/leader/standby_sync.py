"""Copy of the active controller's ledger, kept by a standby and checked when it takes over.

The ledger is never shared. A standby asks the active controller, over the socket, for
what is new in its ledger: users' orders, measurements, data of applications, history and
segments. The state between a controller and Slurm (transitions under way, node lists, leases of
start times) may be seconds old when it is needed and is not used: the successor reads it from
Slurm, as after the loss of a ledger (`orphan_cleanup`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

from slurm_elastic.config.schema import ControllerSettings
from slurm_elastic.controller.state.ledger import Ledger, LedgerError
from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.core.reason import Reason
from slurm_elastic.rpc import frames, requests

#: Table → the column with the time at which a row was written.
_WRITTEN = {"jobs": "seen", "transitions": "updated", "applications": "seen", "profiles": "seen"}
#: Seconds before what was reached that are asked for again, should the clock have been set.
_AGAIN_S = 60.0
#: Seconds between two deletions of old rows in a copy.
_FORGETS_S = 60.0
#: Rows of segments in an answer.
_SEGMENTS = 5000
#: Bytes of an answer, about; the rest comes with the next.
_MOST = 4_000_000
#: Ids of transitions, which jobs and reservations bear, rise with the generation of the lease.
_IDS = 100_000
#: Fields of a job's record that describe its state in Slurm, which may have changed since.
_UNSURE: dict[str, Any] = {
    "pin": None,
    "pins": [],
    "leased": False,
    "broken": -1,
    "spare": [-1, 0],
}
_LOST = Reason("controller-lost")


def take_over(ledger: Ledger, generation: int, log: Any) -> None:
    """Take over a ledger into a generation of the lease.

    A ledger last written in the generation before was the active one until now: its transitions
    go on.

    Raises:
        LedgerError: it cannot be written.
    """
    own = ledger.get("lease", 0)
    if own != generation - 1:
        ended = _end_changes_of_another(ledger, generation)
        log.info(f"Lease={generation} Ledger=copy: {ended} changes are left to Slurm")
    ledger.put("lease", generation)


def _end_changes_of_another(ledger: Ledger, generation: int) -> int:
    """End the transitions of another controller in a copied ledger; return their number."""
    live = ledger.live_transitions()
    for id_, _, body in live:
        ledger.put_transition(id_, "ENDED", {**body, "problem": _LOST.to_json()}, live=False)
    with ledger.raw() as db:
        for row in db.execute("SELECT key, record FROM jobs").fetchall():
            try:
                record = {**json.loads(row["record"]), **_UNSURE}
            except (ValueError, TypeError):
                continue
            db.execute("UPDATE jobs SET record = ? WHERE key = ?", (json.dumps(record), row["key"]))
        first = generation * _IDS
        sequence = db.execute(
            "SELECT seq FROM sqlite_sequence WHERE name = 'transitions'"
        ).fetchone()
        if sequence is None:
            db.execute("INSERT INTO sqlite_sequence VALUES ('transitions', ?)", (first,))
        elif sequence["seq"] < first:
            db.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = 'transitions'", (first,))
    return len(live)


def new_rows(ledger: Ledger, since: Mapping[str, Any]) -> dict[str, Any]:
    """Return the new rows of a ledger; the answer's `since` is for the next request.

    Args:
        ledger: the active controller's.
        since: as answered last; {} for all there is.

    Raises:
        LedgerError: it cannot be read.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    reached, size, more = {}, 0, False
    with ledger.raw() as db:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        for table, column in _WRITTEN.items():
            rows[table], begun = [], _number(since.get(table))
            reached[table] = begun
            query = f"SELECT * FROM {table} WHERE {column} > ? ORDER BY {column}"  # noqa: S608
            for row in db.execute(query, (begun,)):
                if size > _MOST:
                    more = True
                    break
                rows[table].append(dict(row))
                reached[table] = row[column]
                size += sum(len(str(value)) for value in row)
        last_rowid, ended = _number(since.get("segments")), _number(since.get("ended"))
        query = "SELECT rowid, * FROM segments WHERE rowid > ? OR end > ? ORDER BY rowid LIMIT ?"
        segments = [dict(r) for r in db.execute(query, (last_rowid, ended - _AGAIN_S, _SEGMENTS))]
    reached["segments"] = max([last_rowid, *(r.pop("rowid") for r in segments)])
    reached["ended"] = time.time()
    rows["segments"] = segments
    return {
        "version": version,
        "rows": rows,
        "since": reached,
        "more": more or len(segments) == _SEGMENTS,
        "kept_since": ledger.since(),
        "policy_state": ledger.get("policy_state", {}),
        "sleeping_nodes": ledger.get("sleeping_nodes", {}),
    }


def apply(ledger: Ledger, answer: dict[str, Any]) -> int:
    """Replace rows by those of the active controller's ledger; return how many.

    Raises:
        LedgerError: the other ledger is of another version, or this one cannot be written.
    """
    count = 0
    with ledger.raw() as db:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if answer.get("version") != version:
            raise LedgerError(
                f"the active controller's ledger has version {answer.get('version')!r:.20}, "
                f"this one {version}: install the same release of slurm-elastic on both"
            )
        for table in (*_WRITTEN, "segments"):
            columns = [r["name"] for r in db.execute(f"PRAGMA table_info({table})").fetchall()]
            marks = ", ".join(f":{c}" for c in columns)
            rows = answer["rows"].get(table, [])
            with db:  # all of it or nothing
                db.execute("BEGIN")
                db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)  # noqa: S608
            count += len(rows)
    ledger.put("kept_since", _number(answer.get("kept_since")))
    ledger.put("policy_state", answer.get("policy_state") or {})
    # Controllers before it send none.
    ledger.put("sleeping_nodes", answer.get("sleeping_nodes") or {})
    return count


class StandbySync:
    """Ledger of a standby, which follows the active one.

    Args:
        ledger: of the standby.
        log: structlog logger.
    """

    def __init__(self, ledger: Ledger, log: Any) -> None:
        self._ledger, self._log = ledger, log
        self._since: dict[str, Any] = {}
        self._of, self._said = "", ""
        self._forgot = float("-inf")

    def follow(self, active: str, *, process: str, seconds: float) -> None:
        """Copy new rows, for about so long.

        Args:
            active: address of the active controller; "": none is known.
            process: id of the active process; a new one is asked for all rows.
            seconds: for each answer, and after which no more is asked for.
        """
        if process != self._of:
            self._of, self._since = process, {}
        end, problem, more = time.monotonic() + seconds, "", bool(active)
        while more and time.monotonic() < end:
            try:
                request = requests.build("copy", since=self._since)
                answer = frames.call(active, request, timeout_s=seconds)
                apply(self._ledger, answer)
                self._since, more = self._next(answer["since"]), bool(answer["more"])
            except (SlurmElasticError, KeyError, TypeError) as error:
                problem, more = f"the active controller's ledger is not copied: {error}", False
        if problem != self._said:
            self._log.warning(problem or "the active controller's ledger is copied again")
        self._said = problem

    def forget(self, settings: ControllerSettings) -> None:
        """Delete a piece of what the original has deleted."""
        now = time.monotonic()
        if now - self._forgot < _FORGETS_S:
            return
        self._forgot = now
        with contextlib.suppress(LedgerError):
            self._ledger.forget(time.time(), keep_days=settings.keep_days, keep_mb=settings.keep_mb)

    def _next(self, reached: dict[str, Any]) -> dict[str, Any]:
        """Return the next request; from further back when the other clock was set back."""
        now, earlier = _number(reached["ended"]), _number(self._since.get("ended"))
        if now >= earlier:
            return reached
        back = {t: min(_number(reached[t]), now - _AGAIN_S) for t in _WRITTEN}
        return {**reached, **back}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
