"""What the user asked for at submission, as a running job sees it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from slurm_elastic.core.directive import Directive

#: slurmd sets it in jobs submitted with --elastic.
_IN_JOB = "SLURM_SPANK_ELASTIC"
#: What a user may set on a machine without Slurm, as for sbatch.
_OUTSIDE = "SLURM_ELASTIC"


def read_directive(environment: Mapping[str, str] | None = None) -> Directive | None:
    """The directive; None: there is none.

    Args:
        environment: the process's by default.

    Raises:
        DirectiveError: it is damaged; it is a ValueError.

    >>> str(read_directive({"SLURM_ELASTIC": "2-4,freeze=auto"}))
    '2-4,freeze=auto'
    """
    environment = os.environ if environment is None else environment
    text = environment.get(_IN_JOB, "")
    if not text and "SLURM_JOB_ID" not in environment:
        text = environment.get(_OUTSIDE, "")
    return Directive.parse(text) if text else None
