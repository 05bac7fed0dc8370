"""Steps of a training, read from the lines that its ranks wrote, and their comparison."""

import json
from pathlib import Path
from typing import Any

import pytest


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


def worlds_of(folder: Path) -> list[int]:
    """Return the number of ranks in each step."""
    return [line["world"] for line in steps_of(folder).values()]


def assert_same_steps(
    actual: dict[int, dict[str, Any]],
    expected: dict[int, dict[str, Any]],
    *,
    steps: int,
    tolerance: float,
) -> None:
    """Check that each step has the same samples, epoch, rate and loss as the undisturbed one.

    Args:
        actual: from `steps_of`.
        expected: the same of a training that was never interrupted.
        steps: number of steps of both.
        tolerance: largest difference of a loss.
    """
    assert list(actual) == list(expected) == list(range(1, steps + 1))
    for step, line in actual.items():
        assert line["samples"] == expected[step]["samples"], step
        assert line["epoch"] == pytest.approx(expected[step]["epoch"]), step
        assert line["rate"] == pytest.approx(expected[step]["rate"], rel=1e-9), step
        assert line["loss"] == pytest.approx(expected[step]["loss"], abs=tolerance), step
