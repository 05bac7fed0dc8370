"""Waiting for collectives of a group whose members may be lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.training.ranks import nccl_groups
from slurm_elastic.training.ranks.link_errors import link_errors

#: Time between two checks for an alarm during a wait; a collective that ends sooner costs nothing.
_SLICE = timedelta(seconds=0.1)
_POLL_S = 0.0005


class GroupBrokenError(SlurmElasticError):
    """A collective or message of a group that has lost a member; the survivors form another."""


@dataclass(frozen=True, slots=True)
class StartedCollective:
    """A collective under way, or the error with which it could not be started.

    Attributes:
        work: its handle.
        tensor: what it changes.
        operation: for the message of an error.
        error: None: it was started.
    """

    work: Any
    tensor: torch.Tensor
    operation: str
    error: RuntimeError | None = None


class GroupGuard:
    """Waits of one rank, which end when a member of the group is lost.

    Attributes:
        on: whether members may be lost without the end of the attempt.
        alarm: set from another thread: a member is lost, and all others know it.
        last_error: text of the last failure, or "".
    """

    def __init__(self) -> None:
        self.on = False
        self.alarm = threading.Event()
        self.last_error = ""
        self._abandoned: list[Any] = []

    def check(self) -> None:
        """Look for an alarm.

        Raises:
            GroupBrokenError: there is one.
        """
        if self.on and self.alarm.is_set():
            raise GroupBrokenError("a member of the group of ranks is lost")

    def run(
        self,
        begin: Callable[[], Any],
        tensor: torch.Tensor,
        operation: str,
        *,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run a collective and wait for its end.

        Args:
            begin: begins it, and returns its handle.
            tensor: what it changes; kept, if it is abandoned.
            operation: for the message of an error.
            given_up: whether to abandon it.

        Raises:
            GroupBrokenError: it has failed or is abandoned.
            LinkError: it has failed in a group that cannot lose members.
        """
        self.wait(self.start(begin, tensor, operation), given_up=given_up)

    def start(
        self, begin: Callable[[], Any], tensor: torch.Tensor, operation: str
    ) -> StartedCollective:
        """Start a collective, which `wait` must follow; a failure is raised by that.

        Args: as of `run`.
        """
        try:
            return StartedCollective(begin(), tensor, operation)
        except RuntimeError as error:
            return StartedCollective(None, tensor, operation, error)

    def wait(
        self, started: StartedCollective, *, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait for the end of a collective; arguments and errors as of `run`."""
        work, operation, error = started.work, started.operation, started.error
        if not self.on:
            with link_errors(operation):
                if error is not None:
                    raise error
                if started.tensor.device.type == "cuda" and nccl_groups.may_change():
                    # A failed one counts as completed, too; after that `wait` raises its error.
                    while not work.is_completed():
                        time.sleep(_POLL_S)
                work.wait()
            return
        if error is not None:
            raise self._broken(operation, error) from error
        while not self._ended(work, operation, gpu=started.tensor.device.type == "cuda"):
            if self.alarm.is_set() or given_up():
                self.abandon([started])
                raise GroupBrokenError(f"{operation} is given up, as a member is lost")

    def abandon(self, started: Iterable[StartedCollective]) -> None:
        """Keep collectives that may run for ever, and their memory, until the process ends."""
        self._abandoned += started

    def _ended(self, work: Any, operation: str, *, gpu: bool) -> bool:
        if gpu and not work.is_completed():
            time.sleep(_POLL_S)  # its `wait` does not wait for the GPU
            return False
        try:
            work.wait(_SLICE)
        except RuntimeError:
            if not work.is_completed():
                return False  # the time-out of `wait`
        try:
            work.wait()  # which may have passed just before the end
        except RuntimeError as error:
            self._abandoned.append(work)
            raise self._broken(operation, error) from error
        return True

    def _broken(self, operation: str, error: RuntimeError) -> GroupBrokenError:
        self.last_error = (str(error).strip().splitlines() or ["no reason given"])[0]
        return GroupBrokenError(f"{operation} failed: {self.last_error}")
