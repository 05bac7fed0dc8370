"""Plots of simulations: completion times, GPUs held over time, utilisation.

matplotlib, of the extra `plot`, is imported on the first plot; no display is needed (Agg). Colours
are those of Okabe and Ito (2008), for colour-blind readers; lines also differ in dashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.simulator.results import HOUR_S, Result, mean

#: Endings of the file's name.
FORMATS = (".png", ".svg", ".pdf")

#: Colours of all plots.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)), (0, (3, 3)))
_WAITING = "#666666"
_OTHERS = "others"
#: A stacked picture is drawn with at most this many steps in time.
_STEPS = 600
#: Bars of `compare`: title and key of the summary, lower is better for all.
_BARS = (
    ("average JCT", "avg_jct_h"),
    ("median JCT", "p50_jct_h"),
    ("p99 JCT", "p99_jct_h"),
    ("makespan", "makespan_h"),
    ("GPU hours\nper job", "gpu_h_per_job"),
)
#: Settings of matplotlib that all pictures share.
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.hashsalt": "slurm-elastic",
    "figure.dpi": 110,
}


class PlotError(InvalidInputError):
    """Failure to draw a plot; the message has the reason and a remedy."""


def check(path: Path) -> None:
    """Check before a long run that a plot can be drawn and written.

    Raises:
        PlotError: unknown format, no such folder, or matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise PlotError(f'{path}: no format "{path.suffix}"; end the name in {", ".join(FORMATS)}')
    if not path.resolve().parent.is_dir():
        raise PlotError(f"{path}: no such folder: create it first")
    matplotlib()


def draw_run(results: Sequence[Result], path: Path) -> None:
    """Draw workloads under one policy; the stacks are those of the first workload.

    Raises:
        PlotError: see `check`; or the file cannot be written.
    """
    plt = matplotlib()
    first = results[0]
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(9, 8.5), layout="constrained")
        top, middle, bottom = figure.subplots(3, 1, height_ratios=(1.1, 1.7, 1.0))
        _cdf(top, [(_workload_label(results), _jct(results), 0, 0)])
        top.get_legend().remove()
        top.set_title(f"Job completion times, policy {first.policy}, {_workload_label(results)}")
        _stack(middle, first)
        of = f" of {first.workload}" if len(results) > 1 else ""
        middle.set_title(f"GPUs held{of}, one band per job, coloured by application")
        _draw_use(bottom, first)
        bottom.set_title(f"GPUs in use by type{of}")
        middle.sharex(bottom)
        middle.set_xlabel("")
        figure.align_ylabels((top, middle, bottom))
        save(figure, path)
        plt.close(figure)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Results of one policy (under one belief) in a comparison.

    Attributes:
        name: name for display.
        policy: name of the policy; equal ones share a colour.
        ratios: figures of the summary over those of the first policy; {}: it is the first.
    """

    name: str
    policy: str
    results: Sequence[Result]
    ratios: Mapping[str, float]


def draw_comparison(drawn: Sequence[Drawn], path: Path, *, title: str = "") -> None:
    """Draw policies beside each other: distributions, and ratios to the first one.

    Args:
        drawn: results to draw; ratios are to those of the first.
        path: see `check`.
        title: jobs in the title; "": the workload's name.

    Raises:
        PlotError: see `check`; or the file cannot be written.
    """
    plt = matplotlib()
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(9, 7.2), layout="constrained")
        top, bottom = figure.subplots(2, 1, height_ratios=(1.2, 1))
        _cdf(top, [(d.name, _jct(d.results), *_style(drawn, d)) for d in drawn])
        top.set_title(f"Job completion times, {title or _workload_label(drawn[0].results)}")
        _bars(bottom, drawn)
        save(figure, path)
        plt.close(figure)


def matplotlib() -> Any:
    """Return `matplotlib.pyplot` with a backend that writes files only.

    Raises:
        PlotError: it is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415
    except ImportError:
        raise PlotError(
            "--plot needs matplotlib: python3 -m pip install 'slurm-elastic[plot]'"
        ) from None
    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    return plt


