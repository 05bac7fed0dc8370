"""What `selastic profile` prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurm_elastic.cli.formatting import clean, digits, size
from slurm_elastic.cli.tables import Column, TableLayout, render

if TYPE_CHECKING:
    from slurm_elastic.profiler.profile_file import Configured, StepProfile, Timed
    from slurm_elastic.profiler.profiling_runs import ProfilingRequest

#: Stalls in the order in which they are stacked.
STALLS = ("interconnect", "network", "prep", "fetch")
#: Of a stall that is none its error is shown if it is more than this part of a step.
_DOUBT = 0.05

_COLUMNS = (
    Column("GPUS", lambda c: str(c.gpus), right=True),
    Column("NODES", lambda c: str(c.nodes), right=True),
    Column("TYPE", lambda c: c.gpu_type or "-"),
    Column("BATCH", lambda c: str(c.batch), right=True),
    Column("STEP", lambda c: seconds(warm(c)), right=True),
    Column("COMPUTE", lambda c: _stall(c.compute, warm(c)), right=True),
    Column("INTERCONNECT", lambda c: _stall(c.interconnect, warm(c)), right=True),
    Column("NETWORK", lambda c: _stall(c.network, warm(c)), right=True),
    Column("PREP", lambda c: _stall(c.prep, warm(c)), right=True),
    Column("FETCH", lambda c: _stall(c.fetch, cold(c)), right=True),
    Column("S", lambda c: "-" if c.s is None else f"{c.s:.2f}", right=True),
    Column("REPEATS", lambda c: str(c.repeats), right=True),
)
_DEFAULT = tuple(c.header for c in _COLUMNS if c.header != "REPEATS")


def lines(found: StepProfile, layout: TableLayout, *, cold: bool, whole: bool) -> list[str]:
    """The table, and what is to be known about it.

    Args:
        found: what was measured.
        layout: the table options.
        cold: whether reading from storage was to be measured.
        whole: whether whole runs were timed.
    """
    table = render(found.configurations, _COLUMNS, _DEFAULT, layout)
    if layout.parsable or not layout.header:
        return table
    return [_heading(found), "", *table, "", *_notes(found, cold=cold, whole=whole)]


def planned(request: ProfilingRequest) -> list[str]:
    """What would be run."""
    runs = list(dict.fromkeys((n.shape, n.repeat) for n in request.needs))
    shapes = list(dict.fromkeys(n.shape for n in request.needs))
    blocks = list(dict.fromkeys(n.block for n in request.needs))
    repeats = max(n.repeat for n in request.needs)
    head = (
        f"{len(runs)} runs would be started, each of {request.warm_up} + {request.steps} steps"
        f" with {' and '.join(blocks)} data, nothing was done:"
    )
    return [
        head,
        *(
            f"  {s.gpus} GPU{'s' if s.gpus > 1 else ''}"
            + (f" on {s.nodes} nodes" if s.nodes > 1 else "")
            + f", {repeats} time{'s' if repeats > 1 else ''}"
            for s in shapes
        ),
    ]


def warm(c: Configured) -> float:
    """Seconds of a step with the data in memory, as far as it was told."""
    known = (c.compute, c.interconnect, c.network, c.prep)
    return sum(t.seconds for t in known if t is not None)


def cold(c: Configured) -> float:
    """Seconds of a step whose data come from storage."""
    return warm(c) + (c.fetch.seconds if c.fetch else 0.0)


def seconds(value: float) -> str:
    """`12 ms`, `1.4 s`."""
    return f"{digits(value * 1e3)} ms" if value < 0.9995 else f"{digits(value)} s"


def _stall(time: Timed | None, of: float) -> str:
    if time is None:
        return "-"
    spread = "" if math.isnan(time.spread) else f" +-{digits(time.spread * 1e3)}"
    if time.seconds == 0:
        return f"none{spread} ms" if time.spread > _DOUBT * of else "none"
    in_ms = f"{digits(time.seconds * 1e3)}{spread} ms"
    return f"{in_ms} {time.seconds / of:.0%}"


def _heading(found: StepProfile) -> str:
    facts = []
    if found.application:
        facts.append(f"application {clean(found.application)}")
    if found.model:
        facts.append(f"model {clean(found.model)}")
    if found.layers:
        facts.append(f"{found.layers} layer{'s' if found.layers > 1 else ''}")
    if found.gradient_bytes:
        facts.append(f"{size(found.gradient_bytes)} of gradients")
    return ", ".join(facts) or "profile"


def _notes(found: StepProfile, *, cold: bool, whole: bool) -> list[str]:
    one: Sequence[Configured] = [c for c in found.configurations if c.repeats < 2]
    notes = [
        "Parts of a step of all GPUs: median +- standard error. FETCH is what reading from storage",
        "adds; S is the part of the time in which GPUs compute instead of waiting for each other.",
    ]
    if whole:
        notes.append(
            "Whole runs were timed: COMPUTE holds the start and the loading of data, S is too high."
        )
    if not cold:
        notes.append("FETCH is not known: name the data set's files with --data.")
    if any(0 < _DOUBT * warm(c) < t.spread for c in found.configurations for t in _none(c)):
        notes.append("`none +-X`: not above its noise; add --repeats, or look who else runs here.")
    if one:
        notes.append("Of one repeat no spread is known: stalls below 5 % of a step count as none.")
    return notes


def _none(c: Configured) -> list[Timed]:
    """Stalls that were measured and are none."""
    times: list[Timed | None] = [getattr(c, name) for name in STALLS]
    return [t for t in times if t is not None and t.seconds == 0]
