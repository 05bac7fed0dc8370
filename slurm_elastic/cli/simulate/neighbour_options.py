"""Jobs that slow each other down in simulations: `--neighbours`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_elastic.cli.exit_codes import USAGE, CliError
from slurm_elastic.cli.formatting import clean

if TYPE_CHECKING:
    from slurm_elastic.simulator.parallel_runs import Task
    from slurm_elastic.simulator.truth.neighbour_slowdown import NeighbourSlowdown

#: What follows the name of a policy whose placement keeps jobs apart that hurt each other.
APART = "+apart"


def neighbours(path: str | None) -> NeighbourSlowdown | None:
    """Return the slowdowns of --neighbours; None if it is not given.

    Raises:
        CliError: the file is invalid.
    """
    from slurm_elastic.simulator.truth import neighbour_slowdown  # noqa: PLC0415

    if path is None:
        return None
    try:
        return neighbour_slowdown.read(Path(path))
    except neighbour_slowdown.NeighbourSlowdownError as error:
        raise CliError(f"--neighbours: {clean(error)}", USAGE) from None


def acting(task: Task, *, acts: bool) -> Task:
    """Return a task whose placement counts neighbours, or only learns of them."""
    settings = dataclasses.replace(task.config.neighbours, mode="act" if acts else "observe")
    return dataclasses.replace(task, config=dataclasses.replace(task.config, neighbours=settings))
