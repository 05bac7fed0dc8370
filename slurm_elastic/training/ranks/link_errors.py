"""Errors of the communication between ranks, in one line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from torch import distributed as dist

from slurm_elastic.core.errors import SlurmElasticError


class LinkError(SlurmElasticError, RuntimeError):
    """Failed communication with another rank; the message is one line and names the rank."""


@contextlib.contextmanager
def link_errors(operation: str) -> Iterator[None]:
    """Replace failures of torch's communication by an error of one line.

    Raises:
        LinkError: another rank has ended, or the group's timeout has passed.
    """
    try:
        yield
    except LinkError:
        raise
    except RuntimeError as error:
        text = (str(error).strip().splitlines() or ["no reason given"])[0]
        # Without the place in gloo's source and its advice, which do not help a user.
        reason = re.sub(r"^(\[[^\]]*\.(cc|cpp|h):\d+\] )+", "", text).split(". This is ")[0]
        raise LinkError(f"rank {dist.get_rank()} failed {operation}: {reason}") from error
