"""Detection of launchers that a rank starts itself, as in `esrun bash run.sh` with torchrun in it.

Each rank then starts a training of its own, and all of them write the same checkpoints. Only the
processes of this node are looked at: all ranks run the same program.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.job.launchers.launcher_site import SERVICES, is_python, recognise
from slurm_elastic.job.launchers.shell_text import base_name
from slurm_elastic.job.slurm_env import STEP_VARIABLE

#: `accelerate launch` with one process takes the rank's place; srun may start a step of any kind; a
#: service is no training.
_HARMLESS = SERVICES | {"accelerate", "srun"}
_RUN_ID = "TORCHELASTIC_RUN_ID"
#: Seconds between looks: a launcher mostly starts at once, and needs seconds to start its ranks.
_PAUSES_S = (1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0)
_LATER_PAUSE_S = 60.0
_AGAIN_S = 1.0
_WATCH_S = 1800.0


@dataclass(frozen=True)
class RankProcess:
    """A process of a step.

    Attributes:
        parent: process id of its parent.
        words: its command line.
        run_id: `TORCHELASTIC_RUN_ID` in its environment.
    """

    parent: int
    words: tuple[str, ...]
    run_id: str


def nested_launcher(processes: dict[int, RankProcess], *, run_id: str) -> str | None:
    """Return the name of the launcher that each task of a step has started; None without one.

    A launcher below a program in Python counts only if there are several tasks and all have one:
    rank 0 of a training may well start one, for instance for an evaluation.

    Args:
        processes: of the step on this node.
        run_id: `TORCHELASTIC_RUN_ID` of the tasks themselves.
    """
    tasks = [pid for pid, process in processes.items() if process.parent not in processes]
    if not tasks:
        return None
    deep = len(tasks) > 1
    names = [_launcher_below(processes, task, run_id, deep=deep) for task in tasks]
    return names[0] if all(names) else None


def _launcher_below(
    processes: dict[int, RankProcess], pid: int, run_id: str, *, deep: bool
) -> str | None:
    process = processes[pid]
    kind = recognise(process.words)
    if kind is not None and kind not in _HARMLESS:
        return kind
    if process.run_id not in ("", run_id):
        return "torchrun"  # one of its ranks
    if is_python(base_name(process.words[0])) and kind is None and not deep:
        return None
    children = [child for child, other in processes.items() if other.parent == pid]
    launchers = (_launcher_below(processes, child, run_id, deep=deep) for child in children)
    return next((name for name in launchers if name), None)


def step_processes(mark: str, proc: Path = Path("/proc")) -> dict[int, RankProcess]:
    """Return the processes of a step on this node, by process id.

    Args:
        mark: value of `SLURM_ELASTIC_STEP` in their environment.
        proc: where the kernel shows processes.
    """
    return dict(_read(mark, proc))


def ranks_only(processes: dict[int, RankProcess], esrun: int) -> dict[int, RankProcess]:
    """Return the processes of a step without the srun that esrun has started, and its forks.

    That has the step's environment, too, and is alone for a moment when the ranks have ended.

    Args:
        processes: of the step on this node.
        esrun: process id of esrun.
    """
    own = {pid for pid, process in processes.items() if process.parent == esrun}
    forks = {
        pid
        for pid, process in processes.items()
        if process.parent in own and process.words == processes[process.parent].words
    }
    return {pid: process for pid, process in processes.items() if pid not in own | forks}


def _read(mark: str, proc: Path) -> Iterator[tuple[int, RankProcess]]:
    marked = f"{STEP_VARIABLE}={mark}".encode()
    for folder in proc.glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            if marked not in variables:
                continue
            words = (folder / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            status = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        except OSError:
            continue  # another user's, or ended
        prefix = f"{_RUN_ID}=".encode()
        run_id = next((v[len(prefix) :] for v in variables if v.startswith(prefix)), b"")
        yield (
            int(folder.name),
            RankProcess(
                parent=int(status[1]),
                words=tuple(word.decode("utf-8", "replace") for word in words),
                run_id=run_id.decode("utf-8", "replace"),
            ),
        )


class NestedLaunchWatch:
    """Watch of one step in the background.

    Args:
        mark: of the step.
        run_id: `TORCHELASTIC_RUN_ID` of its tasks.
        on_nested: gets the name of the launcher, once.
    """

    def __init__(self, mark: str, run_id: str, on_nested: Callable[[str], None]) -> None:
        self._mark, self._run_id = mark, run_id
        self._on_nested = on_nested
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the watch."""
        threading.Thread(target=self._run, name="launchers", daemon=True).start()

    def end(self) -> None:
        """End the watch: the step has ended."""
        self._ended.set()

    def _run(self) -> None:
        pauses = iter(_PAUSES_S)
        end = time.monotonic() + _WATCH_S
        while time.monotonic() < end and not self._ended.wait(next(pauses, _LATER_PAUSE_S)):
            # Twice: not for a command that asks a launcher for its version, say.
            if self._look() and not self._ended.wait(_AGAIN_S) and (name := self._look()):
                self._on_nested(name)
                return

    def _look(self) -> str | None:
        ranks = ranks_only(step_processes(self._mark), os.getpid())
        return nested_launcher(ranks, run_id=self._run_id)
