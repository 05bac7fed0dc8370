"""State of a script that is kept over the restarts of its job.

A small JSON file in `.slurm-elastic/` below the directory of submission. Without it (a read-only
directory) the count of checkpoints begins at 0 and the script has to resume once more before the
job can be resized.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.job.launch import log_line


@dataclass(kw_only=True)
class ResumeState:
    """Checkpoints of one job, and whether its script resumes.

    Attributes:
        count: complete checkpoints in all runs.
        proven: a restart has read the newest checkpoint and written a newer one.
        refuted: a restart has written one without reading any; there is no further rehearsal.
    """

    count: int = 0
    proven: bool = False
    refuted: bool = False


class ResumeStateFile:
    """File of one job's `ResumeState`."""

    def __init__(self, run_id: str, directory: Path | None = None) -> None:
        submitted_from = os.environ.get("SLURM_SUBMIT_DIR") or "."
        self.path = (directory or Path(submitted_from) / ".slurm-elastic") / f"{run_id}.json"
        self._complained = False

    def load(self) -> ResumeState:
        """Read the state; return a new one if the file is missing or invalid."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            fields = {field.name: data[field.name] for field in dataclasses.fields(ResumeState)}
            state = ResumeState(**fields)
        except (OSError, ValueError, KeyError, TypeError):
            return ResumeState()
        valid = type(state.count) is int and state.count >= 0
        return state if valid else ResumeState()

    def save(self, state: ResumeState) -> None:
        """Write the state; log the first failure, ignore later ones."""
        temporary = self.path.with_suffix(".tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(dataclasses.asdict(state)), encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            if not self._complained:
                self._complained = True
                log_line(
                    f"{self.path}: not written ({error.strerror}); after a requeue the script has"
                    " to show again that it resumes"
                )
