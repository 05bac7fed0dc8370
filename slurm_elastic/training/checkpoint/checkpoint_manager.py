"""Saving and restoring of a training run: contents and times of checkpoints.

The first checkpoint of a run is read back and compared with the live state bit
for bit; only then is the run `proven`, without which a controller does not
resize it. A run that has been restored is proven by that.

A periodic save may run in a thread while training continues (`background`): the
state is copied first, as the optimizer changes it in place, so training waits
for the copy only. The ranks that write exchange messages over a channel of that
thread and never collectively, so it needs no process group of its own and does
not interfere with the training's collectives. A process that ends at any time
leaves complete checkpoints only.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

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
from slurm_elastic.training.checkpoint.training_state import bits
from slurm_elastic.training.ranks.process_group import JOIN_S, RankGroup
from slurm_elastic.training.sampler import Cursor

#: An unproven run is saved this early, so that it can be resized.
FIRST_SAVE_S = 15.0
#: The first checkpoint after a restart comes later where a save takes long: after so many times
#: that.
_FIRST_SAVE_SHARE = 20.0
#: Seconds after which a wait without a timeout lets signal handlers run.
_POLL_S = 0.25


class CheckpointState(Protocol):
    """Live state of a run, as far as one rank holds it, as tensors by name."""

    def gather(self) -> dict[str, torch.Tensor]:
        """Return the tensors that this rank saves, the live ones, not copies."""

    def fits(self, shapes: Mapping[str, Sequence[int] | None]) -> None:
        """Compare with the shapes of a whole checkpoint, None where unknown."""

    def needs(self, names: Iterable[str]) -> list[str]:
        """Return those of a checkpoint's names that `restore` reads."""

    def restore(self, flat: Mapping[str, torch.Tensor]) -> None:
        """Restore the state in place."""


@dataclass(frozen=True)
class _Save:
    """Contents of one checkpoint, as far as this rank writes it."""

    step: int
    meta: dict[str, Any]
    pieces: list[TensorShard]


