"""The page docs/metrics.md, from the definitions of the metrics."""

from __future__ import annotations

from contrib.generate.definitions import TEMPLATES
from slurm_elastic.controller.metrics.metric_definitions import ALWAYS, COUNTED, OF_CLUSTER


def page() -> str:
    """Return the text of docs/metrics.md."""
    rows = ["| metric | kind | meaning | labels |", "|---|---|---|---|"]
    for metric in (*ALWAYS, *OF_CLUSTER, *COUNTED):
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.full_name}` | {metric.kind} | {metric.meaning} | {labels} |")
    template = (TEMPLATES / "metrics.md").read_text("utf-8")
    return template.replace("@metrics\n", "\n".join(rows) + "\n")
