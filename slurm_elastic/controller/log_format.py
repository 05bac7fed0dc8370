"""Log lines of the controller about decisions."""

from __future__ import annotations

from slurm_elastic.core.cluster import Snapshot
from slurm_elastic.core.plan import Decision
from slurm_elastic.slurm.shape import describe


def log_line(decision: Decision, snapshot: Snapshot, *, advice: bool = False) -> str:
    """Return the log line of a decision; the reason and its parameters end it."""
    job = snapshot.job[decision.job_id]
    mode = "Mode=advise " if advice else ""
    held = decision.current.gpus if decision.current else 0
    return (
        f"JobId={job.display_id} Action={decision.action.value} From={held} "
        f"To={describe(decision.target)!r} {mode}Reason={decision.reason}"
    )
