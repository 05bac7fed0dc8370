"""Draw the dashboard from Prometheus's answers to its own queries, where Grafana is not at hand.

    python -m contrib.grafana.draw_dashboard --minutes 10 --out dashboard.png [--url URL]

The panels are those of dashboards/slurm-elastic.json, in their places; the picture is matplotlib's,
not Grafana's. A query that Prometheus refuses ends the program.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parent / "dashboards" / "slurm-elastic.json"
#: Of the grid: rows of one height unit, in inches.
_UNIT, _WIDTH = 0.42, 20.0
_NONE = float("nan")


def main() -> None:
    """Ask Prometheus, and draw."""
    parser = argparse.ArgumentParser(prog="python -m contrib.grafana.draw_dashboard")
    parser.add_argument("--url", default="http://localhost:9090", help="of Prometheus")
    parser.add_argument("--job", default="selastic", help="of the scrape")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--until", type=float, default=None, help="epoch seconds; default: now")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    end = args.until or time.time()
    source = Source(args.url, args.job, end - 60 * args.minutes, end)
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    try:
        empty = draw(panels, source, args.out)
    except (OSError, ValueError) as error:
        raise SystemExit(f"draw_dashboard: {error}") from None
    print(f"{args.out}: {source.asked} queries; without data: {', '.join(empty) or 'none'}")


class Source:
    """Answers of one Prometheus for one span of time.

    Attributes:
        asked: number of queries.
    """

    def __init__(self, url: str, job: str, start: float, end: float) -> None:
        self.url, self.job, self.start, self.end = url, job, start, end
        step = max(5.0, (end - start) / 200)
        #: At which each query is evaluated.
        self.times = [round(start + step * i, 1) for i in range(int((end - start) / step) + 1)]
        self.step = step
        self.asked = 0

    def series(self, query: str, legend: str) -> list[tuple[str, list[float]]]:
        """Return (name, values) of each series of a query; NaN where it has no value."""
        self.asked += 1
        query = query.replace("$job", self.job).replace("$__rate_interval", "1m")
        arguments = {"query": query, "start": self.start, "end": self.end, "step": self.step}
        url = f"{self.url}/api/v1/query_range?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - the user's own
                result = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            reason = error.read(1000).decode(errors="replace")
            raise ValueError(f"{query}: {reason}") from None
        rows = []
        for row in result:
            values = {round(float(t), 1): float(v) for t, v in row["values"]}
            rows.append((_name(legend, row["metric"]), [values.get(t, _NONE) for t in self.times]))
        return [(name, values) for name, values in rows if not all(map(math.isnan, values))]


def _name(legend: str, labels: dict[str, str]) -> str:
    if legend == "__auto":
        return ", ".join(f"{k}={v}" for k, v in labels.items() if k not in ("job", "__name__"))
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)


def draw(panels: list[dict[str, Any]], source: Source, out: Path) -> list[str]:
    """Write the picture; return the titles of panels without data."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    rows = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    figure = plt.figure(figsize=(_WIDTH, rows * _UNIT), dpi=80)
    empty = []
    for panel in panels:
        place = panel["gridPos"]
        box = (
            (place["x"] + 0.9) / 24,
            1 - (place["y"] + place["h"] - 1.3) / rows,
            (place["w"] - 1.3) / 24,
            (place["h"] - 2.4) / rows,
        )
        axes = figure.add_axes(box)
        axes.set_title(panel["title"], fontsize=10, loc="left")
        series = [
            row
            for target in panel["targets"]
            for row in source.series(target["expr"], target["legendFormat"])
        ]
        if not series:
            empty.append(panel["title"])
        if panel["type"] == "timeseries":
            _lines(axes, panel, series, source.times)
        else:
            _text(axes, panel, series)
    figure.savefig(out)
    return empty


def _text(axes: Any, panel: dict[str, Any], series: list[tuple[str, list[float]]]) -> None:
    """Show the last value of one series large, or the last ones of a table's rows."""
    axes.set_axis_off()
    if panel["type"] == "table":
        lines = [f"{name}: {values[-1]:g}" for name, values in series if not math.isnan(values[-1])]
        axes.text(0.0, 0.95, "\n".join(lines) or "none", fontsize=8, va="top", wrap=True)
        return
    value = f"{series[0][1][-1]:.4g}" if series else "no data"
    unit = panel["fieldConfig"]["defaults"]["unit"].replace("short", "")
    axes.text(0.5, 0.4, f"{value} {unit}", fontsize=18, ha="center", va="center")


def _lines(
    axes: Any, panel: dict[str, Any], series: list[tuple[str, list[float]]], times: list[float]
) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    dates = [datetime.datetime.fromtimestamp(t, datetime.UTC) for t in times]
    if defaults["custom"]["stacking"]["mode"] == "normal" and series:
        filled = [[0.0 if math.isnan(v) else v for v in values] for _, values in series]
        axes.stackplot(dates, filled, labels=[n for n, _ in series], alpha=0.7, step="post")
    else:
        for name, values in series:
            axes.plot(dates, values, label=name, drawstyle="steps-post", linewidth=1.2)
    axes.set_xlim(dates[0], dates[-1])
    axes.set_ylim(bottom=0)
    axes.set_ylabel(defaults["unit"].replace("short", ""), fontsize=7)
    axes.tick_params(labelsize=7)
    axes.xaxis.set_major_formatter(lambda x, _: _clock(x))
    axes.grid(alpha=0.3)
    if any(name for name, _ in series):
        axes.legend(fontsize=6, loc="upper left")


def _clock(number: float) -> str:
    from matplotlib import dates  # noqa: PLC0415

    return dates.num2date(number).strftime("%H:%M")


if __name__ == "__main__":
    main()