def save(figure: Any, path: Path) -> None:
    """Write a figure; the same one gives the same file.

    Raises:
        PlotError: it cannot be written.
    """
    # No creation time: equal figures give equal files.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    try:
        figure.savefig(path, dpi=150, metadata=metadata.get(path.suffix.lower()))
    except OSError as error:
        raise PlotError(f"{path}: {error.strerror or error}") from None


def _jct(results: Sequence[Result]) -> list[float]:
    return sorted(j.jct_s / HOUR_S for r in results for j in r.jobs)


def _workload_label(results: Sequence[Result]) -> str:
    jobs = sum(len(r.jobs) for r in results)
    workloads = results[0].workload if len(results) == 1 else f"{len(results)} workloads"
    return f"{workloads} ({jobs} jobs)"


def _style(drawn: Sequence[Drawn], curve: Drawn) -> tuple[int, int]:
    """Return colours by policy and dashes by policy, or by kind of time where policies repeat."""
    policies = list(dict.fromkeys(d.policy for d in drawn))
    colour = policies.index(curve.policy)
    if len(policies) == len(drawn):
        return colour, colour
    return colour, [d for d in drawn if d.policy == curve.policy].index(curve)


def _cdf(axes: Any, curves: Sequence[tuple[str, Sequence[float], int, int]]) -> None:
    """Draw curves, each with a name, ascending hours, a colour and dashes."""
    for name, values, i, dash in curves:
        hours = np.maximum(np.asarray(values, dtype=float), 1e-3)
        share = np.arange(1, len(hours) + 1) / len(hours)
        axes.step(
            np.concatenate([hours[:1], hours]),
            np.concatenate([[0.0], share]),
            where="post",
            color=COLOURS[i % len(COLOURS)],
            linestyle=_DASHES[dash % len(_DASHES)],
            linewidth=1.7,
            label=f"{name}  (mean {mean(values):.2f} h)",
        )
        axes.axvline(mean(values), color=COLOURS[i % len(COLOURS)], linewidth=0.7, alpha=0.6)
    axes.set_xscale("log")
    _plain_numbers(axes.xaxis)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("completion time, from submission (hours, logarithmic; thin line: mean)")
    axes.set_ylabel("part of the jobs")
    axes.legend(loc="lower right")


def _plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis with 1, 2, 5, 10 in place of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415

    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=30))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _stack(axes: Any, result: Result) -> None:
    """Draw bands of GPUs, one per job, in order of submission; above them the waiting jobs."""
    edges = _edges(result)
    jobs = {j.name: i for i, j in enumerate(result.jobs)}
    held = np.zeros((len(jobs), len(edges) - 1))
    for part in result.segments:
        if part.job in jobs:
            held[jobs[part.job]] += part.gpus * _overlap(edges, part.begin_s, part.end_s)
    names = _applications(result)
    hours = edges / HOUR_S
    tops = np.vstack([np.zeros(held.shape[1]), np.cumsum(held, axis=0)])
    for i, job in enumerate(result.jobs):
        live = np.flatnonzero(held[i])
        if len(live):
            a, b = live[0], live[-1] + 1
            axes.fill_between(
                hours[a : b + 1],
                np.append(tops[i, a:b], tops[i, b - 1]),
                np.append(tops[i + 1, a:b], tops[i + 1, b - 1]),
                step="post",
                facecolor=_colour(names, _application(job.application)),
                edgecolor="white",
                linewidth=0.3,
            )
    total = sum(g for _, g in result.gpus)
    axes.axhline(total, color="black", linewidth=0.8)
    axes.set_ylim(0, total * 1.04)
    axes.set_xlim(hours[0], hours[-1])
    axes.set_ylabel("GPUs")
    axes.set_xlabel("time (hours)")
    _swatches(axes, names)


def _application(name: str) -> str:
    """Return the application's name without the suffix that identifies one job."""
    return name.partition("#")[0]


def _applications(result: Result) -> list[str]:
    """Return the applications with a colour: the largest users of GPUs, and `others`."""
    used: Counter[str] = Counter()
    for job in result.jobs:
        used[_application(job.application)] += round(job.gpu_s)
    names = sorted(name for name, _ in used.most_common(len(COLOURS) - 1))
    return [*names, _OTHERS] if len(used) > len(names) else names


def _colour(names: Sequence[str], name: str) -> str:
    return COLOURS[names.index(name)] if name in names else COLOURS[-1]


