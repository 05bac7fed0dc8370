"""Keeps a training run: what to save, when, and what to begin with.

The first checkpoint of a run is read back and compared with the live state bit
for bit; only then is the run `proven`, which is what a controller wants to
know before it takes a job's nodes away. A run that has been restored is proven
by that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from slurm_elastic.training import tensorfile
from slurm_elastic.training.checkpoint import Checkpoint, CheckpointError, Checkpoints
from slurm_elastic.training.parallel import JOIN_S, World
from slurm_elastic.training.sampler import Cursor
from slurm_elastic.training.state import State, bits

#: An unproven run is saved this early, so that it becomes movable.
FIRST_SAVE_S = 15.0


class Keeper:
    """Saves and restores; all ranks restore, rank 0 saves for all, as replicas are equal.

    Args:
        checkpoints: where.
        state: what.
        world: with whom.
        every_s: seconds of training between two saves.
        identity: what a checkpoint must have in common with this run, or the order of samples
            would change: {"samples": …, "order": …}.
        say: takes one line for the job's log.

    Attributes:
        proven: whether a checkpoint of this run is known to be restorable.
        freezing: gives what the manifest keeps of frozen layers; None: nothing.
        restored_freezing: what the checkpoint that was taken up had kept.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        state: State,
        world: World,
        *,
        every_s: float,
        identity: Mapping[str, int],
        say: Callable[[str], None],
    ) -> None:
        self._checkpoints = checkpoints
        self._state = state
        self._world = world
        self._every_s = every_s
        self._identity = dict(identity)
        self._say = say
        self.proven = False
        self.freezing: Callable[[], dict[str, Any]] | None = None
        self.restored_freezing: dict[str, Any] | None = None
        self._step: int | None = None
        self._written = 0.0
        self._save_s: float | None = None
        self._due_at = 0.0

    def restore(self) -> Cursor | None:
        """Take up the newest checkpoint; None if there is none.

        Raises:
            CheckpointError: it is of another training run.
        """
        found = self._agree()
        if found is None:
            return None
        for name, value in self._identity.items():
            if found.meta.get(name) != value:
                raise CheckpointError(
                    f"{found.path} was trained on other data: its {name} is"
                    f" {found.meta.get(name)}, now it is {value}; choose another checkpoint_dir"
                )
        self._state.restore(found.read())
        self.proven = True
        self._step = found.step
        self._written = float(found.meta["written"])
        self._save_s = found.meta.get("checkpoint_s")
        self.restored_freezing = found.meta.get("freezing")
        return Cursor(found.step, found.meta["epoch"], found.meta["consumed"])

    def _agree(self) -> Checkpoint | None:
        """Rank 0 chooses: another node may see an older state of the file system."""
        if self._world.rank == 0:
            self._checkpoints.clean()
            found = self._checkpoints.newest()
            self._world.tell("restore", found.path.name if found else "")
            return found
        name = self._world.hear("restore", JOIN_S)
        return self._checkpoints.named(name) if name else None

    def begin(self) -> None:
        """The first step is done; from now on time counts."""
        if self._world.rank == 0:
            tensorfile.prepare()
        self._plan()

    def due(self) -> bool:
        """Whether it is time for a periodic save."""
        return time.monotonic() >= self._due_at

    def hurry(self) -> None:
        """Save after the next step if that would prove the run."""
        if not self.proven:
            self._due_at = 0.0

    def save(self, cursor: Cursor) -> bool:
        """Save the state after this step; says so and returns False where that fails."""
        if self._step == cursor.step:
            return True
        begun = time.monotonic()
        now = time.time()
        meta: dict[str, Any] = {
            **self._identity,
            "epoch": cursor.epoch,
            "consumed": cursor.consumed,
            "world": self._world.size,
            "proven": self.proven,
            "checkpoint_s": self._save_s,
            "written": now,
            "torch": str(torch.__version__),
        }
        if self.freezing is not None:
            meta["freezing"] = self.freezing()
        try:
            tensors = self._state.gather()
            written = self._checkpoints.save(cursor.step, tensors, meta)
        except CheckpointError as error:
            stays = "none yet" if self._step is None else f"that of step {self._step} stays"
            self._say(f"no checkpoint at step {cursor.step}: {error}; {stays}, training goes on")
            self._plan()
            return False
        self._save_s = time.monotonic() - begun
        self._step, self._written = cursor.step, now
        if not self.proven:
            self._prove(written, tensors)
        self._plan()
        return True

    def facts(self) -> dict[str, Any]:
        """The fields of a report that are about checkpoints."""
        facts: dict[str, Any] = {"proven": self.proven}
        if self._step is not None:
            age = max(0.0, time.time() - self._written)
            facts |= {"checkpoint_step": self._step, "checkpoint_age_s": age}
            facts["checkpoint_s"] = self._save_s
        return facts

    def _prove(self, written: Checkpoint, live: Mapping[str, torch.Tensor]) -> None:
        try:
            wrong = differences(live, written.read_cold())
        except (CheckpointError, OSError, RuntimeError) as error:
            self._say(f"step {written.step} cannot be read back: {error}")
            return
        self.proven = not wrong
        if wrong:
            self._say(f"step {written.step} reads back differently: {', '.join(wrong[:3])}")

    def _plan(self) -> None:
        wait = self._every_s if self.proven else min(FIRST_SAVE_S, self._every_s)
        self._due_at = time.monotonic() + wait


def differences(live: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not the same, bit for bit."""
    return sorted(
        name
        for name in live.keys() | read.keys()
        if name not in live
        or name not in read
        or live[name].dtype != read[name].dtype
        or live[name].shape != read[name].shape
        or not torch.equal(bits(live[name]), bits(read[name]))
    )
