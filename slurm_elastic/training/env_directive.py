"""The directive of the job that this process belongs to."""

from __future__ import annotations

import os
from collections.abc import Mapping

from slurm_elastic.core.directive import Directive

#: slurmd sets it in jobs submitted with --elastic.
_IN_JOB = "SLURM_SPANK_ELASTIC"
#: May be set by hand on a machine without Slurm, as for sbatch.
_OUTSIDE = "SLURM_ELASTIC"


def read_directive(environment: Mapping[str, str] | None = None) -> Directive | None:
    """Return the submitted directive, None without one.

    Args:
        environment: variables; None: those of this process.

    Raises:
        DirectiveError: the text is no directive; a ValueError.

    >>> str(read_directive({"SLURM_ELASTIC": "2-4,freeze=auto"}))
    '2-4,freeze=auto'
    """
    environment = os.environ if environment is None else environment
    text = environment.get(_IN_JOB, "")
    if not text and "SLURM_JOB_ID" not in environment:
        text = environment.get(_OUTSIDE, "")
    return Directive.parse(text) if text else None


def set_directive(text: str) -> None:
    """Set the directive of this process, which joins a job with it; "": that has none."""
    os.environ.pop(_OUTSIDE, None)
    if text:
        os.environ[_IN_JOB] = text
