"""Faults of ranks that join, leave or share a training, at chosen points of its execution."""

from __future__ import annotations

import os
import pkgutil
import signal
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic.training.exchange.gradient_reducer import Reducer
from slurm_elastic.training.ranks.group_guard import GroupBrokenError


@dataclass(kw_only=True)
class MemberFault:
    """Fault of one rank.

    Attributes:
        rank: as in its environment.
        function: name of a function of the library, "module:Class.function", before which it is
            killed; "": none.
        step: that it begins and does not end, as it is killed; 0: none.
        missed: step whose all-reduce this rank believes to have failed, though all others have its
            result; 0: none.
    """

    rank: int
    function: str = ""
    step: int = 0
    missed: int = 0
    _here: bool = field(default=False, init=False)
    _now: int = field(default=0, init=False)

    def prepare(self, rank: int) -> None:
        """Arm the fault, if this process is its rank."""
        self._here = rank == self.rank
        if self._here and self.function:
            owner, _, name = self.function.replace(":", ".").rpartition(".")
            setattr(pkgutil.resolve_name(owner), name, _die)
        if self._here and self.missed:
            reduce = Reducer.reduce

            def missing(reducer: Reducer, *arguments: Any) -> list[float]:
                sums = reduce(reducer, *arguments)
                if self._now == self.missed:
                    self.missed = 0
                    raise GroupBrokenError("the result of the all-reduce is missed")
                return sums

            Reducer.reduce = missing  # type: ignore[method-assign]

    def begin(self, step: int) -> None:
        """Note the begin of a step."""
        self._now = step
        if self._here and step == self.step:
            _die()


def _die(*_arguments: Any, **_options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
