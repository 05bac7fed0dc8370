"""State of a script that is kept over the restarts of its job.

A small JSON file in `.slurm-elastic/` below the directory of submission. Without it (a read-only
directory) the count of checkpoints begins at 0 and the script has to resume once more before the
job can be resized.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_elastic.job.launch import log_line
from slurm_elastic.job.unmodified.kept_checkpoint import KeptCheckpoint


@dataclass(kw_only=True)
class ResumeState:
    """Checkpoints of one job, and whether its script resumes.

    Attributes:
        count: complete checkpoints in all runs.
        proven: a restart has read the newest checkpoint and written a newer one.
        refuted: a restart has written one without reading any; there is no further rehearsal.
        start_world: ranks of the attempt that completed the first checkpoint; 0: not known.
        training: what the newest checkpoint shows of the training (`training_state_check`).
        jump: what jumped in the training over a change, or "".
        pause_s: longest pause inside a save (`settle_time`); None: not known.
        kept: the checkpoint that was kept for the rehearsal; None: none is.
        kept_saves: saves of the attempt until that one.
        copying: directory in which a copy was begun; "": none was.
        saves: saves of the present attempt.
    """

    count: int = 0
    proven: bool = False
    refuted: bool = False
    start_world: int = 0
    training: dict[str, Any] | None = None
    jump: str = ""
    pause_s: float | None = None
    kept: KeptCheckpoint | None = None
    kept_saves: int = 0
    copying: str = ""
    saves: int = 0

    def to_body(self) -> dict[str, Any]:
        """Return its JSON object."""
        return {**vars(self), "kept": None if self.kept is None else dict(vars(self.kept))}

    @classmethod
    def of(cls, body: object) -> ResumeState:
        """Return it from its JSON object, of this or an older version.

        Raises:
            ValueError, TypeError: a value is invalid, or it is no object.
        """
        if not isinstance(body, dict):
            raise TypeError("a state is a JSON object")
        values = {name: body[name] for name in cls.__dataclass_fields__ if name in body}
        state = cls(**{**values, "kept": KeptCheckpoint.of(values.get("kept"))})
        counts = (state.count, state.start_world, state.kept_saves, state.saves)
        if any(type(count) is not int or count < 0 for count in counts):
            raise ValueError("a count is no whole number")
        if not isinstance(state.copying, str) or not isinstance(state.jump, str):
            raise TypeError("a text is none")
        pause_s = state.pause_s
        if pause_s is not None and not (type(pause_s) in (int, float) and 0 <= pause_s < math.inf):
            state.pause_s = None
        return state


class ResumeStateFile:
    """File of one job's `ResumeState`."""

    def __init__(self, run_id: str, directory: Path | None = None) -> None:
        submitted_from = os.environ.get("SLURM_SUBMIT_DIR") or "."
        self.path = (directory or Path(submitted_from) / ".slurm-elastic") / f"{run_id}.json"
        self._complained = False

    def load(self) -> ResumeState:
        """Read the state; return a new one if the file is missing or invalid."""
        try:
            return ResumeState.of(json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return ResumeState()

    def save(self, state: ResumeState) -> bool:
        """Write the state; return whether it is written. Log the first failure only."""
        temporary = self.path.with_suffix(".tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(state.to_body(), file)
                if state.kept is not None:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            if not self._complained:
                self._complained = True
                log_line(
                    f"{self.path}: not written ({error.strerror}); after a requeue the script has"
                    " to show again that it resumes"
                )
            return False
        return True
