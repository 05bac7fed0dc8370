"""The pages of the command line describe every field, code and request."""

import re
from pathlib import Path

from slurm_elastic.rpc import (
    answers,
    decision_answers,
    duration_answers,
    program_answers,
    topology_answers,
    usage_answers,
)
from slurm_elastic.rpc.protocol import CODES
from slurm_elastic.rpc.requests import OPERATIONS

TOP = Path(__file__).parents[3]
PAGES = ("cli-json.md", "cli-json-tools.md", "cli-socket.md")


def test_every_field_of_the_answers_is_described():
    text = "".join((TOP / "docs" / page).read_text() for page in PAGES)
    modules = (
        answers, decision_answers, duration_answers, program_answers, topology_answers,
        usage_answers,
    )  # fmt: skip
    values = [value for module in modules for value in vars(module).values()]
    schemas = [value for value in values if hasattr(value, "__required_keys__")]
    fields = {f for s in schemas for f in s.__annotations__}
    assert len(fields) > 200
    assert [f for f in sorted(fields) if f"`{f}`" not in text and f'"{f}"' not in text] == []


def test_every_decision_has_all_parts():
    parts = (
        r"# \d+\. .+", r"- Status: (proposed|accepted|superseded by \d{4})",
        r"- Date: \d{4}-\d{2}-\d{2}", "## Context", "## Decision", "## Consequences",
    )  # fmt: skip
    missing = [
        (page.name, part)
        for page in sorted((TOP / "docs" / "adr").glob("0*.md"))
        for part in parts
        if not re.search(f"^{part}$", page.read_text(), re.MULTILINE)
    ]
    assert missing == []


def row(operation):
    """Line of the table of operations."""
    arguments = "; ".join(f"`{a.name}`: {a.text}" for a in operation.arguments)
    return f"| `{operation.name}` | {operation.audience.value} | {arguments} |"


def test_the_table_of_operations_is_that_of_the_code():
    text = (TOP / "docs" / "cli-socket.md").read_text()
    _, table = text.split("| `op` | for | arguments |\n|---|---|---|\n")
    assert table.split("\n\n")[0].splitlines() == [row(o) for o in OPERATIONS.values()]


def test_the_codes_of_refusals_are_those_of_the_code():
    lines = (TOP / "docs" / "cli-socket.md").read_text().splitlines()
    assert [c for c, meaning in CODES.items() if f"| `{c}` | {meaning} |" not in lines] == []
