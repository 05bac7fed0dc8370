"""Figures of a run of `scale`, and a plot of both runs.

>>> percentiles([3.0, 1.0, 2.0])
{'count': 3, 'p50': 2.0, 'p95': 3.0, 'max': 3.0}
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from benchmarks.support.quantiles import quantile

#: Share of the time that counts as warming up: memory grows to what it needs.
WARM = 1 / 3
_ROUND = re.compile(r"Round Seconds=([0-9.]+) Cpu=([0-9.]+) Jobs=([0-9]+)")
_ENDED = re.compile(r"Transition=([0-9]+) .*State=(DONE|UNDONE|ENDED) ")
_SLURM = re.compile(r"Transition=[0-9]+ .*State=DONE .*slurm:([0-9.]+)")
_TOTAL = re.compile(r"Transition=[0-9]+ .*State=training .*total:([0-9.]+)")

Rows = Sequence[Mapping[str, Any]]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Count, median, 95th percentile and maximum; {} of nothing."""
    if not values:
        return {}
    return {
        "count": len(values),
        "p50": quantile(values, 0.5),
        "p95": quantile(values, 0.95),
        "max": max(values),
    }


def arm_figures(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return all figures of one run; those without data are left out.

    Args:
        run: see `scale.run`.
    """
    rows, log = run["rows"], run["log"]
    seconds = rows[-1]["t"] - rows[0]["t"]
    rpcs = [r["sdiag"] for r in rows if r.get("sdiag")]
    figures: dict[str, Any] = {
        "seconds": round(seconds),
        "load": percentiles([r["load"] for r in rows if "load" in r]),
        "jobs": {k: [s[f"jobs_{k}"] for s in (rpcs[0], rpcs[-1])] for k in ("pending", "running")},
        "slurmctld_cores": _cores(rows, "slurmctld"),
        "rpcs": _difference(rpcs[0], rpcs[-1], "by_type"),
        "rpcs_by_user": _difference(rpcs[0], rpcs[-1], "by_user"),
        "scheduling": {
            k: rpcs[-1][k] - rpcs[0][k] for k in rpcs[0] if "cycle" in k and k in rpcs[-1]
        },
        "submitted": rpcs[-1]["jobs_submitted"] - rpcs[0]["jobs_submitted"],
        "started": rpcs[-1]["jobs_started"] - rpcs[0]["jobs_started"],
        "people": _people(run),
        "attempts": run["attempts"],
        "warnings": run["warnings"],
    }
    if any("selasticd" in r for r in rows):
        figures |= _of_selasticd(rows, log)
    return figures


def _of_selasticd(rows: Rows, log: Sequence[str]) -> dict[str, Any]:
    rounds = [m for line in log if (m := _ROUND.search(line))]
    ended = Counter(m[2] for line in log if (m := _ENDED.search(line)))
    slurm = [float(m[1]) for line in log if (m := _SLURM.search(line))]
    total = [float(m[1]) for line in log if (m := _TOTAL.search(line))]
    warm = [r for r in rows if "selasticd" in r and _warm(r, rows)]
    ledger = [r for r in rows if "ledger" in r]
    ours = run_user(rows, "selastic")
    return {
        "round_s": percentiles([float(m[1]) for m in rounds]),
        "round_cpu_s": percentiles([float(m[2]) for m in rounds]),
        "transitions": dict(ended),
        "transition_slurm_s": percentiles(slurm),
        "transition_total_s": percentiles(total),
        "selasticd_cores": _cores(rows, "selasticd"),
        "rss_mb": percentiles([r["selasticd"]["rss_mb"] for r in warm]),
        "rss_mb_per_h": slope([(r["t"], r["selasticd"]["rss_mb"]) for r in warm]),
        "threads": max(r["selasticd"]["threads"] for r in warm),
        "ledger_bytes": {"first": ledger[0]["ledger"], "last": ledger[-1]["ledger"]},
        "ledger_kb_per_h": slope([(r["t"], sum(r["ledger"]) / 1024) for r in ledger]),
        "ours": ours,
    }


def _warm(row: Mapping[str, Any], rows: Rows) -> bool:
    return bool(row["t"] >= rows[0]["t"] + WARM * (rows[-1]["t"] - rows[0]["t"]))


def run_user(rows: Rows, user: str) -> dict[str, float]:
    """Return a user's requests between the first and the last sdiag, and their cost."""
    samples = [r for r in rows if r.get("sdiag")]
    spent = _difference(samples[0]["sdiag"], samples[-1]["sdiag"], "by_user").get(user, [0, 0.0])
    seconds = samples[-1]["t"] - samples[0]["t"]
    return {
        "rpcs": spent[0],
        "rpcs_per_s": round(spent[0] / seconds, 2),
        "slurmctld_s": spent[1],
        "slurmctld_share": round(spent[1] / seconds, 4),
    }


def _difference(
    one: Mapping[str, Any], other: Mapping[str, Any], name: str
) -> dict[str, list[Any]]:
    """Return [count, seconds in slurmctld] by kind, in descending order of seconds."""
    spent = {
        kind: [count - one[name].get(kind, [0, 0])[0], (us - one[name].get(kind, [0, 0])[1]) / 1e6]
        for kind, (count, us) in other[name].items()
    }
    return {k: v for k, v in sorted(spent.items(), key=lambda i: -i[1][1]) if v[0]}


def _cores(rows: Rows, daemon: str) -> float:
    """Return the mean use of cores between the first and the last sample."""
    samples = [(r["t"], r[daemon]["cpu_s"]) for r in rows if daemon in r]
    (t0, cpu0), (t1, cpu1) = samples[0], samples[-1]
    return float(round((cpu1 - cpu0) / (t1 - t0), 4))


def _people(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the users' actions within the time, their durations, and their failures."""
    rows = [r for r in run["did"] if run["began"] <= r.get("t", 0) < run["until"]]
    kinds = sorted({r["did"] for r in rows})
    return {
        kind: {
            **percentiles([r["s"] for r in rows if r["did"] == kind]),
            "failed": sum(bool(r["rc"]) for r in rows if r["did"] == kind),
        }
        for kind in kinds
    }


def slope(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the growth per hour after Theil and Sen, with its 95 % interval.

    >>> slope([(0.0, 5.0), (1800.0, 6.0), (3600.0, 7.0)])["per_h"]
    2.0
    """
    if len(points) < 3:
        return {}
    hours = [t / 3600 for t, _ in points]
    slopes = stats.theilslopes([v for _, v in points], hours, 0.95)
    low, high = sorted((slopes.low_slope, slopes.high_slope))
    return {"per_h": round(float(slopes.slope), 3), "low": round(float(low), 3),
            "high": round(float(high), 3)}  # fmt: skip


def compared(rows: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cost of selasticd in slurmctld: with and without it, and per type of request."""
    ours, plain = figures["with"], figures["without"]
    kinds = {*ours["rpcs"], *plain["rpcs"]}
    return {
        "slurmctld_cores": [plain["slurmctld_cores"], ours["slurmctld_cores"]],
        "rpcs": {
            k: [plain["rpcs"].get(k, [0, 0.0]), ours["rpcs"].get(k, [0, 0.0])]
            for k in sorted(kinds)
        },
        "rpc_s": [sum(v[1] for v in f["rpcs"].values()) for f in (plain, ours)],
        "caused_by_us": run_user(rows["with"]["rows"], "selastic"),
        "people_p50_s": {
            k: [f["people"].get(k, {}).get("p50") for f in (plain, ours)]
            for k in sorted({*plain["people"], *ours["people"]})
        },
    }


def figure_lines(whole: Mapping[str, Any]) -> list[str]:
    """Return the figures as text."""
    lines = []
    for arm, f in whole["arms"].items():
        lines += [
            f"{arm} selasticd, {f['seconds']} s, load p50 {f['load']['p50']:.1f}:",
            (
                f"  slurmctld {f['slurmctld_cores']:.3f} cores, "
                f"{sum(v[0] for v in f['rpcs'].values())} requests, "
                f"{sum(v[1] for v in f['rpcs'].values()):.1f} s in them; "
                f"{f['submitted']} submitted, {f['started']} started"
            ),
            f"  jobs: {f['attempts']}; pending, running: {f['jobs']}",
        ]
        if "round_s" not in f:
            continue
        r, memory = f["round_s"], f["rss_mb_per_h"]
        lines += [
            (
                f"  rounds: {r['count']}, p50 {r['p50']:.2f} s, p95 {r['p95']:.2f} s, "
                f"max {r['max']:.2f} s, CPU p50 {f['round_cpu_s']['p50']:.2f} s; "
                f"selasticd {f['selasticd_cores']:.3f} cores"
            ),
            (
                f"  asks slurmctld {f['ours']['rpcs']} times, {f['ours']['rpcs_per_s']:.1f}/s, "
                f"{f['ours']['slurmctld_share']:.2%} of a core"
            ),
            (
                f"  memory {f['rss_mb']['p50']:.0f} MB, growing {memory.get('per_h')} MB an hour "
                f"({memory.get('low')} to {memory.get('high')})"
            ),
            (
                f"  ledger {sum(f['ledger_bytes']['last']) / 1024:.0f} KB, growing "
                f"{f['ledger_kb_per_h'].get('per_h')} KB an hour"
            ),
            f"  transitions: {f['transitions']}, Slurm's part {f['transition_slurm_s']}",
            f"  warnings: {f['warnings']}",
        ]
    return lines


def plot(rows: Mapping[str, Any], path: Path) -> None:
    """Plot over time: slurmctld's load of both runs; selasticd's memory, ledger and rounds."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra
    except ImportError:
        return
    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(3, 1, figsize=(8, 8), sharex=True, layout="constrained")
    for arm, run in rows.items():
        samples = [r for r in run["rows"] if "slurmctld" in r]
        times = [(r["t"] - run["began"]) / 60 for r in samples]
        cores = [
            (b["slurmctld"]["cpu_s"] - a["slurmctld"]["cpu_s"]) / max(1e-9, b["t"] - a["t"])
            for a, b in itertools.pairwise(samples)
        ]
        axes[0].plot(times[1:], cores, label=f"{arm} selasticd", linewidth=1)
    axes[0].set_ylabel("slurmctld, cores")
    axes[0].legend(frameon=False)
    run = rows.get("with")
    if run:
        samples = [r for r in run["rows"] if "selasticd" in r]
        times = [(r["t"] - run["began"]) / 60 for r in samples]
        axes[1].plot(times, [r["selasticd"]["rss_mb"] for r in samples])
        axes[2].plot(times, [sum(r["ledger"]) / 1024 for r in samples])
    axes[1].set_ylabel("selasticd, MB")
    axes[2].set_ylabel("ledger and its WAL, KB")
    for axis in axes:
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=120)
    plt.close(figure)