class _SavingThread(threading.Thread):
    """Thread that saves while training continues.

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
        except Exception as error:  # noqa: BLE001 - it would end with the thread
            self.error = CheckpointError(repr(error))
        # The copy is as large as the state itself.
        self.save = replace(self.save, pieces=[])


class CheckpointManager:
    """Checkpoints of a run, on one rank; all ranks restore, the writers save.

    Args:
        checkpoints: the directory.
        state: of this rank.
        rank_group: all ranks.
        every_s: seconds of training between two saves.
        identity: values that a checkpoint must share with this run, or the order of samples
            would change: {"samples": …, "order": …}.
        log: takes one line for the job's log.
        writers: the ranks that write: rank 0, and those that hold other parts.
        channel: between writers, for the thread that saves; None: one of `rank_group`.
        background: whether periodic saves run while training continues.
        patience_s: longest wait for one answer of another writer.

    Attributes:
        proven: whether a checkpoint of this run is known to be restorable.
        kept: functions that return JSON values for the manifest, by name. Rank 0's are saved.
        restored: these values of the restored checkpoint, by name, on all ranks.
    """

    def __init__(
        self,
        checkpoints: CheckpointDirectory,
        state: CheckpointState,
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
        self._saving: _SavingThread | None = None
        self.proven = False
        self.kept: dict[str, Callable[[], Any]] = {}
        self.restored: dict[str, Any] = {}
        self._step: int | None = None
        self._written = 0.0
        self._save_s: float | None = None
        # Before the first step is done nothing is due, unless every step is to be saved.
        self._due_at = math.inf if every_s > 0 else 0.0

    def restore(self, checkpoint: CompleteCheckpoint) -> Cursor:
        """Restore the state from a checkpoint of any layout.

        Raises:
            CheckpointError: it is of another training run.
        """
        meta = checkpoint.meta
        for name, value in self._identity.items():
            if meta.get(name) != value:
                raise CheckpointError(
                    f"{checkpoint.path}: {name} {meta.get(name)} is invalid: expected {value}, as"
                    " of this dataset and seed; choose another checkpoint_dir"
                )
        self._state.fits({name: checkpoint.shapes.get(name) for name in checkpoint.index})
        with checkpoint.open(self._state.needs(checkpoint.index)) as tensors:
            self._state.restore(tensors)
        self.proven = True
        self._step = checkpoint.step
        self._written = float(meta["written"])
        self._save_s = meta.get("checkpoint_s")
        self.restored = checkpoint.kept
        return Cursor(checkpoint.step, meta["epoch"], meta["consumed"])

    def begin(self) -> None:
        """Start the clock of periodic saves, after the first step."""
        # A companion's rank may have to save within seconds (`rescue`).
        if self._rank_group.rank == 0 or self._rank_group.companion:
            dcp_files.prepare()
        self._plan()
        if self._step is not None:  # restored
            self.save_soon()

    def save_soon(self) -> None:
        """Bring the next save forward: a change is done once there is a newer checkpoint."""
        wait = max(FIRST_SAVE_S, _FIRST_SAVE_SHARE * (self._save_s or 0.0))
        self._due_at = min(self._due_at, time.monotonic() + wait)

    def due(self) -> bool:
        """Return whether a periodic save is due; never while one runs."""
        self._check_background()
        return self._saving is None and time.monotonic() >= self._due_at

    def hurry(self) -> None:
        """Save after the next step if the run is not proven yet."""
        if not self.proven:
            self._due_at = 0.0

    def save(self, cursor: Cursor, *, wait: bool = True) -> bool:
        """Save the state after this step; called by all ranks, or by none.

        Ranks that do not write return at once. All writers return the same value.

        Args:
            cursor: of the step.
            wait: until it is saved. Else it may run in the background; a failure is then logged
                after a later step. The save that proves a run is always waited for.

        Returns:
            False: it failed, which has been logged; training continues.
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
                self._saving = _SavingThread(copy, self._write)
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

    def rescue(self, cursor: Cursor) -> bool:
        """Save from this rank alone, which holds everything, as rank 0 is lost.

        Returns:
            Whether this rank has saved; see `CheckpointDirectory.rescue`.

        Raises:
            CheckpointError: it has failed.
        """
        meta = self._meta(cursor) | {"kept": self._kept_values()}
        return self._checkpoints.rescue(cursor.step, parts(self._state.gather()), meta) is not None

    def settle(self) -> None:
        """Wait for the background save, if there is one."""
        while self._saving is not None:
            # Never without a timeout: see `RankGroup.join`.
            self._saving.join(_POLL_S)
            self._check_background()

    def report_fields(self) -> dict[str, Any]:
        """Return the checkpoint fields of a report.

        `checkpoint_s` is the duration of the last save that training waited for, as it will wait
        at the next notice; a background save does not count.
        """
        self._check_background()
        fields: dict[str, Any] = {"proven": self.proven}
        if self._step is not None:
            age = max(0.0, time.time() - self._written)
            fields |= {"checkpoint_step": self._step, "checkpoint_age_s": age}
            fields["checkpoint_s"] = self._save_s
        return fields

    def _collect(self, cursor: Cursor) -> _Save:
        """Return the present state, not copied."""
        meta = self._meta(cursor)
        try:
            if self._rank_group.rank == 0:
                meta["kept"] = self._kept_values()
            return _Save(cursor.step, meta, parts(self._state.gather()))
        except Exception as error:
            self._coordinator.fail(str(error) or repr(error))
            raise

    def _kept_values(self) -> dict[str, Any]:
        return {name: _plain(name, value()) for name, value in self.kept.items()}

    def _meta(self, cursor: Cursor) -> dict[str, Any]:
        return {
            **self._identity,
            "epoch": cursor.epoch,
            "consumed": cursor.consumed,
            "world": self._rank_group.size,
            "proven": self.proven,
            "checkpoint_s": self._save_s,
            "written": time.time(),
            "torch": str(torch.__version__),
        }

    def _copy(self, save: _Save) -> _Save | None:
        """Return a copy of the state; None: there is no memory for it."""
        try:
            return replace(save, pieces=dcp_files.copied(save.pieces))
        except RuntimeError as error:
            self._log(
                f"training waits for the save of step {save.step}, as copying the state failed"
                f" ({str(error).splitlines()[0]})"
            )
            return None

    def _write(self, save: _Save) -> bool:
        """Write with the other writers; return whether the checkpoint is to be read back."""
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
        """Compare the live state of every writer with the checkpoint."""
        try:
            own_differences = self._compare(save)
            if self._rank_group.rank:
                self._coordinator.send("proof", own_differences)
                self.proven = bool(self._coordinator.receive("proven")["proven"])
                return
            by_rank = self._coordinator.gather("proof", own_differences)
        except (CheckpointError, OSError, RuntimeError) as error:
            self._coordinator.fail(str(error))
            if self._rank_group.rank == 0:
                self._log(f"checkpoint of step {save.step} cannot be read back: {error}")
            return
        different = sorted({name for names in by_rank.values() for name in names})
        self.proven = not different
        self._coordinator.scatter("proven", {"proven": self.proven})
        if different:
            self._log(
                f"checkpoint of step {save.step} differs when read back:"
                f" {', '.join(different[:3])}; the job is not resized until one does not"
            )

    def _compare(self, save: _Save) -> list[str]:
        written = self._checkpoints.named(f"step_{save.step:08d}")
        own_names = written.written_by(self._rank_group.rank)
        live = {p.name: p for p in save.pieces if p.name in own_names or self._coordinator.alone}
        with written.open(own_names, cold=True) as read:
            return sorted(
                name
                for name in live.keys() | own_names
                if name not in live
                or name not in own_names
                or not same(live[name].tensor, live[name].of(read[name]))
            )

    def _check_background(self) -> None:
        """Record the result of a background save that has ended."""
        thread = self._saving
        if thread is None or thread.is_alive():
            return
        self._saving = None
        if thread.error is None:
            self._saved(thread.save)
        else:
            self._failed(thread.save.step, thread.error)

    def _saved(self, save: _Save) -> None:
        self._step, self._written = save.step, float(save.meta["written"])

    def _failed(self, step: int, error: CheckpointError) -> None:
        if self._rank_group.rank == 0:
            newest = (
                "there is none yet" if self._step is None else f"that of step {self._step} stays"
            )
            self._log(f"checkpoint of step {step} failed: {error}; {newest}, training continues")

    def _plan(self) -> None:
        wait = self._every_s if self.proven else min(FIRST_SAVE_S, self._every_s)
        self._due_at = time.monotonic() + wait


def _plain(name: str, value: Any) -> Any:
    """Return a copy of a JSON value."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} cannot be saved in the manifest: {error}") from None


def agree(checkpoints: CheckpointDirectory, rank_group: RankGroup) -> CompleteCheckpoint | None:
    """Return the newest checkpoint, the same on all ranks; None: there is none.

    Rank 0 chooses: on other nodes the file system may show an older state.
    """
    if rank_group.rank == 0:
        checkpoints.clean()
        newest = checkpoints.newest()
        rank_group.publish("restore", newest.path.name if newest else "")
        return newest
    name = rank_group.wait_for("restore", JOIN_S)
    return checkpoints.named(name) if name else None


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal in type, shape and every bit."""
    return bool(a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b)))
