"""Output of `selastic profile`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurm_elastic.cli.formatting import clean, digits, size
from slurm_elastic.cli.tables import Column, TableLayout, render

if TYPE_CHECKING:
    from slurm_elastic.profiler.profile_file import (
        MeasuredTime,
        ProfiledConfiguration,
        ProfiledUse,
        StepProfile,
    )
    from slurm_elastic.profiler.profiling_runs import ProfilingRequest

#: Stalls in the order in which they are stacked.
STALLS = ("interconnect", "network", "prep", "fetch")
#: The error of a stall of 0 is shown if it exceeds this fraction of a step.
_SHOWN_ERROR = 0.05

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


def lines(profile: StepProfile, layout: TableLayout, *, cold: bool, whole_runs: bool) -> list[str]:
    """Return the table of a profile, and notes about it.

    Args:
        profile: the measurements.
        layout: the table options.
        cold: whether reading from storage was measured.
        whole_runs: whether whole runs were timed.
    """
    table = render(profile.configurations, _COLUMNS, _DEFAULT, layout)
    if layout.parsable or not layout.header:
        return table
    notes = _notes(profile, cold=cold, whole_runs=whole_runs)
    return [_heading(profile), "", *table, "", *_uses(profile), *notes]


def planned(request: ProfilingRequest) -> list[str]:
    """Return the measurements that a run without --dry-run would make."""
    runs = list(dict.fromkeys((n.shape, n.repeat) for n in request.needs))
    shapes = list(dict.fromkeys(n.shape for n in request.needs))
    blocks = list(dict.fromkeys(n.block for n in request.needs))
    repeats = max(n.repeat for n in request.needs)
    head = (
        f"nothing done; {len(runs)} runs would be started, each with {request.warm_up} +"
        f" {request.steps} steps on {' and '.join(blocks)} data:"
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


def warm(c: ProfiledConfiguration) -> float:
    """Return the seconds of a step with the data in memory; unmeasured parts count as 0."""
    measured_parts = (c.compute, c.interconnect, c.network, c.prep)
    return sum(t.seconds for t in measured_parts if t is not None)


def cold(c: ProfiledConfiguration) -> float:
    """Return the seconds of a step whose data come from storage."""
    return warm(c) + (c.fetch.seconds if c.fetch else 0.0)


def seconds(value: float) -> str:
    """Return seconds as `12 ms` or `1.4 s`."""
    return f"{digits(value * 1e3)} ms" if value < 0.9995 else f"{digits(value)} s"


def _stall(time: MeasuredTime | None, of: float) -> str:
    if time is None:
        return "-"
    spread = "" if math.isnan(time.spread) else f" +-{digits(time.spread * 1e3)}"
    if time.seconds == 0:
        return f"none{spread} ms" if time.spread > _SHOWN_ERROR * of else "none"
    in_ms = f"{digits(time.seconds * 1e3)}{spread} ms"
    return f"{in_ms} {time.seconds / of:.0%}"


def _heading(profile: StepProfile) -> str:
    facts = []
    if profile.application:
        facts.append(f"application {clean(profile.application)}")
    if profile.model:
        facts.append(f"model {clean(profile.model)}")
    if profile.layers:
        facts.append(f"{profile.layers} layer{'s' if profile.layers > 1 else ''}")
    if profile.gradient_bytes:
        facts.append(f"{size(profile.gradient_bytes)} of gradients")
    return ", ".join(facts) or "profile"


def _uses(profile: StepProfile) -> list[str]:
    """Return a line on what each shape used, and an empty one."""
    rows = [(c, text) for c in profile.configurations if (text := _used(c.use))]
    if not rows:
        return []
    return [
        "Used on the first node, for each GPU:",
        *(f"  {c.gpus}{f'@{c.nodes}' if c.nodes > 1 else ''}: {text}" for c, text in rows),
        "",
    ]


def _used(use: ProfiledUse) -> str:
    """Return the text of a use of resources, such as `2.5 CPUs, 1.2 GB/s from storage`."""
    texts = []
    if use.busy_cpus is not None:
        texts.append(f"{digits(use.busy_cpus)} CPUs")
    if use.memory_bytes_s is not None:
        texts.append(f"{size(use.memory_bytes_s)}/s between memory and cache")
    if use.read_bytes_s is not None:
        texts.append(f"{size(use.read_bytes_s)}/s from storage")
    if use.gpu_busy is not None:
        texts.append(f"the GPU computes {use.gpu_busy:.0%} of the time")
    if use.gpu_memory_busy is not None:
        texts.append(f"its memory is accessed {use.gpu_memory_busy:.0%} of the time")
    return ", ".join(texts)


def _notes(profile: StepProfile, *, cold: bool, whole_runs: bool) -> list[str]:
    single: Sequence[ProfiledConfiguration] = [c for c in profile.configurations if c.repeats < 2]
    notes = [
        "Parts of a step of all GPUs: median +- standard error. FETCH is what reading from storage",
        "adds; S is the fraction of the time in which GPUs do not wait for each other.",
    ]
    if whole_runs:
        notes.append(
            "Whole runs were timed: COMPUTE includes start and loading of data, S is too high."
        )
    if not cold:
        notes.append("FETCH is unknown: name the files of the data set with --data.")
    if any(
        0 < _SHOWN_ERROR * warm(c) < t.spread
        for c in profile.configurations
        for t in _zero_stalls(c)
    ):
        notes.append(
            "`none +-X`: not above its noise; add --repeats, or check for other jobs on the nodes."
        )
    if single:
        notes.append(
            "With one repeat the spread is unknown: stalls below 5 % of a step count as none."
        )
    return notes


def _zero_stalls(c: ProfiledConfiguration) -> list[MeasuredTime]:
    """Return the stalls that were measured as 0."""
    times: list[MeasuredTime | None] = [getattr(c, name) for name in STALLS]
    return [t for t in times if t is not None and t.seconds == 0]
