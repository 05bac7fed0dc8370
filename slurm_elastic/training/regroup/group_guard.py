"""Waiting for collectives of a group whose members may be lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.training.pipeline.stage_links import link_errors

#: How often a wait looks for an alarm; a collective that ends sooner costs nothing.
_SLICE = timedelta(seconds=0.1)
_POLL_S = 0.0005


class GroupBrokenError(SlurmElasticError):
    """A collective or message of a group that has lost a member; the survivors form another."""


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
        if not self.on:
            with link_errors(operation):
                begin().wait()
            return
        try:
            work = begin()
        except RuntimeError as error:
            raise self._broken(operation, error) from error
        while not self._ended(work, operation, gpu=tensor.device.type == "cuda"):
            if self.alarm.is_set() or given_up():
                self._abandoned.append((work, tensor))
                raise GroupBrokenError(f"{operation} is given up, as a member is lost")

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
