"""Jobs that slow each other down in simulations: `--neighbours` and `--gpu-pairs`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_elastic.cli.exit_codes import USAGE, CliError
from slurm_elastic.cli.formatting import clean

if TYPE_CHECKING:
    from slurm_elastic.simulator.parallel_runs import Task
    from slurm_elastic.simulator.truth.neighbour_slowdown import NeighbourSlowdown

#: Suffix of a policy's name where placement keeps jobs apart that slow each other down.
APART = "+apart"
#: Suffix of a policy's name where two jobs may share a GPU.
SHARE = "+share"


def neighbours(path: str | None, *, option: str = "--neighbours") -> NeighbourSlowdown | None:
    """Return the slowdowns of an option; None if it is not given.

    Args:
        path: its value.
        option: its name.

    Raises:
        CliError: the file is invalid.
    """
    from slurm_elastic.simulator.truth import neighbour_slowdown  # noqa: PLC0415

    if path is None:
        return None
    try:
        return neighbour_slowdown.read(Path(path))
    except neighbour_slowdown.NeighbourSlowdownError as error:
        raise CliError(f"{option}: {clean(error)}", USAGE) from None


def variants(*, apart: bool, share: bool) -> list[str]:
    """Return the suffixes of a policy's name, one for each of its runs.

    Args:
        apart: whether speeds of neighbours are given.
        share: whether speeds of pairs on one GPU are given.
    """
    suffixes = ["", APART] if apart else [""]
    return [s + shared for s in suffixes for shared in (("", SHARE) if share else ("",))]


def acting(task: Task, variant: str) -> Task:
    """Return a task as one of `variants`: what it does with neighbours and pairs on one GPU."""
    settings = dataclasses.replace(
        task.config.neighbours,
        mode="act" if APART in variant else "observe",
        share_gpus="act" if SHARE in variant else "off",
    )
    return dataclasses.replace(task, config=dataclasses.replace(task.config, neighbours=settings))
