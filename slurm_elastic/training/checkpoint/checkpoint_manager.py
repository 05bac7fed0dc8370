"""Keeps a training run: what to save, when, and what to begin with.

The first checkpoint of a run is read back and compared with the live state bit
for bit; only then is the run `proven`, which is what a controller wants to
know before it takes a job's nodes away. A run that has been restored is proven
by that.

A periodic save may go on in a thread while training does (`background`): the
state is copied first, as the optimizer changes it in place, so training stands
still for the copy only. The ranks that write agree over a line of the thread's
own and never collectively, so no process group of its own is needed, and
nothing that the thread does can meet the training's collectives. A process
that ends leaves whole checkpoints only, whatever its thread was doing.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from slurm_elastic.training.checkpoint import dcp_files
from slurm_elastic.training.checkpoint.checkpoint_coordinator import (
    PATIENCE_S,
    CheckpointCoordinator,
    RankExchange,
)
from slurm_elastic.training.checkpoint.checkpoint_directory import (
    CheckpointDirectory,
    CheckpointError,
    CompleteCheckpoint,
    parts,
)
from slurm_elastic.training.checkpoint.dcp_files import TensorShard
from slurm_elastic.training.checkpoint.training_state import TrainingState, bits
from slurm_elastic.training.parallel.process_group import JOIN_S, RankGroup
from slurm_elastic.training.sampler import Cursor

#: An unproven run is saved this early, so that it becomes movable.
FIRST_SAVE_S = 15.0
#: A wait without an end of its own looks for signals this often.
_POLL_S = 0.25


@dataclass(frozen=True)
class _Save:
    """What is to be written: after which step, and this rank's part of it."""

    step: int
    meta: dict[str, Any]
    pieces: list[TensorShard]


class _Background(threading.Thread):
    """A save that goes on while training does.

    Not a daemon: torch may abort a process that ends while a thread is inside of it.
    """

    def __init__(self, save: _Save, write: Callable[[_Save], Any]) -> None:
        super().__init__(name="checkpoint", daemon=False)
        self.save = save
        self.error: CheckpointError | None = None
        self._write = write

    def run(self) -> None:
        try:
            self._write(self.save)
        except CheckpointError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - it would be lost with the thread
            self.error = CheckpointError(repr(error))
        # The copy is as large as the state itself.
        self.save = replace(self.save, pieces=[])


