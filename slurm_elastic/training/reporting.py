"""Reports of rank 0 to esrun, and the orders that come back.

Without an esrun nothing is sent or received. Reports are sent at most every
`report_every_s` of the orders, except for those that are waited for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from slurm_elastic.core.report import Orders
from slurm_elastic.core.report_fields import ReportError, profile_rows
from slurm_elastic.job.rank_socket import RankSocket
from slurm_elastic.training.measure.gradient_noise import GradientNoise
from slurm_elastic.training.measure.layer_profile import MeasuredLayers
from slurm_elastic.training.measure.memory_sizes import peak_memory
from slurm_elastic.training.measure.step_times import StepTimer

#: Seconds for which a job waits at its checkpoint to be ended or resumed. With a controller that is
#: a last resort: esrun itself resumes the job when the controller does not answer any more.
_WAIT_CONTROLLED_S = 900.0
_WAIT_ALONE_S = 120.0
#: Seconds for which a training that begins waits for esrun's first message, which says whether its
#: ranks may change (our choice: only reached if esrun has been stopped).
_FIRST_MESSAGE_S = 10.0
#: Fields of `share_fields`.
_DIVISION_OF_SHARE = ("micro_batch", "accumulation")
_CPU = torch.device("cpu")


def share_fields(global_batch: int, world_size: int, micro_batch: int | None) -> dict[str, int]:
    """Return the fields of a report about a rank's share of a step.

    The shares of ranks, and the micro-batches in them, may differ by a few samples: models take
    their mean.
    """
    share = -(-global_batch // world_size)
    micro_batches = -(-share // micro_batch) if micro_batch else 1
    return {"micro_batch": -(-share // micro_batches), "accumulation": micro_batches - 1}


class Reporter:
    """Connection of a training process to its esrun; on all ranks but 0 it does nothing.

    Args:
        rank, world_size: of this process, and number of ranks.
        global_batch: samples per step over all ranks.
        micro_batch: most samples through the model at once; None: a rank's whole share.
        application: the script's name of what it trains, or "".
        device: the device whose peak memory is reported.
        mute: send and receive nothing, on rank 0 as well.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        global_batch: int,
        micro_batch: int | None = None,
        application: str = "",
        device: torch.device = _CPU,
        mute: bool = False,
    ) -> None:
        connects = rank == 0 and not mute
        self._link = (RankSocket.connect() if connects else None) or RankSocket.offline()
        self._next_report_at = 0.0
        self._answered_notice: int | None = None
        self.timer = StepTimer()
        #: Bytes of a step that pass from a node to the next; None: not known.
        self.crossing_bytes: Callable[[], int | None] = lambda: None
        self.timer.on = not mute
        self.noise = GradientNoise(global_batch)
        self._device = device
        self._profile: dict[str, Any] = {}
        self._common_fields: dict[str, Any] = {
            "kind": "library",
            "gpus": world_size,
            "nodes": int(os.environ.get("SLURM_STEP_NUM_NODES", "1")),
            "global_batch": global_batch,
            "initial_batch": global_batch,
            **share_fields(global_batch, world_size, micro_batch),
        }
        if micro_batch:
            self._common_fields["max_micro_batch"] = micro_batch
        if application:
            self._common_fields["application"] = application

    def started(self, *, startup_s: float, restore_s: float | None, step: int | None) -> None:
        """Report that the first step of this attempt is done.

        Args:
            startup_s: from the start of the process on.
            restore_s: seconds that reading the checkpoint took; None: there was none.
            step: that of the checkpoint.
        """
        self._common_fields |= {
            "startup_s": startup_s,
            "restore_s": restore_s,
            "resumed_from": step,
        }
        self._send("starting")

    def announce(self, **fields: Any) -> None:
        """Add fields to every report, and tell esrun at once: the program may end before a step.

        It is no report: esrun adds the fields to its next one. How a rank divides its share is not
        among them, as the execution plan may change it.
        """
        self.set_fields(**fields)
        known = self._common_fields.items()
        self._link.send({n: value for n, value in known if n not in _DIVISION_OF_SHARE})

    def set_fields(self, **fields: Any) -> None:
        """Add fields to every report from now on."""
        self._common_fields |= fields

    def training(self, *, step: int, progress: float, checkpoint: dict[str, Any]) -> None:
        """Report a step that is done, if a report is due."""
        if time.monotonic() < self._next_report_at:
            return
        fields = {"step": step, "progress": progress} | checkpoint | self.noise.fields()
        fields |= self._measured() | self._profiled()
        self._next_report_at = time.monotonic() + self._link.orders().report_every_s
        self._send("training", **fields)

    def profile(self, measured: MeasuredLayers) -> str:
        """Send a layer profile, once, with the next report of the training.

        Returns:
            A line for the log if it cannot be sent, or "".
        """
        self._profile = {}
        if not self._link.connected:
            return ""
        try:
            rows = profile_rows(measured.rows())
        except ReportError as error:
            return f"the layer profile is not reported: it {error.reason}; training is not affected"
        self._profile = {"profile": rows, "profile_batch": measured.micro_batch}
        return ""

    def _measured(self) -> dict[str, Any]:
        times = self.timer.take()
        if times is None:
            return {}
        return {
            "exchange": self.timer.exchange,
            "exposed": self.timer.exposed,
            "exchange_s": self.timer.exchange_s,
            "step_time_s": times.step_s,
            "steps_measured": times.steps,
            "micro_step_s": times.micro_step_s,
            "data_s": times.data_s,
            "forward_s": times.forward_s,
            "backward_s": times.backward_s,
            "sync_s": times.sync_s,
            "optimizer_s": times.optimizer_s,
            "exchange_bytes": self.crossing_bytes(),
            "peak_memory_bytes": peak_memory(self._device),
        }

    def _profiled(self) -> dict[str, Any]:
        profile, self._profile = self._profile, {}
        return profile

    @property
    def connected(self) -> bool:
        """Whether there is an esrun."""
        return self._link.connected

    def orders(self, *, wait_s: float = 0.0) -> Orders:
        """Return the newest orders.

        Args:
            wait_s: seconds to wait at most for the first orders of an attempt.
        """
        return self._link.first(wait_s) if wait_s else self._link.orders()

    def read_orders(self) -> Orders:
        """Return the newest orders that esrun has, once its first message has come."""
        self.read_companions()
        return self._link.orders()

    @property
    def companions(self) -> dict[str, int] | None:
        """Desired companions and their ranks; None: of an esrun that cannot have any."""
        return self._link.companions

    def read_companions(self) -> dict[str, int] | None:
        """Return the newest `companions`, once esrun's first message has come."""
        return self._link.read_companions(_FIRST_MESSAGE_S)

    def send_group(self, **fields: Any) -> None:
        """Report about the group of ranks (`slurm_elastic.job.rank_socket`)."""
        self._link.send_group(fields)

    def notice(self) -> bool:
        """Return whether esrun requests a save that has not been answered yet."""
        orders = self._link.orders()
        return orders.action == "notice" and orders.notice != self._answered_notice

    def rehearse(self) -> bool:
        """Return whether esrun requests a first proven checkpoint."""
        return self._link.orders().action == "rehearse"

    def saving(self, *, step: int) -> None:
        """Report that the save which the notice requests begins."""
        orders = self._link.orders()
        self._answered_notice = orders.notice if orders.action == "notice" else None
        self._send("saving", step=step, notice=self._answered_notice)

    def saved(self, *, step: int, checkpoint: dict[str, Any]) -> None:
        """Report that the save is done and the job waits."""
        self._send("saved", step=step, notice=self._answered_notice, **checkpoint)

    def not_saved(self, *, step: int, checkpoint: dict[str, Any]) -> None:
        """Report that the save failed: training continues, the notice stays unanswered."""
        self._send("training", step=step, notice=None, **checkpoint)

    def wait(self, *, step: int, checkpoint: dict[str, Any]) -> str:
        """Wait until the job is to continue; SIGTERM ends the process meanwhile.

        Returns:
            Why it continues, for the log.
        """
        orders = self._link.orders()
        last_seq = orders.seq
        controlled = self._link.controlled
        limit = _WAIT_CONTROLLED_S if controlled else _WAIT_ALONE_S
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if self._link.connected:
                # Short: signal handlers run between two waits.
                orders = self._link.wait(0.1)
            else:
                time.sleep(0.1)
            if orders.action == "resume" and (
                orders.seq != last_seq or self._answered_notice is not None
            ):
                return orders.reason or "esrun ordered it"
            if orders.action != "notice" and self._answered_notice is not None:
                return orders.reason or "the notice is withdrawn"
            if orders.action == "notice" and orders.notice != self._answered_notice:
                self._answered_notice = orders.notice
                self.saved(step=step, checkpoint=checkpoint)
            if controlled and not self._link.controlled:
                controlled, end = False, time.monotonic() + _WAIT_ALONE_S
        return f"not requeued within {limit:.0f} s"

    def ended(self, *, step: int, progress: float, code: int, checkpoint: dict[str, Any]) -> None:
        """Report the end of the training or of this attempt, and disconnect."""
        self._send("ended", step=step, progress=progress, exit_code=code, **checkpoint)
        self._link.close()

    def _send(self, phase: str, **fields: Any) -> None:
        self._link.send({"phase": phase} | self._common_fields | fields)
