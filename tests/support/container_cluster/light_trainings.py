"""Light trainings (`tests.support.light_training`) on a cluster: installation, expected steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

from tests.support.light_training.light_rank import Samples

PROGRAM = "tests.support.light_training"
_FILES = sorted((Path(__file__).parents[1] / "light_training").glob("*.py"))


class _Shell(Protocol):
    def __call__(self, script: str, /, *, stdin: str) -> object: ...


def install(run: _Shell, home: str) -> None:
    """Copy the program to a directory that all nodes share.

    Args:
        run: runs a shell script with this input.
        home: the directory, `PYTHONPATH` of `python3 -m tests.support.light_training`.
    """
    folder = f"{home}/{PROGRAM.replace('.', '/')}"
    for path in _FILES:
        run(f"mkdir -p {folder} && cat >{folder}/{path.name}", stdin=path.read_text())


def expected_steps(samples: int, epochs: int, batch: int) -> list[tuple[list[int], float]]:
    """Return the samples and the loss of each step of an undisturbed training."""
    data = Samples(samples, epochs, batch)
    losses = data.losses()
    return [(data.of_step(step)[1], loss) for step, loss in enumerate(losses, start=1)]


def check_steps(losses: str, size: tuple[int, int, int]) -> None:
    """Check that each step was computed once, as in an undisturbed training.

    Args:
        losses: contents of losses.jsonl.
        size: samples, epochs, samples of a step.
    """
    rows = [json.loads(line) for line in losses.splitlines()]
    expected = expected_steps(*size)
    for step, row in enumerate(rows, start=1):
        assert (row["step"], row["loss"]) == (step, expected[step - 1][1]), rows[max(step - 3, 0) :]
