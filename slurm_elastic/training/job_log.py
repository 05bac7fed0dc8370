"""Lines of the training library in the log of a job."""

from __future__ import annotations

import sys


def log_line(line: str) -> None:
    """Write one line to the job's log."""
    sys.stderr.write(f"slurm-elastic: {line}\n")
    sys.stderr.flush()
