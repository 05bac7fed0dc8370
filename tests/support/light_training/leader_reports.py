"""Reports and checkpoints of rank 0 of a light training."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from slurm_elastic.job.rank_socket import RankSocket
from tests.support.light_training.light_rank import JOIN_S, Rank, Samples

#: The first save of an unproven or restored run, as in the library, and the wait for first orders.
_FIRST_SAVE_S = 15.0
#: Of a checkpoint, so that a full disk refuses it.
_PADDING = "w" * 65536


class LeaderReports:
    """What rank 0 says to esrun, and the orders that it gets.

    Args:
        data: of the training.
        size: number of ranks.
    """

    def __init__(self, data: Samples, size: int) -> None:
        self.link = RankSocket.connect() or RankSocket.offline()
        self.link.first(_FIRST_SAVE_S)
        self._steps = data.steps
        self._begun = self._times_from = time.monotonic()
        self._next_at, self._timed = 0.0, 0
        self._answered: int | None = None
        self._common: dict[str, Any] = {
            "kind": "library",
            "plan": "",
            "nodes": int(os.environ.get("SLURM_STEP_NUM_NODES", "1")),
            "global_batch": data.batch,
            "initial_batch": data.batch,
        }
        self.resize(size)

    def resize(self, size: int) -> None:
        """Follow the number of ranks."""
        share = -(-self._common["global_batch"] // size)
        self._common |= {"gpus": size, "layout": f"{size}x1", "micro_batch": share}
        self._common["accumulation"] = 0

    def started(self, resumed_from: int | None) -> None:
        """Report the first step of an attempt."""
        startup_s = time.monotonic() - self._begun
        restore_s = None if resumed_from is None else 0.0
        self._common |= {"startup_s": startup_s, "restore_s": restore_s}
        self.say("starting", resumed_from=resumed_from)
        self._common["resumed_from"] = resumed_from

    def say(self, phase: str, step: int | None = None, **fields: Any) -> None:
        """Report."""
        if step is not None:
            fields |= {"step": step}
            if phase in ("training", "ended"):
                fields["progress"] = step / self._steps
        self.link.send({"phase": phase} | self._common | fields)

    def training(self, step: int, checkpoint: dict[str, Any]) -> None:
        """Report a step, if a report is due."""
        now, self._timed = time.monotonic(), self._timed + 1
        if now < self._next_at:
            return
        measured = {
            "step_time_s": (now - self._times_from) / self._timed,
            "steps_measured": self._timed,
        }
        self._times_from, self._timed = now, 0
        self._next_at = now + self.link.orders().report_every_s
        self.say("training", step, **checkpoint, **measured)

    def notice(self) -> bool:
        """Return whether esrun requests a save that is not answered yet."""
        orders = self.link.orders()
        return orders.action == "notice" and orders.notice != self._answered

    def saving(self, step: int) -> None:
        """Report that the save for the notice begins."""
        orders = self.link.orders()
        self._answered = orders.notice if orders.action == "notice" else None
        self.say("saving", step, notice=self._answered)

    def wait_saved(self, step: int, checkpoint: dict[str, Any]) -> str:
        """Report that all is saved, and wait until training is to continue; return why."""
        self.say("saved", step, notice=self._answered, **checkpoint)
        seq = self.link.orders().seq
        while self.link.connected:
            orders = self.link.wait(0.1)
            if orders.action == "resume" and (orders.seq != seq or self._answered is not None):
                return orders.reason or "esrun ordered it"
            if orders.action != "notice" and self._answered is not None:
                return orders.reason or "the notice is withdrawn"
            if orders.action == "notice" and orders.notice != self._answered:
                self._answered = orders.notice
                self.say("saved", step, notice=self._answered, **checkpoint)
        time.sleep(JOIN_S)  # esrun has ended: so does the job
        return "esrun has ended"


class LightCheckpoint:
    """The checkpoint of a training: one file, renamed into place.

    Args:
        path: of the file.
        every_s: seconds between two saves.
    """

    def __init__(self, path: Path, every_s: float) -> None:
        self.path, self._every_s = path, every_s
        self.proven, self._written, self._save_s = False, 0.0, 0.0
        self._step: int | None = None
        self.due_at = float("inf")

    def restore(self) -> dict[str, int] | None:
        """Return the step and the sum that were saved last; None: nothing."""
        try:
            saved: dict[str, int] = json.loads(self.path.read_text())
        except FileNotFoundError:
            return None
        self.proven, self._step, self._written = True, saved["step"], self.path.stat().st_mtime
        return saved

    def plan(self) -> None:
        """Set the time of the next periodic save."""
        self.due_at = time.monotonic() + min(self._every_s, _FIRST_SAVE_S)

    def save(self, step: int, total: int) -> bool:
        """Save; return False if that fails, which is logged."""
        self.plan()
        if self._step == step:
            return True
        begun, new = time.monotonic(), self.path.with_name(".tmp." + self.path.name)
        state = {"step": step, "sum": total}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with new.open("w") as file:
                json.dump(state | {"padding": _PADDING}, file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path)
        except OSError as error:
            new.unlink(missing_ok=True)
            Rank.log(f"checkpoint of step {step} failed: {error}; training continues")
            return False
        self._step, self._written = step, time.time()
        self.proven, self._save_s = True, time.monotonic() - begun
        return True

    def fields(self) -> dict[str, Any]:
        """Return the fields of a report."""
        if self._step is None:
            return {"proven": self.proven}
        age_s = max(0.0, time.time() - self._written)
        newest = {"checkpoint_step": self._step, "checkpoint_age_s": age_s}
        return {"proven": self.proven, **newest, "checkpoint_s": self._save_s}
