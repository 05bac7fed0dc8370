"""SIGKILL at a chosen point of a rank's execution.

A point is a place in the program, not a time: the n-th line of the library,
or the n-th operation on the checkpoints' directory, counted from a step on. So
a seed gives the same point on any machine.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import slurm_elastic.training
from tests.support.patience import PATIENCE_S

_LIBRARY = str(Path(slurm_elastic.training.__file__).parent)
#: Audit events before operations on files; those with a directory's handle are `shutil.rmtree`'s.
_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


@dataclass(kw_only=True)
class KillPoint:
    """Point in the execution of one rank at which some ranks are killed.

    Args:
        kind: "line": before a line of slurm_elastic.training runs, in any thread;
            "file": before an operation on the checkpoints' directory.
        count: number of the line or operation, from 1 on.
        step: counting begins with this step of the attempt; 0: with the process.
        watched: the rank whose lines or operations are counted.
        victims: the ranks that are killed.
    """

    kind: str
    count: int
    step: int = 0
    watched: int = 0
    victims: tuple[int, ...] = (0,)
    _seen: int = field(default=0, init=False, repr=False)
    _armed: bool = field(default=False, init=False, repr=False)

    def set(self, out: Path, attempt: int) -> None:
        """Begin to observe the watched rank, before it calls the library."""
        self._out, self._attempt, self._pid = out, attempt, os.getpid()
        if self.kind == "line":
            threading.settrace(self._called)
            sys.settrace(self._called)
        else:
            sys.addaudithook(self._audited)
        self.begin(0)

    def begin(self, step: int) -> None:
        """Note the begin of a step of the attempt."""
        if step == self.step:
            self._armed = True

    def _called(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(_LIBRARY) else None

    def _line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            name = frame.f_code.co_filename.removeprefix(_LIBRARY).lstrip("/")
            self._pass(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        return self._line

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _OPERATIONS and os.getpid() == self._pid:
            path = str(arguments[0])
            root = str(self._out / "ckpt")
            if path.startswith(root) or (event != "open" and not path.startswith("/")):
                self._pass(f"{event} {path.removeprefix(root).lstrip('/') or '.'}")

    def _pass(self, what: str) -> None:
        if not self._armed:
            return
        self._seen += 1
        if self._seen == self.count:
            self._armed = False
            (self._out / f"kill-point-{self._attempt}").write_text(what)
            ordered = sorted(self.victims, key=lambda rank: rank == self.watched)
            for process in [pid(self._out, self._attempt, victim) for victim in ordered]:
                os.kill(process, signal.SIGKILL)


def write_pid(out: Path, attempt: int, rank: int) -> None:
    """Write the process id, by which others can kill this process."""
    (out / f"pid-{attempt}-{rank}").write_text(f"{os.getpid()}\n")


def pid(out: Path, attempt: int, rank: int) -> int:
    """Return the process id of a rank of this attempt, as soon as it has been started."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        path = out / f"pid-{attempt}-{rank}"
        if path.exists() and (text := path.read_text()).endswith("\n"):
            return int(text)
        time.sleep(0.001)
    raise TimeoutError(f"rank {rank} of attempt {attempt} was never started")