def _swatches(axes: Any, names: Sequence[str]) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415

    patches = [Patch(color=_colour(names, name), label=name) for name in names]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_use(axes: Any, result: Result) -> None:
    """Draw the part of each type's GPUs that is held, and the number of jobs."""
    edges = _edges(result, 120)
    hours = edges / HOUR_S
    for i, (kind, total) in enumerate(result.gpus):
        used = np.zeros(len(edges) - 1)
        for part in result.segments:
            if part.gpu_type == kind:
                used += part.gpus * _overlap(edges, part.begin_s, part.end_s)
        axes.stairs(
            100 * used / total,
            hours,
            baseline=None,
            color=COLOURS[i % len(COLOURS)],
            linestyle=_DASHES[i % len(_DASHES)],
            linewidth=1.5,
            label=f"{kind or 'GPU'} ({total})",
        )
    axes.set_ylim(0, 104)
    axes.set_xlim(hours[0], hours[-1])
    axes.set_ylabel("in use (%)")
    axes.set_xlabel("time (hours)")
    handles, labels = axes.get_legend_handles_labels()
    if result.rounds:
        jobs_axes = axes.twinx()
        jobs_axes.grid(visible=False)
        times = np.array([r.time_s for r in result.rounds]) / HOUR_S
        jobs_axes.fill_between(
            times,
            [r.contention for r in result.rounds],
            step="post",
            color=_WAITING,
            alpha=0.15,
            linewidth=0,
        )
        jobs_axes.set_ylim(bottom=0)
        jobs_axes.set_ylabel("jobs in the system (grey)", color=_WAITING)
        jobs_axes.spines["right"].set_visible(True)
    axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.08, 1.0))


def _bars(axes: Any, drawn: Sequence[Drawn]) -> None:
    """Draw ratios on a logarithmic axis around 1, where half and double have equal length."""
    first, compared = drawn[0], [d for d in drawn if d.ratios]
    width = 0.8 / max(1, len(compared))
    limits = [0.8, 1.25]
    for i, policy_ratios in enumerate(compared):
        ratios = [policy_ratios.ratios.get(key, np.nan) for _, key in _BARS]
        limits += [r for r in ratios if np.isfinite(r) and r > 0]
        colour, dash = _style(drawn, policy_ratios)
        axes.bar(
            np.arange(len(_BARS)) - 0.4 + width * (i + 0.5),
            [r - 1 for r in ratios],
            0.9 * width,
            bottom=1,
            color=COLOURS[colour % len(COLOURS)],
            hatch="////" if dash and len({d.policy for d in drawn}) < len(drawn) else None,
            edgecolor="white",
            label=policy_ratios.name,
        )
        for k, ratio in enumerate(ratios):
            axes.annotate(
                f"{ratio:.2f}",
                (k - 0.4 + width * (i + 0.5), ratio),
                xytext=(0, 2 if ratio >= 1 else -2),
                textcoords="offset points",
                ha="center",
                va="bottom" if ratio >= 1 else "top",
                fontsize=8 if len(compared) < 5 else 7,
            )
    axes.axhline(1, color=COLOURS[0], linewidth=1.2)
    axes.set_yscale("log")
    axes.set_ylim(min(limits) / 1.2, max(limits) * 1.25)
    _plain_numbers(axes.yaxis)
    axes.set_xticks(np.arange(len(_BARS)), [title for title, _ in _BARS])
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel(f"times {first.policy}'s (logarithmic)")
    axes.set_title(f"Beside {first.policy}, the line at 1 (lower is better)")
    if compared:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _edges(result: Result, most: int = _STEPS) -> NDArray[np.float64]:
    ends = [p.end_s for p in result.segments] + [j.completion_s for j in result.jobs]
    begin = min((j.submission_s for j in result.jobs), default=0.0)
    return np.linspace(begin, max([*ends, begin + 1.0]), most + 1)


def _overlap(edges: NDArray[np.float64], begin: float, end: float) -> NDArray[np.float64]:
    """Return the part of each interval between edges that lies in [begin, end]."""
    inside = np.minimum(edges[1:], end) - np.maximum(edges[:-1], begin)
    return np.asarray(np.clip(inside, 0, None) / np.diff(edges), dtype=float)
