"""The answer of `selastic recommend`, as JSON and for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slurm_elastic.cli.formatting import clean, digits, duration, percent_gain
from slurm_elastic.cli.tables import Column, TableLayout, render
from slurm_elastic.profiler import recommendation as rules
from slurm_elastic.profiler.new_model import Estimate, Estimates
from slurm_elastic.profiler.profile_merge import MergedProfiles
from slurm_elastic.profiler.recommendation import ConfigurationCost, Recommendation, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendationInputs:
    """All that was found.

    Attributes:
        choices: the fastest first.
        front: those of them that nobody beats in both.
        cheapest, fastest: within `deadline` (hours) and `budget` (cost).
        rivals: as good as one of these, as far as measurements tell, by `cheapest`, `fastest`.
    """

    model: str
    work: Work
    prices: Mapping[str, float] | None
    deadline: float
    budget: float
    choices: Sequence[Recommendation]
    front: Sequence[Recommendation]
    cheapest: Recommendation
    fastest: Recommendation
    rivals: Mapping[str, Recommendation]
    measured: MergedProfiles
    estimated: Estimates | None


def offers(measured: MergedProfiles, estimated: Estimates | None) -> list[ConfigurationCost]:
    """All configurations, measured and extrapolated."""
    return [*measured.offers, *(e.offer for e in (estimated.found if estimated else ()))]


def found(
    model: str,
    work: Work,
    measured: MergedProfiles,
    estimated: Estimates | None,
    *,
    prices: Mapping[str, float] | None,
    deadline: float,
    budget: float,
) -> RecommendationInputs:
    """Decide.

    Raises:
        NoConfigurationError: nothing is within the limits.
    """
    choices = rules.evaluate(offers(measured, estimated), work, prices)
    limits = {"deadline": deadline, "budget": budget}
    cheapest, fastest = rules.cheapest(choices, **limits), rules.fastest(choices, **limits)
    within = [c for c in choices if c.time_s <= deadline * rules.HOUR_S and c.cost <= budget]
    rivals = {
        "cheapest": rules.as_good(within, cheapest, by="cost"),
        "fastest": rules.as_good(within, fastest, by="time_s"),
    }
    return RecommendationInputs(
        model=model,
        work=work,
        prices=prices,
        deadline=deadline,
        budget=budget,
        choices=sorted(choices, key=lambda c: (c.time_s, c.cost, c.offer.configuration)),
        front=rules.pareto_front(choices),
        cheapest=cheapest,
        fastest=fastest,
        rivals={k: v for k, v in rivals.items() if v is not None},
        measured=measured,
        estimated=estimated,
    )


def answer(found: RecommendationInputs) -> dict[str, Any]:
    """The whole answer."""
    rows = [_row(found, c) for c in found.choices]
    estimated = found.estimated
    return {
        "model": found.model,
        "samples": found.work.samples,
        "epochs": found.work.epochs,
        "uncached": found.work.always_cold,
        "prices": None if found.prices is None else dict(found.prices),
        "deadline_h": found.deadline,
        "budget": found.budget,
        "configurations": rows,
        "cheapest": _row(found, found.cheapest),
        "fastest": _row(found, found.fastest),
        "rivals": {k: _row(found, c) for k, c in found.rivals.items()},
        "unknown": list(found.measured.unknown),
        "left_out": _left_out(found),
        "notes": list(estimated.notes) if estimated else [],
        "extrapolated": [_extrapolated(e) for e in (estimated.found if estimated else ())],
    }


def shown(found: RecommendationInputs, layout: TableLayout) -> list[str]:
    """The answer for people."""
    rows = answer(found)["configurations"]
    unit = "" if found.prices else " GPU h"
    names = [c.header for c in _COLUMNS if c.header not in _ON_REQUEST]
    table = render(rows, _COLUMNS, names, layout)
    if layout.parsable or not layout.header:
        return table
    epochs = f"{found.work.epochs} epoch{'s' if found.work.epochs > 1 else ''}"
    counted = "GPU hours"
    if found.prices is not None:
        each = ", ".join(f"{x:g} for {clean(t)}" for t, x in sorted(found.prices.items()))
        counted = f"money, an hour of one GPU at {each}"
    batch = found.measured.batch
    if not batch:
        batch = f"{found.choices[0].offer.configuration.batch} samples per GPU"
    lines = [
        (
            f"{clean(found.model)}, {batch}: {epochs} of {found.work.samples} samples;"
            f" cost is {counted}"
        ),
        *table,
        "",
        *_advice(found, unit),
    ]
    if found.estimated is not None:
        lines += _errors(found.estimated)
    types = {c.offer.configuration.gpu_type for c in found.choices}
    if found.prices is None and len(types) > 1:
        lines.append("note: an hour costs the same on all types of GPU; --price says otherwise")
    if found.measured.unknown:
        lines.append(f"note: {', '.join(found.measured.unknown)} not measured, counted as nothing")
    lines += [f"note: {clean(n)}" for n in (found.estimated.notes if found.estimated else ())]
    return lines + [f"left out: {clean(line)}" for line in _left_out(found)]


def _advice(found: RecommendationInputs, unit: str) -> list[str]:
    """What to take: what was asked for, else both."""
    both = math.isinf(found.deadline) and math.isinf(found.budget)
    lines = []
    if both or math.isfinite(found.deadline):
        within = f" in {found.deadline:g} h" if math.isfinite(found.deadline) else ""
        lines.append(f"Cheapest{within}: {_told(found.cheapest, unit)}")
        if found.cheapest.time_s * (1 + 2 * found.cheapest.spread) > found.deadline * rules.HOUR_S:
            lines.append("  It may be late: the deadline is within its spread")
        lines += _rival(found, "cheapest", unit, "costs no more")
    if both or math.isfinite(found.budget):
        within = f" for {found.budget:g}{unit}" if math.isfinite(found.budget) else ""
        lines.append(f"Fastest{within}: {_told(found.fastest, unit)}")
        if found.fastest.cost * (1 + 2 * found.fastest.spread) > found.budget:
            lines.append("  It may cost more: the budget is within its spread")
        lines += _rival(found, "fastest", unit, "takes no longer")
    return lines


def _rival(found: RecommendationInputs, key: str, unit: str, same: str) -> list[str]:
    if key not in found.rivals:
        return []
    rival = found.rivals[key]
    return [f"  As far as the spread tells, this {same}: {_told(rival, unit)}"]


def _told(choice: Recommendation, unit: str) -> str:
    estimated = " (extrapolated)" if choice.offer.estimated else ""
    where = clean(choice.offer.configuration)
    return f"{where}{estimated}, {duration(choice.time_s)}, {_cost(choice.cost)}{unit}"


def _errors(estimated: Estimates) -> list[str]:
    """How wrong extrapolated stalls are."""
    rows = [_extrapolated(e) for e in estimated.found if e.fit is not None]
    if not rows:
        return []
    return [
        "",
        "Extrapolated stalls; ERROR is that of each profiled model against a fit to the others:",
        *render(rows, _ERRORS, [c.header for c in _ERRORS], TableLayout()),
    ]


def _row(found: RecommendationInputs, choice: Recommendation) -> dict[str, Any]:
    where, times = choice.offer.configuration, choice.offer.times
    return {
        "gpu_type": where.gpu_type,
        "nodes": where.nodes,
        "gpus": where.gpus,
        "batch": where.batch,
        "estimated": choice.offer.estimated,
        "repeats": found.measured.repeats.get(where),
        "first_epoch_s": choice.first_s,
        "epoch_s": choice.epoch_s,
        "time_s": choice.time_s,
        "cost": choice.cost,
        "spread": choice.spread,
        "step": asdict(times),
        "front": any(choice is c for c in found.front),
    }


def _extrapolated(one: Estimate) -> dict[str, Any]:
    where = one.offer.configuration
    return {
        "gpu_type": where.gpu_type,
        "nodes": where.nodes,
        "gpus": where.gpus,
        "where": str(where),
        "stall_s": one.offer.times.interconnect_s + one.offer.times.network_s,
        "fit": None if one.fit is None else asdict(one.fit),
        "error": one.error,
        "models": [k.model for k in one.known],
        "held_out": [
            {
                "model": m.known.model,
                "stall_s": m.known.stall_s,
                "predicted_s": m.predicted_s,
                "error": m.error,
            }
            for m in one.missed
        ],
    }


def _left_out(found: RecommendationInputs) -> list[str]:
    estimated = found.estimated.left_out if found.estimated else ()
    return [*found.measured.left_out, *estimated]


def _percent(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "< 0.01 %" if 0 < value < 1e-4 else percent_gain(value)


def _cost(value: float) -> str:
    """Three digits: two configurations often differ in the third only."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _stalled(row: Mapping[str, Any]) -> str:
    step = row["step"]
    waits = step["interconnect_s"] + step["network_s"] + step["prep_s"]
    return _percent(waits / (step["compute_s"] + waits))


