"""What a training did in each step, from the lines that its ranks wrote."""

import json
from pathlib import Path
from typing import Any


def steps_of(folder: Path) -> dict[int, dict[str, Any]]:
    """Return for each step: the samples of all ranks, and the other fields of rank 0.

    A step that was trained twice, before and after a restart, counts as it was trained last.
    """
    by_step: dict[int, dict[int, dict[str, Any]]] = {}
    for file in sorted(folder.glob("steps.*")):
        for text in file.read_text().splitlines():
            line = json.loads(text)
            ranks = by_step.setdefault(line["step"], {})
            if ranks and next(iter(ranks.values()))["world"] != line["world"]:
                newest = line["world"] == _last_world(folder, line["step"])
                if not newest:
                    continue
                ranks.clear()
            ranks[line["rank"]] = line
    return {
        step: ranks[0] | {"samples": sorted(n for r in ranks.values() for n in r["samples"])}
        for step, ranks in sorted(by_step.items())
    }


def _last_world(folder: Path, step: int) -> int:
    lines = [json.loads(text) for text in (folder / "steps.0").read_text().splitlines()]
    return [line["world"] for line in lines if line["step"] == step][-1]
