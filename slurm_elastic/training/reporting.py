"""What rank 0 tells esrun, and what it is told.

Without an esrun everything here is silence. Reports are sent at most every
`report_every_s` of the orders, except for those that somebody waits for.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from slurm_elastic.core.report import Orders, ReportError, profile_rows
from slurm_elastic.job.rank_socket import RankSocket
from slurm_elastic.training.measure.gradient_noise import GradientNoise
from slurm_elastic.training.measure.layer_profile import MeasuredLayers
from slurm_elastic.training.measure.step_times import StepTimer, peak_memory

#: How long a job waits, at its checkpoint, for somebody to end it or send it on. With a controller
#: that is a last resort: esrun sends the job on by itself when the controller falls silent.
_WAIT_CONTROLLED_S = 900.0
_WAIT_ALONE_S = 120.0
_CPU = torch.device("cpu")


class Reporter:
    """The voice of one rank; mute on all but rank 0.

    Args:
        rank, world_size: place among the ranks, and their number.
        global_batch: samples per step over all ranks.
        micro_batch: most samples through the model at once; None: a rank's whole share.
        application: what the script calls what it trains, or "".
        device: whose memory is told.
        mute: say nothing and hear nothing, on rank 0 as well.
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
        linked = rank == 0 and not mute
        self._link = (RankSocket.connect() if linked else None) or RankSocket.offline()
        self._next = 0.0
        self._answered: int | None = None
        self.timer = StepTimer()
        self.timer.on = not mute
        self.noise = GradientNoise(global_batch)
        self._device = device
        self._profile: dict[str, Any] = {}
        # The shares of ranks, and the micro-batches in them, differ by one sample at most or by
        # a rest: what models want is their mean.
        share = -(-global_batch // world_size)
        pieces = -(-share // micro_batch) if micro_batch else 1
        self._always: dict[str, Any] = {
            "kind": "library",
            "gpus": world_size,
            "nodes": int(os.environ.get("SLURM_STEP_NUM_NODES", "1")),
            "global_batch": global_batch,
            "micro_batch": -(-share // pieces),
            "accumulation": pieces - 1,
            "initial_batch": global_batch,
        }
        if micro_batch:
            self._always["max_micro_batch"] = micro_batch
        if application:
            self._always["application"] = application

    def started(self, *, startup_s: float, restore_s: float | None, step: int | None) -> None:
        """The first step of this attempt is done; `step` is the one it resumed from."""
        self._always |= {"startup_s": startup_s, "restore_s": restore_s, "resumed_from": step}
        self._send("starting")

    def set_fields(self, **fields: Any) -> None:
        """Say this, too, in every report from now on."""
        self._always |= fields

    def training(self, *, step: int, progress: float, checkpoint: dict[str, Any]) -> None:
        """One more step is done."""
        if time.monotonic() < self._next:
            return
        fields = {"step": step, "progress": progress} | checkpoint | self.noise.fields()
        fields |= self._measured() | self._profiled()
        self._next = time.monotonic() + self._link.orders().report_every_s
        self._send("training", **fields)

    def profile(self, measured: MeasuredLayers) -> str:
        """Tell this, once, with the next report of the training.

        Returns:
            Why it cannot be told, or "".
        """
        self._profile = {}
        if not self._link.connected:
            return ""
        try:
            rows = profile_rows(measured.rows())
        except ReportError as error:
            return f"the layer profile is not reported: it {error.reason}"
        self._profile = {"profile": rows, "profile_batch": measured.micro_batch}
        return ""

    def _measured(self) -> dict[str, Any]:
        taken = self.timer.take()
        if taken is None:
            return {}
        return {
            "step_time_s": taken.step_s,
            "steps_measured": taken.steps,
            "micro_step_s": taken.micro_step_s,
            "data_s": taken.data_s,
            "forward_s": taken.forward_s,
            "backward_s": taken.backward_s,
            "sync_s": taken.sync_s,
            "optimizer_s": taken.optimizer_s,
            "peak_memory_bytes": peak_memory(self._device),
        }

    def _profiled(self) -> dict[str, Any]:
        told, self._profile = self._profile, {}
        return told

    @property
    def connected(self) -> bool:
        """Whether an esrun listens."""
        return self._link.connected

    def orders(self, *, wait_s: float = 0.0) -> Orders:
        """The newest orders; the first ones of an attempt are waited for, at most so long."""
        return self._link.first(wait_s) if wait_s else self._link.orders()

    def notice(self) -> bool:
        """Whether esrun asks for a save that has not been answered yet."""
        orders = self._link.orders()
        return orders.action == "notice" and orders.notice != self._answered

    def rehearse(self) -> bool:
        """Whether a proven checkpoint is wanted soon."""
        return self._link.orders().action == "rehearse"

    def saving(self, *, step: int) -> None:
        """The save that the notice asks for begins."""
        orders = self._link.orders()
        self._answered = orders.notice if orders.action == "notice" else None
        self._send("saving", step=step, notice=self._answered)

    def saved(self, *, step: int, checkpoint: dict[str, Any]) -> None:
        """The save is done; the job waits."""
        self._send("saved", step=step, notice=self._answered, **checkpoint)

    def not_saved(self, *, step: int, checkpoint: dict[str, Any]) -> None:
        """The save failed; the job trains on and the notice stays unanswered."""
        self._send("training", step=step, notice=None, **checkpoint)

    def wait(self, *, step: int, checkpoint: dict[str, Any]) -> str:
        """Wait to be sent on; SIGTERM ends the process from within.

        Returns:
            Why the job goes on.
        """
        orders = self._link.orders()
        seen = orders.seq
        linked = self._link.controlled
        limit = _WAIT_CONTROLLED_S if linked else _WAIT_ALONE_S
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if self._link.connected:
                # Short: a signal is heard between two waits.
                orders = self._link.wait(0.1)
            else:
                time.sleep(0.1)
            if orders.action == "resume" and (orders.seq != seen or self._answered is not None):
                return orders.reason or "told to go on"
            if orders.action != "notice" and self._answered is not None:
                return orders.reason or "the notice is withdrawn"
            if orders.action == "notice" and orders.notice != self._answered:
                self._answered = orders.notice
                self.saved(step=step, checkpoint=checkpoint)
            if linked and not self._link.controlled:
                linked, end = False, time.monotonic() + _WAIT_ALONE_S
        return f"nobody ended it within {limit:.0f} s"

    def ended(self, *, step: int, progress: float, code: int, checkpoint: dict[str, Any]) -> None:
        """The training is over, for good or for this attempt."""
        self._send("ended", step=step, progress=progress, exit_code=code, **checkpoint)
        self._link.close()

    def _send(self, phase: str, **fields: Any) -> None:
        self._link.send({"phase": phase} | self._always | fields)
