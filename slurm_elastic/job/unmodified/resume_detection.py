"""Detection whether a restarted script has read one of the checkpoints that it may resume from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slurm_elastic.job.launch import log_line
from slurm_elastic.job.unmodified.checkpoints.checkpoint_scanner import ScriptCheckpoint
from slurm_elastic.job.unmodified.checkpoints.inotify import ReadWatch

#: A read of any checkpoint written so many seconds before the newest one is a resume.
_SAME_READ_S = 60.0


class ResumeDetection:
    """Watch for reads, from the start of an attempt to its first complete checkpoint."""

    def __init__(self) -> None:
        self._watch: ReadWatch | None = None
        self._is_active = False
        self._candidates: frozenset[str] = frozenset()

    def begin(self, existing: Sequence[ScriptCheckpoint], originals: Iterable[str]) -> None:
        """Begin to watch, before a restarted attempt.

        Args:
            existing: complete checkpoints, newest first; without any it cannot resume.
            originals: paths of the checkpoint that is kept for a rehearsal.
        """
        self.close()
        self._is_active = True
        if not existing:
            return
        newest = existing[0].written
        candidates = {c.path for c in existing if c.written >= newest - _SAME_READ_S}
        self._candidates = frozenset(candidates.union(originals))
        watch = ReadWatch(self._candidates)
        if watch.is_active:
            self._watch = watch
        else:
            self.close()
            watch.close()
            log_line(
                "inotify: no watch on the checkpoints: a resume cannot be detected; " + watch.remedy
            )

    @property
    def is_active(self) -> bool:
        """Whether it is still to be decided."""
        return self._is_active

    def has_resumed(self) -> bool:
        """Return whether the attempt has read a checkpoint."""
        return self._watch is not None and bool(self._watch.paths_read() & self._candidates)

    def ignore(self, path: str) -> None:
        """Ignore reads of a checkpoint that has changed: esrun itself reads it."""
        if self._watch is not None:
            self._watch.ignore(path)

    def close(self) -> None:
        """Stop watching."""
        self._is_active = False
        if self._watch is not None:
            self._watch.close()
            self._watch = None
