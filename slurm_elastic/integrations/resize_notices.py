"""Notices of a resize, answered by all ranks after the same step.

Only rank 0 is connected to esrun. Each step it broadcasts whether a save is requested; the other
ranks read that a step later, when the broadcast is done, so that no rank waits for it. The save
then takes place after the same step everywhere, as saves of sharded models need.

esrun takes the checkpoint for complete by itself (`esrun --checkpoint`), answers the notice, and
the job is requeued. Rank 0 waits for that, so that no step is trained that would be lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from slurm_elastic.core.report import LEAST_STEPS
from slurm_elastic.integrations.batch_share import is_first_rank, log_line
from slurm_elastic.job.rank_socket import RankSocket
from slurm_elastic.training.measure.step_times import process_age

#: Longest wait for the end of a job that has saved. The other ranks wait for rank 0 in a
#: collective, which NCCL ends after 600 s by default.
WAIT_S = 300.0
#: Variable of an esrun that accepts reports of integrations; an older one handles any report as
#: one of `slurm_elastic.training`.
_REPORTS = "SLURM_ELASTIC_WORLD_SIZE"


class ResizeNotices:
    """Requests for a save, and reports, of one training; the same calls on all ranks.

    Args:
        device: for the broadcast: a GPU with NCCL, else the CPU.
        wait_s: longest wait after a save, in seconds.
        ended: returns whether the process is to end, which ends that wait: for frameworks that
            only note a SIGTERM.
    """

    def __init__(
        self,
        device: Any = "cpu",
        *,
        wait_s: float = WAIT_S,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self._link = (RankSocket.connect() if is_first_rank() else None) or RankSocket.offline()
        self._reports = _REPORTS in os.environ
        self._device = torch.device(device)
        self._wait_s, self._ended = wait_s, ended
        self._pending: tuple[Any, Any] | None = None
        self._answered: int | None = None
        self._requested: int | None = None
        self._next_report_at = 0.0
        self._timed_from: tuple[int, float] | None = None
        self._started = False

    def save_requested(self) -> bool:
        """Return whether to save now; to be called by all ranks after each step.

        With several ranks a request takes effect one step after it has reached rank 0.
        """
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return self._has_notice()
        agreed = self._agreed()
        # The save that is about to begin answers the present notice.
        flag = torch.tensor([int(not agreed and self._has_notice())], device=self._device)
        self._pending = (flag, dist.broadcast(flag, src=0, async_op=True))
        return agreed

    def _agreed(self) -> bool:
        if self._pending is None:
            return False
        flag, work = self._pending
        self._pending = None
        work.wait()
        return bool(flag.item())

    def _has_notice(self) -> bool:
        orders = self._link.orders()
        if orders.action != "notice" or orders.notice == self._answered:
            return False
        self._requested = orders.notice
        return True

    def saved(self, step: int) -> None:
        """Report a save of this step, and wait if a notice requests it; after each save."""
        self.report({"checkpoint_step": step})
        orders = self._link.orders()
        requested, self._requested = self._requested, None
        if requested is None or orders.action != "notice":
            return
        self._answered = orders.notice
        log_line(f"saved step {step}; waiting to be requeued or resumed")
        end = time.monotonic() + self._wait_s
        while self._link.connected and time.monotonic() < end and not self._ended():
            # Short: signal handlers run between two waits.
            if self._link.wait(0.1).action != "notice":
                break
        log_line(f"continues after step {step}")
        self._timed_from = None

    def trained(self, step: int, *, progress: float | None = None, **fields: Any) -> None:
        """Report a step that is done, as often as the orders of esrun require.

        Args:
            step: steps of the optimizer since the training began.
            progress: fraction of the training that is done, 0-1.
            fields: others of `slurm_elastic.core.report.Report`, such as `global_batch`.
        """
        now = time.monotonic()
        if self._timed_from is None or step <= self._timed_from[0]:
            self._timed_from = (step, now)
            if not self._started:
                self._started = True
                self.report({"step": step, "startup_s": process_age()})
            return
        if not self._link.connected or now < self._next_report_at:
            return
        self._next_report_at = now + self._link.orders().report_every_s
        measured: dict[str, Any] = {"step": step}
        steps, seconds = step - self._timed_from[0], now - self._timed_from[1]
        if steps >= LEAST_STEPS:  # fewer count with the next ones
            self._timed_from = (step, now)
            measured |= {"step_time_s": seconds / steps, "steps_measured": steps}
        known = {} if progress is None else {"progress": min(1.0, max(0.0, progress))}
        self.report(measured | known | fields)

    def report(self, fields: dict[str, Any]) -> None:
        """Report some fields at once."""
        if self._reports and self._link.connected:
            self._link.send({"kind": "script"} | fields)

    def close(self) -> None:
        """End the exchange; to be called by all ranks after the last step."""
        self._agreed()
        self._link.close()
