"""The answer of `selastic recommend`, as JSON and as text."""

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
class RecommendationAnswer:
    """The evaluated configurations and the request.

    Attributes:
        choices: the fastest first.
        front: those that no other beats in both time and cost.
        cheapest, fastest: within `deadline` (hours) and `budget` (cost).
        rivals: by `cheapest` and `fastest`, one that equals it within its spread.
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
    """Return all configurations, measured and extrapolated."""
    return [*measured.offers, *(e.offer for e in (estimated.estimates if estimated else ()))]


def evaluate(
    model: str,
    work: Work,
    measured: MergedProfiles,
    estimated: Estimates | None,
    *,
    prices: Mapping[str, float] | None,
    deadline: float,
    budget: float,
) -> RecommendationAnswer:
    """Evaluate the configurations and choose the cheapest and the fastest.

    Raises:
        NoConfigurationError: no configuration is within the limits.
    """
    choices = rules.evaluate(offers(measured, estimated), work, prices)
    limits = {"deadline": deadline, "budget": budget}
    cheapest, fastest = rules.cheapest(choices, **limits), rules.fastest(choices, **limits)
    within = [c for c in choices if c.time_s <= deadline * rules.HOUR_S and c.cost <= budget]
    rivals = {
        "cheapest": rules.as_good(within, cheapest, by="cost"),
        "fastest": rules.as_good(within, fastest, by="time_s"),
    }
    return RecommendationAnswer(
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


def answer(result: RecommendationAnswer) -> dict[str, Any]:
    """Return the answer of --json."""
    rows = [_row(result, c) for c in result.choices]
    estimated = result.estimated
    return {
        "model": result.model,
        "samples": result.work.samples,
        "epochs": result.work.epochs,
        "uncached": result.work.always_cold,
        "prices": None if result.prices is None else dict(result.prices),
        "deadline_h": result.deadline,
        "budget": result.budget,
        "configurations": rows,
        "cheapest": _row(result, result.cheapest),
        "fastest": _row(result, result.fastest),
        "rivals": {k: _row(result, c) for k, c in result.rivals.items()},
        "unknown": list(result.measured.unknown),
        "left_out": _left_out(result),
        "notes": list(estimated.notes) if estimated else [],
        "extrapolated": [_extrapolated(e) for e in (estimated.estimates if estimated else ())],
    }


def shown(result: RecommendationAnswer, layout: TableLayout) -> list[str]:
    """Return the lines of the answer."""
    rows = answer(result)["configurations"]
    unit = "" if result.prices else " GPU h"
    names = [c.header for c in _COLUMNS if c.header not in _ON_REQUEST]
    table = render(rows, _COLUMNS, names, layout)
    if layout.parsable or not layout.header:
        return table
    epochs = f"{result.work.epochs} epoch{'s' if result.work.epochs > 1 else ''}"
    counted = "GPU hours"
    if result.prices is not None:
        hourly_prices = ", ".join(f"{x:g} for {clean(t)}" for t, x in sorted(result.prices.items()))
        counted = f"money, an hour of one GPU at {hourly_prices}"
    batch = result.measured.batch
    if not batch:
        batch = f"{result.choices[0].offer.configuration.batch} samples per GPU"
    lines = [
        (
            f"{clean(result.model)}, {batch}: {epochs} of {result.work.samples} samples;"
            f" cost is {counted}"
        ),
        *table,
        "",
        *_advice(result, unit),
    ]
    if result.estimated is not None:
        lines += _error_table(result.estimated)
    types = {c.offer.configuration.gpu_type for c in result.choices}
    if result.prices is None and len(types) > 1:
        lines.append("note: an hour costs the same on all GPU types; --price sets other prices")
    if result.measured.unknown:
        lines.append(f"note: {', '.join(result.measured.unknown)} not measured, counted as 0")
    lines += [f"note: {clean(n)}" for n in (result.estimated.notes if result.estimated else ())]
    return lines + [f"left out: {clean(line)}" for line in _left_out(result)]


def _advice(result: RecommendationAnswer, unit: str) -> list[str]:
    """Return the lines on the cheapest and the fastest, as far as requested."""
    unlimited = math.isinf(result.deadline) and math.isinf(result.budget)
    lines = []
    if unlimited or math.isfinite(result.deadline):
        within = f" in {result.deadline:g} h" if math.isfinite(result.deadline) else ""
        lines.append(f"Cheapest{within}: {_choice_text(result.cheapest, unit)}")
        if (
            result.cheapest.time_s * (1 + 2 * result.cheapest.spread)
            > result.deadline * rules.HOUR_S
        ):
            lines.append("  It may be late: the deadline is within its spread")
        lines += _rival(result, "cheapest", unit, "costs no more")
    if unlimited or math.isfinite(result.budget):
        within = f" for {result.budget:g}{unit}" if math.isfinite(result.budget) else ""
        lines.append(f"Fastest{within}: {_choice_text(result.fastest, unit)}")
        if result.fastest.cost * (1 + 2 * result.fastest.spread) > result.budget:
            lines.append("  It may cost more: the budget is within its spread")
        lines += _rival(result, "fastest", unit, "takes no longer")
    return lines


def _rival(result: RecommendationAnswer, key: str, unit: str, advantage: str) -> list[str]:
    if key not in result.rivals:
        return []
    rival = result.rivals[key]
    return [f"  Within its spread this {advantage}: {_choice_text(rival, unit)}"]


def _choice_text(choice: Recommendation, unit: str) -> str:
    estimated = " (extrapolated)" if choice.offer.estimated else ""
    configuration = clean(choice.offer.configuration)
    return f"{configuration}{estimated}, {duration(choice.time_s)}, {_cost(choice.cost)}{unit}"


def _error_table(estimated: Estimates) -> list[str]:
    """Return the table of errors of extrapolated stalls."""
    rows = [_extrapolated(e) for e in estimated.estimates if e.fit is not None]
    if not rows:
        return []
    return [
        "",
        "Extrapolated stalls; ERROR is that of each profiled model against a fit to the others:",
        *render(rows, _ERRORS, [c.header for c in _ERRORS], TableLayout()),
    ]


def _row(result: RecommendationAnswer, choice: Recommendation) -> dict[str, Any]:
    configuration, times = choice.offer.configuration, choice.offer.times
    return {
        "gpu_type": configuration.gpu_type,
        "nodes": configuration.nodes,
        "gpus": configuration.gpus,
        "batch": configuration.batch,
        "estimated": choice.offer.estimated,
        "repeats": result.measured.repeats.get(configuration),
        "first_epoch_s": choice.first_s,
        "epoch_s": choice.epoch_s,
        "time_s": choice.time_s,
        "cost": choice.cost,
        "spread": choice.spread,
        "step": asdict(times),
        "front": any(choice is c for c in result.front),
    }


def _extrapolated(estimate: Estimate) -> dict[str, Any]:
    configuration = estimate.offer.configuration
    return {
        "gpu_type": configuration.gpu_type,
        "nodes": configuration.nodes,
        "gpus": configuration.gpus,
        "where": str(configuration),
        "stall_s": estimate.offer.times.interconnect_s + estimate.offer.times.network_s,
        "fit": None if estimate.fit is None else asdict(estimate.fit),
        "error": estimate.error,
        "models": [k.model for k in estimate.stalls],
        "held_out": [
            {
                "model": m.observed.model,
                "stall_s": m.observed.stall_s,
                "predicted_s": m.predicted_s,
                "error": m.error,
            }
            for m in estimate.held_out
        ],
    }


def _left_out(result: RecommendationAnswer) -> list[str]:
    estimated = result.estimated.left_out if result.estimated else ()
    return [*result.measured.left_out, *estimated]


def _percent(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "< 0.01 %" if 0 < value < 1e-4 else percent_gain(value)


def _cost(value: float) -> str:
    """Return three digits, as two configurations often differ in the third only."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _stall_percent(row: Mapping[str, Any]) -> str:
    step = row["step"]
    waits = step["interconnect_s"] + step["network_s"] + step["prep_s"]
    return _percent(waits / (step["compute_s"] + waits))


def _ms(key: str) -> Column:
    header = key.removesuffix("_s").upper()
    return Column(header, lambda r: f"{digits(r['step'][key] * 1e3)} ms", right=True)


def _worst(row: Mapping[str, Any]) -> str:
    if not row["held_out"]:
        return f"unknown, {len(row['models']) + 1} models are needed"
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
    Column("STALLED", _stall_percent, right=True),
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
