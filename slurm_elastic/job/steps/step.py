"""One running step: an srun process, its error output, its exit code.

srun reports the *largest* exit code, which after `--kill-on-bad-exit` is that of the ranks it
killed. Its error output is therefore read, and passed on unchanged: the first failed rank that it
names decides the exit code. The same output shows whether slurmctld did not answer srun, which then
ends before it has started a rank, or a node did not, so that srun ends the ranks on the others. It
also holds the error output of the ranks, in which a lack of memory is recognised.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from slurm_elastic.job.launch import SrunProcess
from slurm_elastic.job.steps.memory_errors import is_lack_of_memory

_SETTLE_S = 2.0
#: Seconds before the end of a step in which an error of memory counts as its cause: before that a
#: program has caught it (our choice).
_MEMORY_S = 120.0
_PREFIX = b"srun: error: "
#: Errors before the first rank is started, and reasons for them that pass (slurm_strerror).
_NOT_STARTED = (b"Unable to confirm allocation for job ", b"Unable to create step for job ")
_LAUNCH_FAILED = b"Application launch failed: "
#: Exit codes of ranks that srun ends.
_ENDED_BY_SRUN = (None, 128 + signal.SIGTERM, 128 + signal.SIGKILL)
_UNREACHABLE = (
    b"Socket timed out on send/recv operation",
    b"Unable to contact slurm controller",
    b"Communication connection failure",
    b"Communication shutdown failure",
    b"Message send failure",
    b"Message receive failure",
    b"Zero Bytes were transmitted or received",
    b"Connection refused",
    b"Connection reset by peer",
    b"Connection timed out",
    # Of a slurmctld or a node whose munged is not there.
    b"Protocol authentication error",
)


class Step:
    """A started srun and its error output."""

    def __init__(self, child: SrunProcess) -> None:
        self.child = child
        self._ended = threading.Event()
        self._first_failure: int | None = None
        self._was_unreached = self._launch_failed = False
        self._lacked_memory_at: float | None = None
        self._unreported_code: int | None = None  # of ranks whose end srun was not told
        self._pump_thread = threading.Thread(target=self._pump, name="stderr", daemon=True)
        self._pump_thread.start()

    def wait(self) -> int:
        """Wait for the end; return the exit code of the first failed rank, 128+n for signal n."""
        _, status = os.waitpid(self.child.pid, 0)
        self._ended.set()
        self._pump_thread.join(_SETTLE_S)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            code = 128 - code if self._unreported_code is None else self._unreported_code
        return (self._first_failure or code) if code else 0

    @property
    def is_unreached(self) -> bool:
        """Whether srun has ended as slurmctld did not answer it: no rank was started."""
        # A rank that calls srun itself may have written the line; its own failure follows.
        return self._was_unreached and self._first_failure is None

    @property
    def has_unreached_node(self) -> bool:
        """Whether srun has ended as a node did not answer it: not all ranks were started."""
        return self._launch_failed and self._first_failure in _ENDED_BY_SRUN

    @property
    def lacked_memory(self) -> bool:
        """Whether an error that names a lack of memory came shortly before the end."""
        at = self._lacked_memory_at
        return at is not None and time.monotonic() - at < _MEMORY_S

    def ends_within(self, seconds: float) -> bool:
        """Wait at most this long for another thread's `wait`; return whether the step has ended."""
        return self._ended.wait(seconds)

    def send(self, number: int) -> None:
        """Send srun a signal: it forwards USR1, USR2, HUP to all processes; TERM kills the step."""
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child.pid, number)

    def end_srun(self, code: int) -> None:
        """Kill srun, which was not told that its ranks have ended, with this exit code."""
        self._unreported_code = code
        self.send(signal.SIGKILL)

    def _pump(self) -> None:
        partial_line = b""
        while data := os.read(self.child.errors, 65536):
            with contextlib.suppress(OSError):
                _write_all(2, data)
            if self._first_failure is None:
                *lines, partial_line = (partial_line + data).split(b"\n")
                partial_line = partial_line[-4096:]
                for line in lines:
                    if is_lack_of_memory(line):
                        self._lacked_memory_at = time.monotonic()
                    self._first_failure = self._first_failure or failure_code(line)
                    self._was_unreached = self._was_unreached or is_unreached(line)
                    self._launch_failed = self._launch_failed or is_launch_failure(line)
        os.close(self.child.errors)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def failure_code(line: bytes) -> int | None:
    """Return the exit code in a line of srun about a failed task, None for all others.

    >>> failure_code(b"srun: error: g01: task 1: Exited with exit code 3")
    3
    >>> failure_code(b"srun: error: g02: tasks 2-3: Segmentation fault (core dumped)")
    139
    """
    if not line.startswith(_PREFIX):
        return None
    _, _, tasks = line.removeprefix(_PREFIX).partition(b": task")
    _, _, outcome = tasks.partition(b": ")
    exited, _, digits = outcome.strip().rpartition(b" ")
    if exited == b"Exited with exit code" and digits.isdigit():
        return int(digits)
    name = outcome.removesuffix(b" (core dumped)").strip().decode("ascii", "replace")
    return _SIGNALS.get(name)


def is_unreached(line: bytes) -> bool:
    """Return whether srun ends with this line as slurmctld did not answer it.

    >>> is_unreached(b"srun: error: Unable to confirm allocation for job 7: Connection refused")
    True
    >>> is_unreached(b"srun: error: Unable to confirm allocation for job 7: Invalid job id")
    False
    """
    error = line.removeprefix(_PREFIX)
    is_error = len(error) < len(line) and error.startswith(_NOT_STARTED)
    return is_error and any(reason in error for reason in _UNREACHABLE)


def is_launch_failure(line: bytes) -> bool:
    """Return whether srun ends with this line as a node did not answer it.

    >>> is_launch_failure(b"srun: error: Application launch failed: Invalid job credential")
    False
    >>> is_launch_failure(b"srun: error: Application launch failed: Communication shutdown failure")
    True
    """
    return line.startswith(_PREFIX + _LAUNCH_FAILED) and any(r in line for r in _UNREACHABLE)


_SIGNALS = {signal.strsignal(n) or "": 128 + n for n in signal.valid_signals() if n < 32}
