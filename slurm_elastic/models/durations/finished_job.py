"""Jobs for the prediction of run times: their properties at submission, and the outcome."""

from __future__ import annotations

from dataclasses import dataclass

#: Longer names are cut: comparing names takes time that grows with the square of their length.
MOST_NAME = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """Properties of a job that are known at its submission.

    Attributes:
        group: partition, or another division of the cluster.
        submitted: epoch s.
        limit_s: time limit; None: unlimited, or not known.
        own_names: only names of this user count, as others' jobs are private.
    """

    user: str
    name: str
    gpus: int
    group: str = ""
    submitted: float = 0.0
    limit_s: float | None = None
    own_names: bool = False

    @property
    def short_name(self) -> str:
        """Name for comparisons: printable, and not longer than `MOST_NAME`."""
        return "".join(c if c.isprintable() else "?" for c in self.name[:MOST_NAME])


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedJob:
    """A job that has ended.

    Attributes:
        seconds: run time on the GPUs requested; of a job that ran on others, its GPU seconds
            divided by these.
        ended: epoch s.
    """

    request: JobRequest
    seconds: float
    ended: float
