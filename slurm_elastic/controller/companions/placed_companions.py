"""Companions that the controller has placed for one job, and failed changes in place.

Part of the job's record in the ledger. Only companions listed here, or of a change under way, count
for their base (docs/adr/0018-in-place-changes.md). Times are epoch seconds.

>>> placed = PlacedCompanions()
>>> placed.switch(0, joined=[41, 42], left=[])
>>> placed.switch(0, joined=[43], left=[41])
>>> sorted(placed.of(0)), sorted(placed.of(1))
([42, 43], [])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic.core.reason import Reason
from slurm_elastic.core.resize_kind import ResizeKind

#: Seconds in which a job is not changed in place again after a change in place has failed, and
#: the longest such time after several failures in a row (our choice).
_BARRED_S, _MOST_BARRED_S = 600.0, 86400.0


@dataclass(slots=True)
class PlacedCompanions:
    """Companions of one attempt of a job.

    Attributes:
        run: restart count of the attempt.
        job_ids: of its companions.
        pause_s: for how long training stood still in the last change in place; None: not known.
        changes: changes in place in the job's life.
        failures: changes in place in a row that failed.
        barred_until: until then the job is not changed in place.
        problem: how the last one failed; None: it did not.
        only_in_place: whether restarts of all ranks are not barred by that.
        restart_s: seconds without training of the last restart of all ranks; None: not known.
        failed_shape: GPU type and number of GPUs with which the program failed in companions only,
            until a requeue has shown whether companions are the cause; None: none.
        unsuitable: whether it worked then, so that companions are the cause.
    """

    run: int = -1
    job_ids: list[int] = field(default_factory=list)
    pause_s: float | None = None
    changes: int = 0
    failures: int = 0
    barred_until: float = 0.0
    problem: Reason | None = None
    only_in_place: bool = False
    restart_s: float | None = None
    failed_shape: tuple[str, int] | None = None
    unsuitable: bool = False

    def of(self, run: int) -> frozenset[int]:
        """Return the companions of an attempt."""
        return frozenset(self.job_ids if run == self.run else ())

    def switch(self, run: int, *, joined: Iterable[int], left: Iterable[int]) -> None:
        """Record companions that have joined and left."""
        self.job_ids = sorted({*self.of(run), *joined}.difference(left))
        self.run = run

    def succeed(self, pause_s: float | None, *, kind: ResizeKind = ResizeKind.IN_PLACE) -> None:
        """Record a change that was carried out."""
        self.changes += kind is ResizeKind.IN_PLACE
        self.pause_s = self.pause_s if pause_s is None else pause_s
        if self.failed_shape is None:  # else it may be the way back to the job's own GPUs
            self._allow()

    def fail(self, problem: Reason, *, now: float, kind: ResizeKind = ResizeKind.IN_PLACE) -> None:
        """Record a change that failed: the job is changed by other kinds for some time."""
        self.failures += 1
        is_late = problem.code == "companions-not-joined"
        self.only_in_place = kind is ResizeKind.IN_PLACE and is_late
        self.barred_until = now + min(_BARRED_S * 4 ** (self.failures - 1), _MOST_BARRED_S)
        self.problem = problem

    def fail_program(self, shape: tuple[str, int], problem: Reason, *, now: float) -> None:
        """Record that the program failed in companions while the job's own ranks went on.

        The next change is a requeue, as what the batch script has prepared on its nodes, such as
        copies of data, may lack on others.
        """
        self.fail(problem, now=now, kind=ResizeKind.RESTART)
        self.failed_shape = shape

    def record_alone(self, shape: tuple[str, int], *, worked: bool) -> None:
        """Record whether the program worked in a shape without companions."""
        if shape != self.failed_shape:
            return
        self.failed_shape, self.unsuitable = None, worked
        if not worked:  # the shape was the cause
            self._allow()

    def clear(self) -> None:
        """Allow changes with companions again: the owner has changed the job."""
        self._allow()
        self.failed_shape, self.unsuitable = None, False

    def _allow(self) -> None:
        """Forget the failures in a row."""
        self.failures, self.barred_until, self.problem = 0, 0.0, None

    def barred(self, now: float, *, kind: ResizeKind = ResizeKind.IN_PLACE) -> Reason | None:
        """Return why the job is not changed in this way now, or None."""
        if self.unsuitable:
            return Reason("companions-unsuitable")
        if now >= self.barred_until or self.problem is None:
            return None
        if kind is ResizeKind.RESTART and self.only_in_place:
            return None
        return Reason("in-place-failed", reason=self.problem, until=self.barred_until)

    def to_body(self) -> dict[str, Any]:
        """Return JSON for the ledger."""
        problem = self.problem.to_json() if self.problem else None
        return {**dataclasses.asdict(self), "problem": problem}

    @classmethod
    def from_body(cls, body: Any) -> PlacedCompanions:
        """Return it from the ledger's JSON; unknown fields are ignored."""
        if not isinstance(body, Mapping):
            return cls()
        names = {f.name for f in dataclasses.fields(cls)}
        placed = cls(**{k: v for k, v in body.items() if k in names})
        placed.problem = Reason.from_json(body.get("problem"))
        if placed.failed_shape is not None:
            gpu_type, gpus = placed.failed_shape
            placed.failed_shape = (str(gpu_type), int(gpus))
        return placed
