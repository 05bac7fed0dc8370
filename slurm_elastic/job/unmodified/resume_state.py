"""State of a script that is kept over the restarts of its job.

A small JSON file in one of the directories of `state_directory`. Without it (none can be written)
the count of checkpoints begins at 0 and the script has to resume once more before the job can be
resized.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic.job.environment.state_directory import (
    REVISION,
    revision,
    state_directories,
    versions,
    write_own,
)
from slurm_elastic.job.launch import log_line
from slurm_elastic.job.unmodified.checkpoints.learned_saves import LearnedSaves, learned_saves
from slurm_elastic.job.unmodified.kept_checkpoint import KeptCheckpoint

#: Fields about one of the scripts that a batch script starts one after the other.
_OF_SCRIPT = (
    *("proven", "refuted", "training", "jump", "command", "sizes", "node", "has_ended"),
    "needed_micro_batches",
)
#: Fields that are kept of a script that has ended: a batch script may run hundreds in a loop.
_OF_ENDED_SCRIPT = ("proven", "refuted", "jump", "has_ended")
#: Other scripts that are kept.
_MOST_OTHERS = 1000


@dataclass(kw_only=True)
class ResumeState:
    """Checkpoints of one job, and whether its script resumes.

    A batch script may start several, one after the other, each with its own pattern.

    Attributes:
        count: complete checkpoints in all runs.
        proven: a restart has read the newest checkpoint and written a newer one.
        refuted: a restart has written one without reading any; there is no further rehearsal.
        start_world: ranks of the attempt that completed the first checkpoint; 0: not known.
        training: what the newest checkpoint shows of the training (`training_state_check`).
        jump: what jumped in the training over a change, or "".
        learned: what is known of the saves, by pattern.
        kept: the checkpoint that was kept for the rehearsal; None: none is.
        kept_saves: saves of the attempt until that one.
        copying: directory in which a copy was begun; "": none was.
        saves: saves of the present attempt.
        command: of the newest run with a checkpoint (`program_command`).
        sizes: ranks of the runs, up to the newest one, in which that was the same.
        node: on which esrun ran when the script completed its newest checkpoint; "": not known.
        needed_micro_batches: `esrun --micro-batches` without which it would resume wrongly on
            another number of ranks (`fixed_accumulation`); 0: none are needed.
        has_ended: whether it has ended with exit code 0, after which the batch script went on.
        pattern: of the checkpoints of the script that all this is about; "": not known.
        others: by pattern, the same of the other scripts.
    """

    count: int = 0
    proven: bool = False
    refuted: bool = False
    start_world: int = 0
    training: dict[str, Any] | None = None
    jump: str = ""
    learned: list[LearnedSaves] = field(default_factory=list)
    kept: KeptCheckpoint | None = None
    kept_saves: int = 0
    copying: str = ""
    saves: int = 0
    command: str = ""
    sizes: tuple[int, ...] = ()
    node: str = ""
    needed_micro_batches: int = 0
    has_ended: bool = False
    pattern: str = ""
    others: dict[str, dict[str, Any]] = field(default_factory=dict)

    def select(self, pattern: str) -> None:
        """Begin with the script that writes these checkpoints; keep what is known of the last."""
        if self.pattern not in ("", pattern):
            names = _OF_ENDED_SCRIPT if self.has_ended else _OF_SCRIPT
            self.others[self.pattern] = {name: getattr(self, name) for name in names}
            known = self.others.pop(pattern, {})
            self.others = dict(list(self.others.items())[-_MOST_OTHERS:])
            for name in _OF_SCRIPT:
                setattr(self, name, known.get(name, getattr(ResumeState, name)))
        self.pattern = pattern

    def to_body(self) -> dict[str, Any]:
        """Return its JSON object."""
        return {
            **vars(self),
            "learned": [row.to_body() for row in self.learned],
            "kept": None if self.kept is None else dict(vars(self.kept)),
        }

    @classmethod
    def of(cls, body: object) -> ResumeState:
        """Return it from its JSON object, of this or an older version.

        Raises:
            ValueError, TypeError: a value is invalid, or it is no object.
        """
        if not isinstance(body, dict):
            raise TypeError("a state is a JSON object")
        values = {name: body[name] for name in cls.__dataclass_fields__ if name in body}
        values["learned"] = learned_saves(values.get("learned"))
        values["sizes"] = tuple(values.get("sizes", ()))
        state = cls(**{**values, "kept": KeptCheckpoint.of(values.get("kept"))})
        counts = (
            *(state.count, state.start_world, state.kept_saves, state.saves, *state.sizes),
            state.needed_micro_batches,
        )
        if any(type(count) is not int or count < 0 for count in counts):
            raise ValueError("a count is no whole number")
        texts = (state.copying, state.jump, state.command, state.node, state.pattern)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a text is none")
        if not isinstance(state.others, dict):
            raise TypeError("the other scripts are no JSON object")
        for known in state.others.values():
            cls.of(known)
        return state


class ResumeStateFile:
    """File of one job's `ResumeState`.

    Args:
        run_id: of the job.
        directories: those that it may lie in, the preferred one first; None: `state_directory`'s.
    """

    def __init__(self, run_id: str, directories: Sequence[str] | None = None) -> None:
        self.directories = state_directories(os.environ) if directories is None else directories
        self._name = f"{run_id}.json"
        self._revision = 0
        self._complained = False

    @property
    def path(self) -> str:
        """Path of the file, in the preferred directory."""
        return f"{self.directories[0]}/{self._name}"

    def load(self) -> ResumeState:
        """Read the newest valid state; return a new one if there is none."""
        loaded: ResumeState | None = None
        for directory, text in versions(self.directories, self._name):
            self._revision = max(self._revision, revision(text))
            if loaded is None:
                with contextlib.suppress(ValueError, TypeError, RecursionError):
                    loaded = ResumeState.of(json.loads(text))
                    # It stays where it is, as long as that can be written.
                    others = (other for other in self.directories if other != directory)
                    self.directories = (directory, *others)
        return loaded or ResumeState()

    def save(self, state: ResumeState) -> bool:
        """Write the state; return whether it is written. Log the first failure only."""
        self._revision += 1
        text = json.dumps({REVISION: self._revision, **state.to_body()})
        failures = []
        for directory in self.directories:
            try:
                write_own(f"{directory}/{self._name}", text, durable=state.kept is not None)
            except OSError as error:
                failures.append(f"{directory} ({error.strerror})")
            else:
                return True
        if not self._complained:
            self._complained = True
            log_line(
                f"no place for the state of the job: {', '.join(failures)}; until one of them can"
                " be written the script is not shown to resume, and the job is not resized: make"
                " one writable, or submit from a directory of your own"
            )
        return False
