"""The dashboard for Grafana, contrib/grafana/dashboards/slurm-elastic.json."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

_WIDTH = 24
#: Grafana's format of dashboards; 10.0 and newer read it.
_SCHEMA = 38
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class _Panel(NamedTuple):
    """One panel.

    Attributes:
        title: above it.
        queries: legend and PromQL; JOB stands for the label that selects a cluster.
        unit: of Grafana.
        kind: `stat`, `timeseries` or `table`.
        width: of 24.
        stacked: whether the lines add up.
        meaning: shown on demand.
    """

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    meaning: str = ""


def _rate(series: str, by: str = "") -> str:
    return f"sum{_by(by)}(rate(selastic_{series}[$__rate_interval]))"


def _increase(metric: str, by: str = "") -> str:
    return f"sum{_by(by)}(increase(selastic_{metric}{{JOB}}[$__rate_interval]))"


def _quantile(q: float, buckets: str, by: str = "le") -> str:
    return f"histogram_quantile({q}, sum by ({by}) (rate(selastic_{buckets})))"


def _mean(metric: str, by: str) -> str:
    total, count = (
        f"sum by ({by}) (increase(selastic_{metric}_{part}{{JOB}}[1h]))"
        for part in ("sum", "count")
    )
    return f"{total} / ({count} > 0)"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""


_PANELS = (
    _Panel("Controllers that act", (("", "sum(selastic_active{JOB})"),), kind="stat", width=4),
    _Panel("Idle GPUs", (("", 'sum(selastic_gpus{JOB, use="idle"})'),), kind="stat", width=4),
    _Panel("Pending GPUs", (("", "sum(selastic_gpus_pending{JOB})"),), kind="stat", width=4),
    _Panel(
        "Changes under way", (("", "sum(selastic_transitions_live{JOB})"),), kind="stat", width=4
    ),
    _Panel("Jobs held", (("", "sum(selastic_jobs_stopped{JOB})"),), kind="stat", width=4),
    _Panel(
        "Age of the last round", (("", "max(selastic_snapshot_age_seconds{JOB})"),), "s", "stat", 4
    ),
    _Panel(
        "GPUs by use",
        (("{{use}}", "sum by (use) (selastic_gpus{JOB})"),),
        stacked=True,
        width=12,
    ),
    _Panel(
        "GPUs planned, wanted and pending",
        (
            ("planned {{gpu_type}}", "sum by (gpu_type) (selastic_gpus_planned{JOB})"),
            ("wanted by elastic jobs", "sum(selastic_gpus_wanted{JOB})"),
            ("pending, {{jobs}}", "sum by (jobs) (selastic_gpus_pending{JOB})"),
        ),
        width=12,
    ),
    _Panel(
        "Jobs",
        (
            ("{{jobs}} {{state}}", "sum by (jobs, state) (selastic_jobs{JOB}) > 0"),
            ("on trial", "sum(selastic_jobs_on_trial{JOB})"),
        ),
    ),
    _Panel(
        "Changes under way",
        (("{{state}}", "sum by (state) (selastic_transitions_live{JOB})"),),
        stacked=True,
    ),
    _Panel(
        "Changes that ended",
        (
            (
                "{{action}} {{kind}} {{outcome}}",
                _increase("transitions_total", "action, kind, outcome") + " > 0",
            ),
            (
                "failed on trial",
                _increase("changes_failed_total"),
            ),
            ("held", _increase("holds_total")),
        ),
    ),
    _Panel(
        "Seconds of a change",
        (
            (
                "p50 {{phase}}",
                _quantile(0.5, "transition_seconds_bucket{JOB}[30m]", "le, phase"),
            ),
            (
                "p95 total",
                _quantile(0.95, 'transition_seconds_bucket{JOB, phase="total"}[30m]'),
            ),
        ),
        "s",
        meaning="Of the changes of the last 30 minutes.",
    ),
    _Panel(
        "Speed after a change over before",
        (("{{speed}}", _mean("change_speedup", "speed")),),
        meaning="Mean of the last hour: promised by the model, and delivered as measured.",
    ),
    _Panel(
        "Steps computed again",
        (
            (
                "{{cause}}",
                _increase("lost_steps_total", "cause"),
            ),
        ),
        meaning="After a change of the controller, or a restart by others.",
    ),
    _Panel(
        "Rounds",
        (
            ("p95", _quantile(0.95, "round_seconds_bucket{JOB}[$__rate_interval]")),
            ("age of the last", "max(selastic_snapshot_age_seconds{JOB})"),
            ("interval", "max(selastic_round_interval_seconds{JOB})"),
        ),
        "s",
    ),
    _Panel(
        "CPU of rounds, share of a core",
        (("", _rate("round_cpu_seconds_total{JOB}")),),
        "percentunit",
    ),
    _Panel(
        "Requests a second",
        (
            ("reports", _rate('requests_total{JOB, operation="report"}')),
            (
                "{{operation}} refused: {{result}}",
                _rate('requests_total{JOB, result!="ok"}', "operation, result") + " > 0",
            ),
        ),
        "reqps",
    ),
    _Panel(
        "Reservations and leases",
        (
            ("reservations", "sum(selastic_reservations{JOB})"),
            ("leases", "sum(selastic_leases{JOB})"),
        ),
    ),
    _Panel(
        "Ages of reservations and leases",
        (
            ("oldest reservation", "max(selastic_reservation_oldest_seconds{JOB})"),
            ("lease since its renewal", "max(selastic_lease_oldest_seconds{JOB})"),
            ("length of a lease", "max(selastic_lease_length_seconds{JOB})"),
        ),
        "s",
    ),
    _Panel("Ledger", (("{{instance}}", "selastic_ledger_bytes{JOB}"),), "bytes"),
    _Panel(
        "Controllers",
        (
            ("{{instance}} acts", "selastic_active{JOB}"),
            ("{{instance}} lease, s", "selastic_leader_lease_seconds{JOB}"),
            ("{{instance}} generation", "selastic_leader_generation{JOB}"),
        ),
        meaning="Lease and generation are 0 where one controller is configured.",
    ),
    _Panel("Releases", (("", "selastic_build_info{JOB}"),), kind="table"),
    _Panel("Warnings", (("", "selastic_notes{JOB} > 0"),), kind="table"),
)


def text() -> str:
    """Return the dashboard as JSON."""
    return json.dumps(_dashboard(), indent=1) + "\n"


def _dashboard() -> dict[str, Any]:
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "job",
            "type": "query",
            "label": "Cluster",
            "datasource": _SOURCE,
            "query": {"query": "label_values(selastic_active, job)", "refId": "job"},
            "refresh": 2,
        },
    ]
    return {
        "uid": "slurm-elastic",
        "title": "slurm-elastic",
        "tags": ["slurm"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables},
        "annotations": {"list": []},
        "panels": _panels(),
    }


def _panels() -> list[dict[str, Any]]:
    shown = []
    x = y = 0
    for number, panel in enumerate(_PANELS, start=1):
        height = 4 if panel.kind == "stat" else 8
        shown.append(_panel(number, panel, {"h": height, "w": panel.width, "x": x, "y": y}))
        x += panel.width
        if x >= _WIDTH:
            x, y = 0, y + height
    return shown


def _panel(number: int, panel: _Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + i),
            "datasource": _SOURCE,
            "expr": query.replace("JOB", 'job="$job"'),
            "legendFormat": legend or "__auto",
            **({"format": "table", "instant": True} if panel.kind == "table" else {}),
        }
        for i, (legend, query) in enumerate(panel.queries)
    ]
    custom: dict[str, Any] = {}
    if panel.kind == "timeseries":
        custom = {"fillOpacity": 30 if panel.stacked else 0, "lineWidth": 1, "showPoints": "never"}
        custom["stacking"] = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    options: dict[str, Any] = {}
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "datasource": _SOURCE,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": options,
    }
