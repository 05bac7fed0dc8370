"""The report of one run of the kit, as JSON and as Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.gpu.report_rows import NOT_RUN, WRONG, ReportRow

#: Version of the JSON, the value of `gpu_kit`.
VERSION = 1
PASSED, FAILED = "passed", "FAILED"


@dataclass(frozen=True, slots=True)
class PartResult:
    """Result of one part.

    Attributes:
        name: as in `--parts`.
        title: in words.
        state: `PASSED`, `FAILED` or `NOT_RUN`.
        seconds: it took.
        reason: one line, for a part that failed or did not run; else "".
        rows: of the part.
        log: the last lines that a failed part has printed.
    """

    name: str
    title: str
    state: str
    seconds: float
    reason: str = ""
    rows: tuple[ReportRow, ...] = ()
    log: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KitReport:
    """Report of one run.

    Attributes:
        made: UTC, ISO 8601.
        device: "cuda" or "cpu".
        ranks: processes.
        machine: see `tests.gpu.machine`.
        parts: in their order.
        ranks_per_gpu: more than 1: they share GPUs, and NCCL connects them by sockets.
    """

    made: str
    device: str
    ranks: int
    machine: Mapping[str, Any]
    parts: tuple[PartResult, ...]
    ranks_per_gpu: int = 1

    @property
    def failed(self) -> bool:
        """Whether a part failed."""
        return any(part.state == FAILED for part in self.parts)


def part_state(rows: tuple[ReportRow, ...], reason: str) -> tuple[str, str]:
    """Return state and reason of a part that ended with these rows.

    Args:
        rows: of the part.
        reason: why it did not come to its end, or "".
    """
    wrong = [row.what for row in rows if row.state == WRONG]
    if reason or wrong:
        return FAILED, reason or f"{len(wrong)} of {len(rows)} rows: {'; '.join(wrong)}"
    if all(row.state == NOT_RUN for row in rows):
        return NOT_RUN, str(rows[0].value) if rows else "it had nothing to do"
    return PASSED, ""


def write(report: KitReport, path: Path) -> tuple[Path, Path]:
    """Write both forms beside each other; return their paths.

    Args:
        report: to write.
        path: without its ending, or with that of one of them.
    """
    stem = path.with_suffix("") if path.suffix in (".json", ".md") else path
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for ending, text in (("json", to_json(report)), ("md", to_markdown(report))):
        target = stem.with_name(f"{stem.name}.{ending}")
        target.write_text(text, encoding="utf-8")
        written.append(target)
    return written[0], written[1]


def to_json(report: KitReport) -> str:
    """Return the report as one JSON object; a number that is not finite becomes a text."""
    return json.dumps(_finite({"gpu_kit": VERSION, **asdict(report)}), indent=1) + "\n"


def to_markdown(report: KitReport) -> str:
    """Return the report as a page."""
    machine = report.machine
    gpus = [gpu["name"] for gpu in machine.get("gpus", ())]
    if report.device == "cpu":
        title = "CPU only: this tries the kit, not the GPU paths"
    else:
        title = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    lines = [f"# GPU kit on {machine.get('host', '?')}: {title}", ""]
    lines += [f"{report.made}, {report.ranks} rank(s), {_ranks_on_gpus(report)}.", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in _machine_rows(machine)]
    lines += ["", "| part | result | seconds | |", "|---|---|---|---|"]
    for part in report.parts:
        lines.append(
            f"| [{part.name}](#{part.name}) | {part.state} | {part.seconds:.0f}"
            f" | {_cell(part.reason or part.title)} |"
        )
    for part in report.parts:
        lines += ["", f"## {part.name}", "", f"{part.title}.", ""]
        if part.rows:
            lines += ["| | value | expected | |", "|---|---|---|---|"]
            lines += [_row(row) for row in part.rows]
        if part.log:
            lines += ["", "```", *(line.replace("```", "'''") for line in part.log), "```"]
    if topology := machine.get("topology"):
        lines += ["", "## Links between the GPUs", "", "```", *topology.splitlines(), "```"]
    return "\n".join(lines) + "\n"


def _ranks_on_gpus(report: KitReport) -> str:
    if report.ranks_per_gpu > 1:
        return f"{report.ranks_per_gpu} on each GPU, which NCCL connects by sockets"
    return "one for each " + ("GPU" if report.device == "cuda" else "process")


def _machine_rows(machine: Mapping[str, Any]) -> list[tuple[str, Any]]:
    rows = [
        (name, value)
        for name, value in machine.items()
        if name not in ("gpus", "topology", "variables") and value not in (None, "")
    ]
    for number, gpu in enumerate(machine.get("gpus", ())):
        memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB, compute capability {gpu['capability']}"
        rows.append((f"GPU {number}", f"{gpu['name']}, {memory}"))
    variables = machine.get("variables", {})
    return [*rows, *((name, value) for name, value in variables.items())]


def _row(row: ReportRow) -> str:
    value = row.value
    if not isinstance(value, str):
        value = f"{value:.4g} {row.unit}".rstrip()
    state = "" if row.state == "measured" else row.state
    return f"| {_cell(row.what)} | {_cell(value)} | {_cell(row.expected)} | {state} |"


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
