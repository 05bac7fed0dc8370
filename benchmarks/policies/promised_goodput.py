"""Promised and delivered goodput of trainings on a cluster, and what changes did to their losses.

For `mixed_cluster`: pure functions of what the jobs wrote and `selastic` answered.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: A speed is the median of at least so many steps; the first ones after a change do not count.
FEWEST, SKIPPED = 5, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps of a training in one shape.

    Attributes:
        begin, end: epoch s of its first and last step.
        ranks: number of ranks.
        step_s: median seconds of a step; None: too few.
    """

    begin: float
    end: float
    ranks: int
    step_s: float | None


def segments(steps: Sequence[Mapping[str, Any]]) -> list[Segment]:
    """Return the parts of a training between its changes.

    >>> rows = [{"run": 0, "ranks": 1, "end": float(i)} for i in range(10)]
    >>> rows += [{"run": 1, "ranks": 2, "end": 20 + i / 2} for i in range(12)]
    >>> [(s.begin, s.ranks, s.step_s) for s in segments(rows)]
    [(0.0, 1, 1.0), (20.0, 2, 0.5)]
    """
    groups: list[list[Mapping[str, Any]]] = []
    for row in steps:
        shape = row["run"], row["ranks"]
        if not groups or (groups[-1][-1]["run"], groups[-1][-1]["ranks"]) != shape:
            groups.append([])
        groups[-1].append(row)
    parts = []
    for group in groups:
        ends = [row["end"] for row in group][SKIPPED:]
        times = [b - a for a, b in itertools.pairwise(ends)]
        step_s = statistics.median(times) if len(times) >= FEWEST else None
        parts.append(
            Segment(
                begin=group[0]["end"],
                end=group[-1]["end"],
                ranks=group[0]["ranks"],
                step_s=step_s,
            )
        )
    return parts


def promised(reason: Any) -> float | None:
    """Return the predicted goodput after a change over that before; None: none was predicted.

    >>> change = {"code": "goodput-change", "parameters": {"times": 1.8, "gpus": 1}}
    >>> promised({"code": "several", "parameters": {"reasons": [{"code": "more"}, change]}})
    1.8
    """
    if isinstance(reason, list):
        return next((times for part in reason if (times := promised(part)) is not None), None)
    if not isinstance(reason, dict):
        return None
    parameters = reason.get("parameters", {})
    if reason.get("code") == "goodput-change":
        return float(parameters["times"])
    return promised(list(parameters.values()))


def compared(
    changes: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return promised and delivered goodput of each change that a job went through.

    Args:
        changes: rows of `selastic history` of the job.
        steps: lines of its steps.jsonl.
    """
    parts, rows = segments(steps), []
    for change in changes:
        if change["outcome"] not in ("done", "trial") or not change["from"][:1].isdigit():
            continue
        after = next((i for i, s in enumerate(parts) if s.begin > change["time"]), 0)
        delivered = None
        if after and parts[after - 1].step_s and parts[after].step_s:
            delivered = float(parts[after - 1].step_s or 0) / float(parts[after].step_s or 1)
        rows.append(
            {
                "time": change["time"],
                "from": change["from"],
                "to": change["to"],
                "kind": change["kind"],
                "reason": change["reason"]["code"] if change["reason"] else "",
                "promised": promised(change["reason"]),
                "delivered": delivered,
                "still_s": parts[after].begin - parts[after - 1].end if after else None,
            }
        )
    return rows


def losses(
    steps: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return how the losses differ from those of an undisturbed run, and which steps are lost."""
    undisturbed = {row["step"]: row["loss"] for row in reference}
    differences = [abs(row["loss"] / undisturbed[row["step"]] - 1) for row in steps]
    first, last = reference[0]["loss"], steps[-1]
    descent = first - undisturbed[last["step"]]
    numbers = [row["step"] for row in steps]
    return {
        "steps": last["step"],
        "repeated": len(numbers) - len(set(numbers)),
        "missing": last["step"] - len(set(numbers)),
        "largest": max(differences),
        "last": differences[-1],
        "missed_descent": (last["loss"] - undisturbed[last["step"]]) / descent if descent else 0.0,
        "frozen": max(row["frozen"] for row in steps),
        "loss": last["loss"],
    }


def median_error(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the median of |delivered / promised - 1| over changes that have both."""
    errors = [
        abs(change["delivered"] / change["promised"] - 1)
        for row in rows
        for change in row["changes"]
        if change["promised"] and change["delivered"]
    ]
    return statistics.median(errors) if errors else None
