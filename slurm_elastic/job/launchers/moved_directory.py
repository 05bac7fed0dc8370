"""Notice of a program that writes its checkpoints where a relative pattern does not match.

`@hydra.main` and others change the working directory, so that `--checkpoint 'ckpt/*.pt'`, which
is relative to the directory of esrun, matches none of the program's files.
"""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path

from slurm_elastic.job.launchers.nested_launch import ranks_only, step_processes

#: Seconds until the directories are looked at, and between two looks: the later the rarer.
_PAUSES_S, _LATER_PAUSE_S = (5.0, 10.0, 20.0, 40.0), 120.0


class MovedDirectoryWatch:
    """Watch of the ranks of one step on this host, in the background.

    Args:
        mark: of the step.
        pattern: of the checkpoints.
        has_begun_save: returns whether the pattern has matched in this start: then the watch ends.
        log: gets the line for the job's log, once.
    """

    def __init__(
        self,
        mark: str,
        pattern: str,
        *,
        has_begun_save: Callable[[], bool],
        log: Callable[[str], object],
    ) -> None:
        self._mark, self._pattern = mark, pattern
        self._has_begun_save, self._log = has_begun_save, log
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the watch."""
        threading.Thread(target=self._run, name="directories", daemon=True).start()

    def end(self) -> None:
        """End the watch: the step has ended."""
        self._ended.set()

    def _run(self) -> None:
        for pause_s in chain(_PAUSES_S, repeat(_LATER_PAUSE_S)):
            if self._ended.wait(pause_s) or self._has_begun_save():
                return
            pids = ranks_only(step_processes(self._mark), os.getpid())
            line = moved_line(self._pattern, working_directories(pids))
            if line:
                self._log(line)
                return


def working_directories(pids: Iterable[int], proc: Path = Path("/proc")) -> Iterator[str]:
    """Yield the working directory of each process, where it can be read.

    Args:
        pids: process ids.
        proc: where the kernel shows processes.
    """
    for pid in pids:
        try:
            yield os.readlink(proc / str(pid) / "cwd")  # noqa: PTH115 - a text
        except OSError:
            continue


def moved_line(pattern: str, directories: Iterable[str]) -> str:
    """Return why no checkpoint is found; "" if none is in another directory either.

    Args:
        pattern: of the checkpoints, relative to the current directory.
        directories: of the ranks.
    """
    own = os.getcwd()  # noqa: PTH109 - a text
    if glob.glob(pattern, recursive=True):  # noqa: PTH207 - a text
        return ""
    for directory in dict.fromkeys(directories):
        if directory == own:
            continue
        if glob.glob(pattern, root_dir=directory, recursive=True):  # noqa: PTH207
            return (
                f"--checkpoint {pattern} matches nothing in {own}, where esrun runs, but matches in"
                f" {directory}, which the program has made its working directory: give a pattern"
                " that matches there, and have the program use the same directory at each start"
                " (hydra: hydra.run.dir=out, --checkpoint 'out/…'). Until then the job is not"
                " resized"
            )
    return ""
