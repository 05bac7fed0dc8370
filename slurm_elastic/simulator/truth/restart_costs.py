"""Cost of a restart: a table by application, or measured live transitions.

A job makes no progress for these seconds after each change of GPU type or shape, while it holds its
new GPUs. Sia's traces (SOSP'23) have seconds by application; a site can measure its own: JSON (a
list of objects) or CSV with the columns `checkpoint_s`, `slurm_s`, `start_s` (from the notice to
the end of the checkpoint, Slurm's part, from there to the first step), and optionally
`application`; or the output of `python -m benchmarks.resize --json`, of which the resizes count. A
job then takes the mean of its application's transitions, else the mean of all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.simulator.workloads.workload import WorkloadError, rows

PARTS = ("checkpoint_s", "slurm_s", "start_s")


class RestartCostError(InvalidInputError):
    """Measured transitions are invalid; the message names file, line and remedy."""


@dataclass(frozen=True)
class RestartCosts:
    """Seconds of a restart by application.

    Attributes:
        seconds: seconds by application.
        default_s: seconds of all others; None: those of their profiles.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    default_s: float | None = None

    def of(self, application: str, otherwise: float) -> float:
        """Return the seconds that a restart of a job of this application takes."""
        measured_s = self.seconds.get(application)
        if measured_s is not None:
            return measured_s
        return otherwise if self.default_s is None else self.default_s


def read(path: Path) -> RestartCosts:
    """Read measured transitions.

    Raises:
        RestartCostError: unreadable, no transition, or invalid seconds.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise RestartCostError(f"{path}: {reason}; name a JSON or CSV file") from None
    entries = _from_json(path, text) if text.lstrip()[:1] in ("[", "{") else _from_csv(path)
    by_name: dict[str, list[float]] = {}
    for location, row in entries:
        total = sum(_seconds(row.get(part), part, location) for part in PARTS)
        by_name.setdefault(str(row.get("application") or ""), []).append(total)
    all_seconds = [s for seconds in by_name.values() for s in seconds]
    if not all_seconds:
        raise RestartCostError(f"{path}: has no transition; each row needs {', '.join(PARTS)}")
    return RestartCosts(
        {name: sum(s) / len(s) for name, s in by_name.items() if name},
        sum(all_seconds) / len(all_seconds),
    )


def _from_json(path: Path, text: str) -> list[tuple[str, Mapping[str, object]]]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RestartCostError(
            f"{path.name}: is not JSON: {error}; write a list of objects"
        ) from None
    if isinstance(data, dict):
        data = data.get("transitions", data.get("rows", [data]))
    if not isinstance(data, list) or not all(isinstance(row, dict) for row in data):
        raise RestartCostError(f"{path.name}: must be a list of objects with {', '.join(PARTS)}")
    entries = [(f"{path.name}: entry {i}", row) for i, row in enumerate(data, start=1)]
    return [(where, _renamed(row)) for where, row in entries if row.get("kind") != "requeue"]


def _renamed(row: Mapping[str, object]) -> Mapping[str, object]:
    """Convert a row of `benchmarks.resize` to the columns of this module."""
    if "startup" not in row:
        return row
    parts = [row.get("startup"), row.get("restore", 0.0)]
    valid_parts = [p for p in parts if isinstance(p, int | float)]
    start = sum(valid_parts) if len(valid_parts) == len(parts) else None
    return {"checkpoint_s": row.get("checkpoint"), "slurm_s": row.get("slurm"), "start_s": start}


def _from_csv(path: Path) -> list[tuple[str, Mapping[str, object]]]:
    shape = f"must have {','.join(PARTS)}"
    try:
        lines = list(rows(path, PARTS, what="a JSON or CSV file", header_line=shape))
    except WorkloadError as error:
        raise RestartCostError(str(error)) from None
    return [(f"{path.name}:{number}", row) for number, row in lines]


def _seconds(value: object, part: str, location: str) -> float:
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 1e6:
        raise RestartCostError(
            f"{location}: {part} {value!r:.40} is invalid: expected seconds from 0 on"
        )
    return seconds
