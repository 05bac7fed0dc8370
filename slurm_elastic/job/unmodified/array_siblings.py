"""Tasks of a job array whose checkpoints match one pattern at the same time.

Which of them has written a file cannot be seen: the save of one would answer the notice of another,
which would be requeued without a checkpoint of its own. So each task marks its pattern in the state
directory while its program runs, and one that finds the mark of another task is not resized.
Tasks that run one after the other (`--array=0-9%1`) may share a pattern.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence

from slurm_elastic.job.environment.state_directory import is_own, writable, write_own

#: Seconds between looks, and after which a mark counts as left over by a task that was killed.
_LOOK_S, _LEFT_OVER_S = 30.0, 120.0


class ArraySiblings:
    """Mark of this task, and those of other tasks of its array with the same pattern.

    Args:
        pattern: glob pattern of the checkpoints.
        run_id: of the job.
        directories: for the state of the job.
        env: of the job; None: of this process.
        clock: monotonic seconds.

    Attributes:
        running: run id of another task that has marked the pattern; "": none has.
    """

    def __init__(
        self,
        pattern: str,
        run_id: str,
        directories: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        array = (os.environ if env is None else env).get("SLURM_ARRAY_JOB_ID", "")
        place = os.path.realpath(pattern)
        number = zlib.crc32(place.encode("utf-8", "surrogateescape"))
        #: End of the names of all marks of this pattern; "" outside arrays.
        self._end = f".array-{array}-{number:08x}" if array.isdecimal() else ""
        self._run_id, self._directories, self._clock = run_id, tuple(directories), clock
        self._look_at = math.inf
        self.running = ""

    def begin(self) -> None:
        """Let the next look write the mark, as the program is about to start."""
        self._look_at = -math.inf

    def look(self, *, at_once: bool = False) -> bool:
        """Renew the mark and look for others; return whether `running` has changed.

        Args:
            at_once: even if the last look was just now.
        """
        is_due = self._look_at < math.inf if at_once else self._clock() >= self._look_at
        if not self._end or not is_due:
            return False
        self._look_at = self._clock() + _LOOK_S
        last, self.running = self.running, self._other(self._mark())
        return self.running != last

    def leave(self) -> None:
        """Remove the mark, as the program has ended; there are no looks until `begin`."""
        self._look_at = math.inf
        for directory in self._directories if self._end else ():
            with contextlib.suppress(OSError):
                os.unlink(f"{directory}/{self._run_id}{self._end}")  # noqa: PTH108

    def _mark(self) -> float | None:
        """Write the mark; return its time by the clock of the file server, None without one."""
        directory = writable(self._directories)
        if directory is None:
            return None
        path = f"{directory}/{self._run_id}{self._end}"
        try:
            write_own(path, "")
            return os.lstat(path).st_mtime
        except OSError:
            return None

    def _other(self, now: float | None) -> str:
        """Return the run id in the mark of another task; "" if there is none, or `now` is None."""
        if now is None:
            return ""
        for directory in self._directories:
            with contextlib.suppress(OSError), os.scandir(directory) as entries:
                for entry in entries:
                    other = entry.name.removesuffix(self._end)
                    if other in (entry.name, self._run_id):
                        continue
                    status = entry.stat(follow_symlinks=False)
                    if is_own(status) and status.st_mtime > now - _LEFT_OVER_S:
                        return other
        return ""