class CheckpointManager:
    """Saves and restores; all ranks restore, the writers save.

    Args:
        checkpoints: where.
        state: what; of this rank.
        rank_group: with whom.
        every_s: seconds of training between two saves.
        identity: what a checkpoint must have in common with this run, or the order of samples
            would change: {"samples": …, "order": …}.
        log: takes one line for the job's log.
        writers: the ranks that write: rank 0, and those that hold what it does not.
        channel: from writer to writer, for the thread that saves; None: one of `rank_group`.
        background: whether periodic saves go on while training does.
        patience_s: longest wait for one answer of another writer.

    Attributes:
        proven: whether a checkpoint of this run is known to be restorable.
        kept: gives values for the manifest, by name: anything that JSON knows. Rank 0's count.
        restored: what the checkpoint that was taken up had kept, by name, on all ranks.
    """

    def __init__(
        self,
        checkpoints: CheckpointDirectory,
        state: TrainingState,
        rank_group: RankGroup,
        *,
        every_s: float,
        identity: Mapping[str, int],
        log: Callable[[str], None],
        writers: Sequence[int] = (0,),
        channel: RankExchange | None = None,
        background: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._checkpoints = checkpoints
        self._state = state
        self._rank_group = rank_group
        self._every_s = every_s
        self._identity = dict(identity)
        self._log = log
        self._coordinator = CheckpointCoordinator(
            rank=rank_group.rank,
            writers=writers,
            open_channel=rank_group.open_channel if channel is None else lambda: channel,
            patience_s=patience_s,
        )
        self._background = background
        self._saving: _Background | None = None
        self.proven = False
        self.kept: dict[str, Callable[[], Any]] = {}
        self.restored: dict[str, Any] = {}
        self._step: int | None = None
        self._written = 0.0
        self._save_s: float | None = None
        # Before the first step is done nothing is due, unless every step is to be saved.
        self._due_at = math.inf if every_s > 0 else 0.0

    def restore(self, found: CompleteCheckpoint) -> Cursor:
        """Take up a checkpoint, of whatever layout.

        Raises:
            CheckpointError: it is of another training run.
        """
        for name, value in self._identity.items():
            if found.meta.get(name) != value:
                raise CheckpointError(
                    f"{found.path} was trained on other data: its {name} is"
                    f" {found.meta.get(name)}, now it is {value}; choose another checkpoint_dir"
                )
        self._state.fits({name: found.shapes.get(name) for name in found.index})
        with found.open(self._state.needs(found.index)) as tensors:
            self._state.restore(tensors)
        self.proven = True
        self._step = found.step
        self._written = float(found.meta["written"])
        self._save_s = found.meta.get("checkpoint_s")
        self.restored = found.kept
        return Cursor(found.step, found.meta["epoch"], found.meta["consumed"])

    def begin(self) -> None:
        """The first step is done; from now on time counts."""
        if self._rank_group.rank == 0:
            dcp_files.prepare()
        self._plan()

    def due(self) -> bool:
        """Whether it is time for a periodic save; never while one goes on."""
        self._look()
        return self._saving is None and time.monotonic() >= self._due_at

    def hurry(self) -> None:
        """Save after the next step if that would prove the run."""
        if not self.proven:
            self._due_at = 0.0

    def save(self, cursor: Cursor, *, wait: bool = True) -> bool:
        """Save the state after this step; to be called by all ranks, or by none.

        Ranks that do not write return at once. The others return with the same answer.

        Args:
            cursor: of the step.
            wait: until it is saved. Without, it may go on while training does; what fails then is
                said after a later step. The save that proves a run is always waited for.

        Returns:
            False: it failed, and that has been said; training goes on.
        """
        if not self._coordinator.writes:
            return True
        self.settle()
        self._coordinator.begin()
        if self._rank_group.rank == 0 and self._step == cursor.step:
            self._coordinator.scatter("share", {"already": True})
            return True
        begun = time.monotonic()
        try:
            save = self._collect(cursor)
            copy = self._copy(save) if self._background and self.proven and not wait else None
            if copy is not None:
                self._saving = _Background(copy, self._write)
                self._saving.start()
            else:
                prove = self._write(save)
                self._save_s = time.monotonic() - begun
                self._saved(save)
                if prove:
                    self._prove(save)
        except CheckpointError as error:
            self._failed(cursor.step, error)
            return False
        finally:
            self._plan()
        return True

    def settle(self) -> None:
        """Wait for the save that goes on, if one does."""
        while self._saving is not None:
            # Never without a timeout: see `RankGroup.join`.
            self._saving.join(_POLL_S)
            self._look()

    def report_fields(self) -> dict[str, Any]:
        """The fields of a report that are about checkpoints.

        `checkpoint_s` is how long training stood still for the last save that it waited for: it
        tells what the next notice will cost, which a save in the background does not.
        """
        self._look()
        facts: dict[str, Any] = {"proven": self.proven}
        if self._step is not None:
            age = max(0.0, time.time() - self._written)
            facts |= {"checkpoint_step": self._step, "checkpoint_age_s": age}
            facts["checkpoint_s"] = self._save_s
        return facts

    def _collect(self, cursor: Cursor) -> _Save:
        """The state as it is now, not copied."""
        meta: dict[str, Any] = {
            **self._identity,
            "epoch": cursor.epoch,
            "consumed": cursor.consumed,
            "world": self._rank_group.size,
            "proven": self.proven,
            "checkpoint_s": self._save_s,
            "written": time.time(),
            "torch": str(torch.__version__),
        }
        try:
            if self._rank_group.rank == 0:
                kept = {name: _plain(name, give()) for name, give in self.kept.items()}
                meta["kept"] = kept
            return _Save(cursor.step, meta, parts(self._state.gather()))
        except Exception as error:
            self._coordinator.fail(str(error) or repr(error))
            raise

    def _copy(self, save: _Save) -> _Save | None:
        """What no step changes any more; None: there is no memory for it."""
        try:
            return replace(save, pieces=dcp_files.copied(save.pieces))
        except RuntimeError as error:
            self._log(
                f"training waits for the save of step {save.step}, as its copy fails"
                f" ({str(error).splitlines()[0]})"
            )
            return None

    def _write(self, save: _Save) -> bool:
        """Write with the others; True if the run is to be proven by that."""
        try:
            if self._rank_group.rank == 0:
                prove = not save.meta["proven"]
                self._checkpoints.write(save.step, save.pieces, save.meta, self._coordinator)
                self._coordinator.scatter("outcome", {"prove": prove})
            else:
                joined = self._checkpoints.join(save.pieces, self._coordinator)
                prove = joined and bool(self._coordinator.receive("outcome")["prove"])
        except Exception as error:
            self._coordinator.fail(str(error) or repr(error))
            raise
        return prove

    def _prove(self, save: _Save) -> None:
        """Every writer compares what it holds with what can be read."""
        try:
            wrong = self._compare(save)
            if self._rank_group.rank:
                self._coordinator.send("proof", wrong)
                self.proven = bool(self._coordinator.receive("proven")["proven"])
                return
            found = self._coordinator.gather("proof", wrong)
        except (CheckpointError, OSError, RuntimeError) as error:
            self._coordinator.fail(str(error))
            if self._rank_group.rank == 0:
                self._log(f"step {save.step} cannot be read back: {error}")
            return
        different = sorted({name for names in found.values() for name in names})
        self.proven = not different
        self._coordinator.scatter("proven", {"proven": self.proven})
        if different:
            self._log(f"step {save.step} reads back differently: {', '.join(different[:3])}")

    def _compare(self, save: _Save) -> list[str]:
        written = self._checkpoints.named(f"step_{save.step:08d}")
        mine = written.written_by(self._rank_group.rank)
        live = {p.name: p for p in save.pieces if p.name in mine or self._coordinator.alone}
        with written.open(mine, cold=True) as read:
            return sorted(
                name
                for name in live.keys() | mine
                if name not in live
                or name not in mine
                or not same(live[name].tensor, live[name].of(read[name]))
            )

    def _look(self) -> None:
        """Take note of a save in the background that is over."""
        over = self._saving
        if over is None or over.is_alive():
            return
        self._saving = None
        if over.error is None:
            self._saved(over.save)
        else:
            self._failed(over.save.step, over.error)

    def _saved(self, save: _Save) -> None:
        self._step, self._written = save.step, float(save.meta["written"])

    def _failed(self, step: int, error: CheckpointError) -> None:
        if self._rank_group.rank == 0:
            stays = "none yet" if self._step is None else f"that of step {self._step} stays"
            self._log(f"no checkpoint at step {step}: {error}; {stays}, training goes on")

    def _plan(self) -> None:
        wait = self._every_s if self.proven else min(FIRST_SAVE_S, self._every_s)
        self._due_at = time.monotonic() + wait


def _plain(name: str, value: Any) -> Any:
    """A copy that stays as it is."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} cannot be kept in the manifest: {error}") from None


def agree(checkpoints: CheckpointDirectory, rank_group: RankGroup) -> CompleteCheckpoint | None:
    """The newest checkpoint, the same for all ranks; None: there is none.

    Rank 0 chooses: another node may see an older state of the file system.
    """
    if rank_group.rank == 0:
        checkpoints.clean()
        found = checkpoints.newest()
        rank_group.publish("restore", found.path.name if found else "")
        return found
    name = rank_group.wait_for("restore", JOIN_S)
    return checkpoints.named(name) if name else None


def differences(live: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not the same, bit for bit."""
    return sorted(
        name
        for name in live.keys() | read.keys()
        if name not in live or name not in read or not same(live[name], read[name])
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal in type, shape and every bit."""
    return bool(a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b)))
