"""Keeping a script's newest checkpoint over the restart that shows whether the script resumes.

The controller requeues an unproven job once (docs/esrun-proven.md). Before the
job agrees, its newest checkpoint is kept; afterwards it is removed, or put back, or left beside
what the script has written in its place. Nothing that a script has written is deleted here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurm_elastic.job.complete_marker import CompleteMarker
from slurm_elastic.job.launch import log_line
from slurm_elastic.job.unmodified import kept_checkpoint
from slurm_elastic.job.unmodified.checkpoints.checkpoint_scanner import ScriptCheckpoint
from slurm_elastic.job.unmodified.checkpoints.whole_files import is_whole
from slurm_elastic.job.unmodified.kept_checkpoint import KeepError, KeptCheckpoint, size_text
from slurm_elastic.job.unmodified.node_disks import temporary_directory
from slurm_elastic.job.unmodified.resume_state import ResumeState, ResumeStateFile

#: Seconds after a refusal before the job offers to be rehearsed again (our choice).
_AGAIN_S = 600.0
_REMEDY = "to train on from there, give the script its option to resume"


class Rehearsal:
    """Kept checkpoint of one job.

    Args:
        resume: state of the job; changed here.
        file: where it is written.
        run_id: of the job.
        pattern: of the checkpoints.
        marker: shows that a checkpoint is complete; None: the script writes none.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        resume: ResumeState,
        file: ResumeStateFile,
        run_id: str,
        *,
        pattern: str,
        marker: CompleteMarker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resume, self._file, self._run_id = resume, file, run_id
        self._pattern, self._marker, self._clock = pattern, marker, clock
        self._inodes: dict[str, int] = {}
        self._replaced: dict[str, bool] = {}
        self._problem = ""
        self._declined_at = 0.0
        self._sibling = ""

    # --- attempts ---

    def begin_attempt(self) -> frozenset[str]:
        """Complete what an ended attempt has left; to be called while no rank runs.

        Returns:
            Paths of the kept checkpoint's originals, which the attempt may resume from.
        """
        resume = self._resume
        if resume.copying and resume.kept is None:
            kept_checkpoint.remove_below(resume.copying)
        resume.copying = ""
        kept = self._kept
        if kept is not None and kept.at_start:
            self._end(kept, code=None, resumed=False)
        resume.saves = 0
        kept = self._kept
        if kept is None:
            return frozenset()
        try:
            kept_checkpoint.unshare(kept)
        except KeepError as error:
            log_line(
                f"rehearsal: {error.directory}: no room for a copy of the kept checkpoint:"
                f" free {size_text(error.needed_bytes)} there; a script that starts anew overwrites"
                " the only one"
            )
        kept.at_start = kept.present()
        self._file.save(resume)
        return frozenset(kept.checkpoints)

    def end_attempt(self, code: int | None, *, resumed: bool) -> dict[str, Any]:
        """Put back what an attempt has lost; to be called when its ranks have ended.

        Args:
            code: exit code; None: Slurm ends the attempt.
            resumed: whether it has read the checkpoint.

        Returns:
            Fields of the report.
        """
        kept = self._kept
        if kept is None:
            return {}
        undecided = bool(kept.at_start) and not self._resume.refuted
        has_failed = undecided and code is not None and (code != 0 or not resumed)
        self._end(kept, code=code, resumed=resumed)
        self._file.save(self._resume)
        if has_failed and code == 0:
            log_line(
                "rehearsal: the restarted script has ended with exit code 0 without having read a"
                f" checkpoint or written one; the earlier checkpoint is kept in {kept.place}:"
                f" {_REMEDY}"
            )
        return {"rehearsal": "failed"} if has_failed else {}

    def _end(self, kept: KeptCheckpoint, *, code: int | None, resumed: bool) -> None:
        resume = self._resume
        if resume.refuted:
            if code != 0:
                self._put_back(kept, only_missing=resume.saves >= resume.kept_saves)
            return
        if code == 0:
            if resumed or not kept.at_start:
                self._drop(kept)
            return
        if not kept.at_start:
            return  # the attempt that was asked to save: what follows its answer is newer
        if code is None and (
            kept.unchanged_since_start() or (resumed and (kept.linked or _is_one_whole_file(kept)))
        ):
            kept.at_start = kept.present()  # the next start does not know that this one resumed
            return
        self._put_back(kept)

    def decide(self, *, resumed: bool) -> dict[str, Any]:
        """Record the result of the first checkpoint of a restart; return fields of the report."""
        kept = self._kept
        if resumed:
            if kept is not None:
                self._drop(kept)
            return self.report()
        place = f"; the earlier checkpoint is kept in {kept.place}: {_REMEDY}" if kept else ""
        log_line(
            "the restarted script has written a checkpoint without reading an earlier one:"
            f" it does not resume, and will not be resized{place}"
        )
        return self.report()

    @property
    def _kept(self) -> KeptCheckpoint | None:
        """The kept checkpoint, if it is of this step of the batch script."""
        kept = self._resume.kept
        return kept if kept is not None and kept.pattern == self._pattern else None

    def _drop(self, kept: KeptCheckpoint) -> None:
        self._resume.kept = None
        if self._file.save(self._resume):
            remover = threading.Thread(target=kept_checkpoint.remove, args=(kept,), name="remove")
            remover.daemon = True
            remover.start()

    def _put_back(self, kept: KeptCheckpoint, *, only_missing: bool = False) -> None:
        try:
            moved = kept_checkpoint.put_back(kept, only_missing=only_missing)
        except (OSError, KeepError) as error:
            owner = "its directory belongs to another user"
            reason = owner if isinstance(error, KeepError) else error.strerror
            log_line(
                f"rehearsal: the kept checkpoint could not be put back ({reason}):"
                f" copy it from {kept.place}"
            )
            return
        for original, aside in moved:
            newer = f"; the newer one is now {aside}" if aside else ""
            log_line(f"rehearsal: {original} is put back as it was before the restart{newer}")

    # --- the notice ---

    def observe(self, checkpoint: ScriptCheckpoint) -> None:
        """Learn from a complete checkpoint whether the script replaces its files."""
        path = Path(checkpoint.path)
        with contextlib.suppress(OSError):
            inode = path.stat().st_ino
            last = self._inodes.get(checkpoint.path)
            if last is not None:
                replaces = last != inode and path.is_file()
                self._replaced[checkpoint.path] = replaces and self._replaced.get(
                    checkpoint.path, True
                )
            self._inodes[checkpoint.path] = inode

    def replaces(self, paths: Sequence[str]) -> bool:
        """Return whether each of these files was replaced, not overwritten, by each save so far."""
        return all(self._replaced.get(path, False) for path in paths)

    def keep(self, paths: Sequence[str], stopped: Callable[[], bool]) -> KeptCheckpoint:
        """Keep the files of a save. May take minutes; the state is written by `commit`.

        Raises:
            KeepError: nothing is kept.
        """
        earlier = self._resume.kept
        if earlier is not None and earlier.at_start:  # it is still needed
            raise KeepError("not-writable", earlier.place)
        self._resume.kept = None
        directories = self._file.directories
        self._resume.copying = kept_checkpoint.directory_of(
            paths, run_id=self._run_id, directories=directories
        )
        if not self._file.save(self._resume):
            raise self.no_place()
        return kept_checkpoint.keep(
            paths,
            run_id=self._run_id,
            directories=directories,
            markers=self._markers(paths),
            link=self.replaces(paths),
            stopped=stopped,
        )

    def _markers(self, paths: Sequence[str]) -> dict[str, list[str]]:
        """Return the markers beside these checkpoints → the checkpoints that each belongs to."""
        markers: dict[str, list[str]] = {}
        if self._marker is None:
            return markers
        for checkpoint in paths:
            for path in self._marker.paths(checkpoint, is_directory=Path(checkpoint).is_dir()):
                if not any(Path(path).is_relative_to(other) for other in paths):
                    markers.setdefault(path, []).append(checkpoint)
        return markers

    def no_place(self) -> KeepError:
        """Return the error that the state of the job cannot be written."""
        return KeepError("not-writable", " or ".join(self._file.directories))

    def commit(self, kept: KeptCheckpoint, seconds: float) -> bool:
        """Write down what is kept; return whether it is written."""
        resume = self._resume
        kept.pattern = self._pattern
        resume.kept, resume.kept_saves, resume.copying = kept, resume.saves, ""
        if not self._file.save(resume):
            resume.kept = None
            kept_checkpoint.remove(kept)
            return False
        names = ", ".join(sorted(Path(path).name for path in kept.checkpoints))
        way = "linked" if kept.linked else f"copied in {seconds:.1f} s"
        log_line(
            f"rehearsal: {names} is kept in {kept.place} ({size_text(kept.size)}, {way});"
            " the job is requeued once, to see whether the script resumes"
        )
        return True

    def discard(self, kept: KeptCheckpoint | None) -> None:
        """Remove a copy that is of no use, before `commit`."""
        if kept is not None:
            kept_checkpoint.remove(kept)
        self._resume.copying = ""

    def withdraw(self) -> None:
        """Remove what was kept for a notice that is withdrawn."""
        kept = self._kept
        if kept is not None and not kept.at_start:
            self._drop(kept)

    def decline(self, error: KeepError) -> dict[str, Any]:
        """Log why there is no rehearsal; return fields of the report."""
        self._problem, self._declined_at = error.problem, self._clock()
        where = error.directory
        texts = {
            "no-room": f"no room to keep the checkpoint: free {size_text(error.needed_bytes)}"
            f" in {where}",
            "not-writable": f"no directory to keep the checkpoint in: make {where} writable",
            "changes": "the script writes checkpoints faster than one can be kept: save less often",
            "node-local": f"the checkpoints are in {where}, which each node has for itself: write"
            " them to a file system that all nodes share",
            "no-watch": f"reads of the checkpoints cannot be detected: {error.remedy}",
        }
        log_line(f"rehearsal: {texts[error.problem]}; until then the job is not resized")
        return {
            "rehearsal": error.problem,
            "kept_in": _printable(where),
            "kept_bytes": error.needed_bytes or None,
        }

    def record_sibling(self, sibling: str) -> dict[str, Any]:
        """Record another task of the array with the same pattern; return fields of the report.

        Args:
            sibling: its run id; "": there is none any more.
        """
        self._sibling = sibling
        if sibling:
            log_line(
                f"--checkpoint {self._pattern}: job {sibling.rpartition('-')[2]}, another task of"
                " this array, writes checkpoints of the same pattern; the job is not resized while"
                " both run: write $SLURM_ARRAY_TASK_ID in the pattern"
            )
        return self.report()

    def report(self, paths: Sequence[str] = ()) -> dict[str, Any]:
        """Return the fields of the report.

        Args:
            paths: of a save that has just been completed.
        """
        resume = self._resume
        if self._sibling:
            return {"rehearsal": "shared", "kept_in": "", "kept_bytes": None}
        if resume.needed_micro_batches and not resume.refuted:
            return {
                "rehearsal": "accumulation",
                "kept_in": "",
                "kept_bytes": None,
                "needed_micro_batches": resume.needed_micro_batches,
            }
        if resume.proven:
            return {"rehearsal": "", "kept_in": "", "kept_bytes": None}
        if resume.refuted:
            place = self._kept.place if self._kept else ""
            return {"rehearsal": "refuted", "kept_in": _printable(place)}
        if not paths or (resume.kept is not None and self._kept is None):
            return {}  # another step has kept one
        return self._offer(paths)

    def _offer(self, paths: Sequence[str]) -> dict[str, Any]:
        """Return the fields of the report of a save that may be kept for a rehearsal."""
        place = temporary_directory(paths[0], self._file.directories)
        if place:
            return {} if self._problem else self.decline(KeepError("node-local", place))
        if self._problem and self._clock() < self._declined_at + _AGAIN_S:
            return {}
        if self._problem == "no-room" and not self.replaces(paths):
            missing = kept_checkpoint.room_missing(
                paths, run_id=self._run_id, directories=self._file.directories
            )
            if missing:
                return {}
        self._problem = ""
        return {"rehearsal": "able", "kept_in": "", "kept_bytes": None}


def _is_one_whole_file(kept: KeptCheckpoint) -> bool:
    """Return whether the originals are one file, and it is shown to be whole."""
    return len(kept.files) == 1 and not kept.markers and is_whole(next(iter(kept.files))) is True


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)[-200:]
