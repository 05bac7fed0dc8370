"""Plot of `selastic recommend --plot`: time and cost of configurations, and the front."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from slurm_elastic.cli.formatting import clean
from slurm_elastic.cli.recommend.recommend_answer import RecommendationAnswer
from slurm_elastic.profiler.recommendation import HOUR_S, Recommendation
from slurm_elastic.simulator import plots

_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
#: Points of the front that have a label.
_NAMED = 12


def draw(result: RecommendationAnswer, path: Path) -> None:
    """Draw an answer; axes are logarithmic when they span more than a factor of ten.

    Raises:
        PlotError: matplotlib is not installed, or the file cannot be written.
    """
    plt = plots.matplotlib()
    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(figsize=(8, 5.2), layout="constrained")
        _points(axes, result)
        _front(axes, result)
        _limits(axes, result)
        for scale, axis, values in (
            (axes.set_xscale, axes.xaxis, [_hours(c) for c in result.choices]),
            (axes.set_yscale, axes.yaxis, [c.cost for c in result.choices]),
        ):
            if min(values) > 0 and max(values) > 10 * min(values):
                scale("log")
                axis.set_major_formatter("{x:g}")
        axes.margins(0.12)
        epochs = f"{result.work.epochs} epoch{'s' if result.work.epochs > 1 else ''}"
        axes.set_title(f"{clean(result.model)}: {epochs} of {result.work.samples} samples")
        axes.set_xlabel("hours")
        axes.set_ylabel("cost (GPU hours)" if result.prices is None else "cost (as --price)")
        axes.legend(loc="best")
        plots.save(figure, path)
        plt.close(figure)


def _points(axes: Any, result: RecommendationAnswer) -> None:
    """Draw a mark per configuration: colour and form by type, hollow when extrapolated."""
    types = sorted({c.offer.configuration.gpu_type for c in result.choices})
    for i, gpu_type in enumerate(types):
        colour = plots.COLOURS[i % len(plots.COLOURS)]
        for estimated in (False, True):
            some = [
                c
                for c in result.choices
                if c.offer.configuration.gpu_type == gpu_type and c.offer.estimated == estimated
            ]
            if some:
                name = clean(gpu_type) or "GPU"
                spread = [0.0 if math.isnan(c.spread) else c.spread for c in some]
                axes.errorbar(
                    [_hours(c) for c in some], [c.cost for c in some],
                    xerr=[_hours(c) * s for c, s in zip(some, spread, strict=True)],
                    yerr=[c.cost * s for c, s in zip(some, spread, strict=True)],
                    fmt=_MARKS[i % len(_MARKS)], color=colour, elinewidth=0.8, markersize=7,
                    markerfacecolor="white" if estimated else colour, zorder=3,
                    label=f"{name}, extrapolated" if estimated else name,
                )  # fmt: skip


def _front(axes: Any, result: RecommendationAnswer) -> None:
    front = list(result.front)
    axes.step(
        [_hours(c) for c in front], [c.cost for c in front], where="post",
        color="#666666", linewidth=1.2, linestyle="--", zorder=2,
        label="no other is as fast and as cheap",
    )  # fmt: skip
    for choice in front[:_NAMED]:
        axes.annotate(
            clean(choice.offer.configuration), (_hours(choice), choice.cost),
            textcoords="offset points", xytext=(7, 5), fontsize=8,
        )  # fmt: skip


def _limits(axes: Any, result: RecommendationAnswer) -> None:
    line = {"color": "#D55E00", "linewidth": 1.0}
    if math.isfinite(result.deadline):
        axes.axvline(
            result.deadline, label=f"deadline {result.deadline:g} h", linestyle=":", **line
        )
    if math.isfinite(result.budget):
        axes.axhline(result.budget, label=f"budget {result.budget:g}", linestyle="-.", **line)
    for choice, limited in (
        (result.cheapest, math.isfinite(result.deadline)),
        (result.fastest, math.isfinite(result.budget)),
    ):
        if limited:
            axes.plot(
                _hours(choice), choice.cost, "o", markersize=15, markerfacecolor="none",
                markeredgecolor="#D55E00", zorder=4,
            )  # fmt: skip


def _hours(choice: Recommendation) -> float:
    return choice.time_s / HOUR_S
