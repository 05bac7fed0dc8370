"""The steps of one start of the program: that of the base, and one in each companion.

They end together: when the ranks of one step fail, those of the others would wait for them without
end, and are killed after a short grace period. In that period the step that caused the failure can
still end: where ranks were killed from outside, other ranks may fail because of it before Slurm
reports the killed ones.

When the ranks of one step have ended with exit code 0, and the others run for long without a first
checkpoint, they are killed, too: a script may exit on a node with too few GPUs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

from slurm_elastic.job.launch import SrunProcess, log_line
from slurm_elastic.job.steps.step import Step

#: Seconds that sruns have to end after their ranks were killed, before they are killed themselves.
_SRUN_S = 5.0
#: Seconds in which Slurm reports killed ranks, after others have failed.
_OTHERS_S = 5.0
#: Seconds that ranks go on after those of another step have ended with 0 (our choice).
_ALONE_S = 120.0
#: Exit code of ranks that were killed from outside.
KILLED_CODE = 128 + signal.SIGKILL


class JointStep:
    """Steps of one start.

    Args:
        child: srun of the base.
        parts: (companion, its srun).
        end_ranks: kills the ranks of all steps, as soon as that may be done; gets a function that
            returns whether those of the base have ended.
        wait_in_vain: returns whether the other ranks, after a long time alone, may be killed.

    Attributes:
        failed_in: companion whose ranks were killed, or else the first to fail; None: those of the
            base, or none.
    """

    def __init__(
        self,
        child: SrunProcess,
        parts: Sequence[tuple[int, SrunProcess]] = (),
        *,
        end_ranks: Callable[[Callable[[], bool]], object] = lambda _: None,
        wait_in_vain: Callable[[], bool] = lambda: False,
    ) -> None:
        self.failed_in: int | None = None
        self._end_ranks, self._wait_in_vain = end_ranks, wait_in_vain
        self._is_given_up = False
        self._base = Step(child)
        self._parts = [(job_id, Step(srun)) for job_id, srun in parts]
        self._lock = threading.Lock()
        self._failed: int | None = None
        self._killed: set[int | None] = set()  # steps that were not over when all were ended
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, args=part, name=f"step of {part[0]}", daemon=True)
            for part in self._parts
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> int:
        """Wait for the end of all; return the exit code of the ranks that made it fail, or 0."""
        code = self._base.wait()
        self._note(None, code)
        for thread in self._threads:
            thread.join()
        self._ended.set()
        return self._failed or 0

    @property
    def is_unreached(self) -> bool:
        """Whether an srun has ended as it got no answer: from slurmctld, or from a node.

        From a node only without companions: else the others go on without that one.
        """
        return self.has_unreached_node or any(step.is_unreached for _, step in self._by_job)

    @property
    def lacked_memory(self) -> bool:
        """Whether a rank has shown that it ran out of memory."""
        return any(step.lacked_memory for _, step in self._by_job)

    @property
    def failed_in_companions(self) -> bool:
        """Whether ranks of companions have failed, and those of the base still ran then."""
        return self.failed_in is not None and None in self._killed

    @property
    def has_unreached_node(self) -> bool:
        """Whether a node did not answer the only srun."""
        return not self._parts and self._base.has_unreached_node

    def running(self) -> list[tuple[int | None, Step]]:
        """Return the steps whose srun runs, each with its companion's id; None: of the base."""
        return [(job_id, step) for job_id, step in self._by_job if not step.ends_within(0.0)]

    def ends_within(self, seconds: float) -> bool:
        """Wait at most this long for another thread's `wait`; return whether all have ended."""
        return self._ended.wait(seconds)

    def send(self, number: int) -> None:
        """Send all sruns a signal; see `Step.send`."""
        for _, step in self._by_job:
            step.send(number)

    def end(self) -> None:
        """Kill all ranks; then kill sruns that still run, such as that of a lost node."""
        with self._lock:
            self._killed |= {job_id for job_id, _ in self.running()}
        self._end_ranks(lambda: self._base.ends_within(0.0))
        for _, step in self._by_job:
            if not step.ends_within(_SRUN_S):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(step.child.pid, signal.SIGKILL)

    @property
    def _by_job(self) -> list[tuple[int | None, Step]]:
        return [(None, self._base), *self._parts]

    def _watch(self, job_id: int, step: Step) -> None:
        self._note(job_id, step.wait())

    def _note(self, job_id: int | None, code: int) -> None:
        """Take the end of one step; the first failure ends the others."""
        with self._lock:
            if self._is_given_up:
                return
            is_first = bool(code) and self._failed is None
            is_cause = code == KILLED_CODE != self._failed and job_id not in self._killed
            if is_first or is_cause:
                self._failed, self.failed_in = code, job_id
        if not self._parts:
            return
        if is_first:
            threading.Thread(target=self._end_others, name="end of ranks", daemon=True).start()
        elif code == 0:
            threading.Thread(target=self._watch_others, name="other ranks", daemon=True).start()

    def _watch_others(self) -> None:
        """Give up ranks that go on for long without those that have ended with 0."""
        if self._ended.wait(_ALONE_S) or self._failed is not None or not self._wait_in_vain():
            return
        with self._lock:
            if self._is_given_up:
                return
            self._is_given_up = True
        log_line(
            f"ranks have ended with exit code 0, the others have waited for them for {_ALONE_S:.0f}"
            " s without a checkpoint: they are ended, too"
        )
        self.end()

    def _end_others(self) -> None:
        """Kill the ranks that have not ended a moment after others have failed."""
        end = time.monotonic() + (0.0 if self._failed == KILLED_CODE else _OTHERS_S)
        for _, step in self._by_job:
            step.ends_within(max(0.0, end - time.monotonic()))
        self.end()
