"""List of the benchmarks: `python -m benchmarks`."""

from __future__ import annotations

import ast

from benchmarks import ROOT


def commands() -> dict[str, str]:
    """Return the first line of the description of each command."""
    lines = {}
    for path in (ROOT / "benchmarks").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__main__")
        description = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        if f"python -m {name}" in description and name != "benchmarks":
            lines[name] = description.splitlines()[0].partition(": `python -m")[0].rstrip(".")
    return dict(sorted(lines.items()))


if __name__ == "__main__":
    for command, line in commands().items():
        print(f"python -m {command:36} {line}")
