"""Running the parts, one after the other, each in processes that end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.kit_report import FAILED, NOT_RUN, PartResult, part_state
from tests.gpu.report_rows import read_rows

ROOT = Path(__file__).resolve().parents[2]
#: Seconds that a part gets to end what it has started, after SIGINT.
_END_S = 20.0
#: Last lines of a failed part that the report shows, and bytes that are searched for them.
_LINES, _TAIL_BYTES = 20, 1 << 16


@dataclass(frozen=True, slots=True)
class KitPart:
    """One part of the kit.

    Attributes:
        name: for `--parts`.
        title: what it does.
        timeout_s: after which it is ended.
        least_ranks: with fewer it is not run.
        package: of the module of this name, which is run.
    """

    name: str
    title: str
    timeout_s: float
    least_ranks: int = 1
    package: str = "tests.gpu.parts"


@dataclass(frozen=True, slots=True)
class KitSetting:
    """What all parts are run with.

    Attributes:
        device: "cuda" or "cpu"; sizes are small on a CPU.
        ranks: processes.
        folder: for checkpoints, on the file system that is to be measured.
    """

    device: str
    ranks: int
    folder: Path

    @property
    def small(self) -> bool:
        """Whether to try the kit only."""
        return self.device == "cpu"


def run_part(
    part: KitPart, setting: KitSetting, environment: Mapping[str, str], *, timeout_s: float
) -> PartResult:
    """Run one part to its end, or to its time-out; leave no process behind.

    Args:
        part: to run.
        setting: of the run; the folder is there.
        environment: variables of the part.
        timeout_s: after which it is ended.

    Raises:
        KeyboardInterrupt: of the user, when the part's processes are gone.
    """
    if setting.ranks < part.least_ranks:
        reason = f"needs {part.least_ranks} GPUs"
        return PartResult(part.name, part.title, NOT_RUN, 0.0, reason)
    rows_path, log_path = (setting.folder / f"{part.name}.{end}" for end in ("rows", "log"))
    folder = setting.folder / part.name
    folder.mkdir()
    command = [sys.executable, "-m", f"{part.package}.{part.name}", "--device", setting.device]
    command += ["--ranks", str(setting.ranks), "--rows", str(rows_path), "--folder", str(folder)]
    began = time.monotonic()
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            code = child.wait(timeout_s)
            reason = f"ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            reason = f"was ended after {timeout_s:g} s"
        finally:
            end_session(child)
    state, reason = part_state(rows := read_rows(rows_path), reason)
    log_lines = _tail(log_path) if state == FAILED else ()
    seconds = time.monotonic() - began
    return PartResult(part.name, part.title, state, seconds, reason, rows, log_lines)


def end_session(child: subprocess.Popen[bytes]) -> None:
    """End a program and all processes of its session, those that it left behind too.

    SIGINT first, as Python's programs then end what runs in sessions of its own.
    """
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _tail(path: Path) -> tuple[str, ...]:
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
    lines = [line.rstrip()[:300] for line in text.splitlines() if line.strip()]
    return tuple(lines[-_LINES:])
