"""Changes of the ranks of a training whose loop belongs to the script.

Ranks join and leave at a boundary between two steps, as in a training of `init`. Within a step the
script communicates by itself, so that the loss of a companion ends it with an error in the script.
Then rank 0 saves, if no update of that step has begun, and the ranks of the base exit: esrun starts
them again without that companion.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol

from slurm_elastic.job.rank_socket import JOIN_VARIABLE
from slurm_elastic.training.job_log import log_line
from slurm_elastic.training.ranks.control_group import ControlGroup
from slurm_elastic.training.ranks.group_guard import GroupBrokenError
from slurm_elastic.training.regroup.ddp_wrappers import watch_wrappers
from slurm_elastic.training.regroup.loss_restart import LossRestart
from slurm_elastic.training.regroup.regroup_leader import RegroupLeader
from slurm_elastic.training.regroup.regroup_member import RegroupMember
from slurm_elastic.training.regroup.regrouping import ChangingTraining, wait_for_arrival
from slurm_elastic.training.reporting import Reporter
from slurm_elastic.training.sampler import Cursor
from slurm_elastic.training.signals import Signals

#: Seconds within which a script has to notice, by an error, that a companion is lost. A network
#: that is cut without a message is never noticed.
_UNNOTICED_S = 60.0


class LoopTraining(ChangingTraining, Protocol):
    """One rank's part of a script's own loop."""

    @property
    def is_consistent(self) -> bool:
        """Whether the objects are as after the last step."""

    def obstacle(self) -> str:
        """Return the code of the reason why the ranks cannot change, or ""."""


class LoopChanges:
    """Part of one rank in the changes of a script's own loop.

    The constructor connects a rank that joins with rank 0, and takes its directive over.

    Args:
        control_group: all ranks.
        signals: a companion that gets SIGTERM leaves the training.
        enabled: whether the script lets its ranks change.

    Raises:
        RuntimeError: a rank that cannot join.
    """

    _training: LoopTraining
    _reporter: Reporter
    _save: Callable[[Cursor], bool]

    def __init__(self, control_group: ControlGroup, *, signals: Signals, enabled: bool) -> None:
        self._control_group, self._signals, self._enabled = control_group, signals, enabled
        self._regrouping: RegroupMember | RegroupLeader | None = None
        self._loss_restart: LossRestart | None = None
        self._joined = not control_group.companion
        if control_group.companion and not enabled:
            raise RuntimeError(
                f"{JOIN_VARIABLE}: {control_group.companion} is invalid: expected a loop whose"
                " ranks can change; pass in_place=True to ElasticLoop"
            )
        if enabled:
            watch_wrappers()
        if enabled and control_group.rank:
            self._regrouping = RegroupMember(control_group, signals=signals)
            if control_group.companion:
                self._regrouping.greet()

    def attach(
        self, training: LoopTraining, *, reporter: Reporter, save: Callable[[Cursor], bool]
    ) -> None:
        """Set the training that changes, and the function that saves it."""
        self._training, self._reporter, self._save = training, reporter, save
        if self._enabled and self._regrouping is None:
            self._regrouping = RegroupLeader(
                self._control_group, reporter=reporter, signals=self._signals
            )
        if self._regrouping is not None:
            self._loss_restart = LossRestart(
                self._control_group,
                self._regrouping,
                signals=self._signals,
                save=self._save_after_loss,
                unnoticed_s=_UNNOTICED_S,
            )

    def begin(self) -> None:
        """Prepare for changes, after the first step of an attempt."""
        if self._regrouping is None:
            if self._reporter.read_companions() is not None:
                self._reporter.send_group(can=False, why="own-loop")
            return
        if self._control_group.companion:
            return
        self._regrouping.attach(self._training, self._training.obstacle())
        self._regrouping.begin()
        self._watch()

    def join(self) -> bool:
        """Receive the state, on a rank that joins; return whether it has joined by this call."""
        if self._joined or self._regrouping is None:
            return False
        self._regrouping.attach(self._training, "")
        self._regrouping.join()
        self._joined = True
        self._confirm()
        self._watch()
        log_line(f"rank {self._regrouping.name} has joined after step {self._training.cursor.step}")
        return True

    def requested(self) -> float:
        """Return the number of the generation that this rank requests to continue in, or 0."""
        return self._regrouping.requested() if self._regrouping else 0.0

    def switch(self, number: int) -> None:
        """Continue in the next generation, at a boundary; a rank that leaves ends here."""
        assert self._loss_restart is not None
        self._loss_restart.switch(number, self._confirm)

    def close(self) -> None:
        """End all changes, as the training is complete."""
        if self._regrouping is not None:
            self._regrouping.close()

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Start the ranks again if a companion is lost; see the module."""
        try:
            yield
        except GroupBrokenError as error:
            self._restart()
            with self._signals.tolerate_ending_peers():
                raise RuntimeError(f"{error}; look for an error of another rank above") from error

    def _confirm(self) -> None:
        """Wait until all ranks have arrived: those that join may be lost while they receive."""
        assert self._regrouping is not None
        wait_for_arrival(self._regrouping, lambda: self._control_group.total([0.0]))

    def _watch(self) -> None:
        """From now on take note of the loss of a companion, also within a step."""
        if self._regrouping is None or self._regrouping.generation is None:
            return
        former_hook = sys.excepthook

        def restart(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            if isinstance(error, RuntimeError):
                self._restart()
            former_hook(kind, error, trace)

        sys.excepthook = restart
        assert self._loss_restart is not None
        self._loss_restart.watch()

    def _restart(self) -> None:
        if self._loss_restart is not None:
            self._loss_restart.restart()

    def _save_after_loss(self) -> str:
        step = self._training.cursor.step
        # On a GPU the sums of the last step may have failed.
        certain = self._training.is_consistent and self._control_group.device.type == "cpu"
        if certain and self._save(self._training.cursor):
            return f"saved step {step}"
        return "the newest checkpoint stays"