def _ms(key: str) -> Column:
    header = key.removesuffix("_s").upper()
    return Column(header, lambda r: f"{digits(r['step'][key] * 1e3)} ms", right=True)


def _worst(row: Mapping[str, Any]) -> str:
    if not row["held_out"]:
        return f"not known, {len(row['models']) + 1} models are needed"
    worst = max(row["held_out"], key=lambda m: m["error"])
    return f"{_percent(worst['error'])} ({clean(worst['model'])})"


_COLUMNS = (
    Column("TYPE", lambda r: clean(r["gpu_type"]) or "-"),
    Column("NODES", lambda r: str(r["nodes"]), right=True),
    Column("GPUS", lambda r: str(r["gpus"]), right=True),
    Column("BATCH", lambda r: str(r["batch"]), right=True),
    Column("FIRST", lambda r: duration(r["first_epoch_s"]), right=True),
    Column("EPOCH", lambda r: duration(r["epoch_s"]), right=True),
    Column("TIME", lambda r: duration(r["time_s"]), right=True),
    Column("COST", lambda r: _cost(r["cost"]), right=True),
    Column("SPREAD", lambda r: _percent(r["spread"]), right=True),
    Column("STALLED", _stalled, right=True),
    *(_ms(k) for k in ("compute_s", "interconnect_s", "network_s", "prep_s", "fetch_s")),
    Column("REPEATS", lambda r: "-" if r["repeats"] is None else str(r["repeats"]), right=True),
    Column("BASIS", lambda r: "extrapolated" if r["estimated"] else "measured"),
    Column("FRONT", lambda r: "yes" if r["front"] else ""),
)
#: Shown with -o only.
_ON_REQUEST = ("BATCH", "COMPUTE", "INTERCONNECT", "NETWORK", "PREP", "FETCH", "REPEATS")
_ERRORS = (
    Column("CONFIGURATION", lambda r: clean(r["where"])),
    Column("STALL", lambda r: f"{digits(r['stall_s'] * 1e3)} ms", right=True),
    Column("HIDDEN", lambda r: _percent(r["fit"]["hidden"]), right=True),
    Column("ERROR", lambda r: _percent(r["error"]), right=True),
    Column("WORST", _worst),
    Column("MODELS", lambda r: str(len(r["models"])), right=True),
)
