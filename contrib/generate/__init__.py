"""`make generate`: completion, manual pages, example configuration, reasons, metrics and dashboard.

Options and verbs come from the click commands and from esrun's help, keys of the configuration from
the schema, reasons from their registry. The templates hold the prose. A line `@name ARGUMENTS` of a
template stands for a generated part.
"""

from __future__ import annotations

from pathlib import Path

from contrib.generate import completion, dashboard, manual, metrics, reasons
from slurm_elastic.config import documentation

ROOT = Path(__file__).resolve().parents[2]


def documents() -> dict[Path, str]:
    """Return the text of each generated file."""
    pages = {ROOT / "docs" / "man" / name: text for name, text in manual.pages().items()}
    return {
        ROOT / "etc" / "elastic.toml": documentation.example(),
        ROOT / "docs" / "reasons.md": reasons.page(),
        ROOT / "docs" / "metrics.md": metrics.page(),
        ROOT / "contrib" / "grafana" / "dashboards" / "slurm-elastic.json": dashboard.text(),
        ROOT / "contrib" / "completion" / "selastic.bash": completion.script(),
        **pages,
    }
