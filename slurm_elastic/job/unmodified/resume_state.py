"""What esrun remembers of a script over the restarts of its job.

A small JSON file in `.slurm-elastic/` below the directory of submission. It is
a convenience: without it (a read-only directory) the count of checkpoints
starts again and the proof has to be repeated.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.job.launch import say


@dataclass(kw_only=True)
class ResumeState:
    """One job's history.

    Attributes:
        count: complete checkpoints seen, in all runs.
        proven: a restart has read the newest checkpoint and written a newer one.
        refuted: a restart has written one without reading any; never rehearsed again.
    """

    count: int = 0
    proven: bool = False
    refuted: bool = False


class ResumeStateFile:
    """Where one job's `ResumeState` lies."""

    def __init__(self, run_id: str, directory: Path | None = None) -> None:
        submitted_from = os.environ.get("SLURM_SUBMIT_DIR") or "."
        self.path = (directory or Path(submitted_from) / ".slurm-elastic") / f"{run_id}.json"
        self._complained = False

    def load(self) -> ResumeState:
        """What is remembered; a fresh memory if there is none that can be read."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            known = {field.name: data[field.name] for field in dataclasses.fields(ResumeState)}
            memory = ResumeState(**known)
        except (OSError, ValueError, KeyError, TypeError):
            return ResumeState()
        usable = type(memory.count) is int and memory.count >= 0
        return memory if usable else ResumeState()

    def save(self, memory: ResumeState) -> None:
        """Remember; a failure is said once and forgiven."""
        temporary = self.path.with_suffix(".tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(dataclasses.asdict(memory)), encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            if not self._complained:
                self._complained = True
                say(f"{self.path} cannot be written ({error.strerror}): a proof will not be kept")
