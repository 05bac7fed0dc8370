"""Attempts of a job in a shape in which it may fail. Pure.

Our definition (docs/reliability-failed-changes.md). A *shape* is a GPU type and a number of GPUs.
An attempt of a job that had a checkpoint before is *on trial* until a checkpoint newer than all
before exists: then its shape has *worked*. An attempt that fails on trial is a failed change: its
shape is barred (`ShapeRecord`), no decision gives it to the job any more, and the job goes back.

A change in place begins a trial within the attempt. If that fails, the companions have ended with
it, and esrun starts the program again on the job's own GPUs: the next trial of the attempt.

>>> trials = ShapeTrials()
>>> trials.follow(0, Allocation.of("a100", {"n1": 1}), now=0.0)
>>> _ = trials.record(Report(job_id=7, run=0, phase="training", checkpoint_step=40), now=60.0)
>>> trials.follow(1, Allocation.of("a100", {"n1": 4}), now=70.0)
>>> trials.on, trials.shapes.last_shape
(True, ('a100', 1))
>>> trials.fail(Reason("program-failed", exit_code=1), now=75.0)
>>> [b.shape for b in trials.shapes.barred], trials.failures
([('a100', 4)], 1)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic.controller.state.trials.barred_shapes import (
    BarredShape,
    read_reason,
    shape_of,
)
from slurm_elastic.controller.state.trials.shape_record import ShapeRecord
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report

#: Multiple of the longest time between two checkpoints after which an attempt on trial has failed.
_INTERVALS = 4.0
#: Further factor on a GPU type on which the job has never trained, which may be slower.
_UNKNOWN_TYPE = 4.0
#: Seconds after which an attempt on trial has failed if no two checkpoints of the job were seen.
_UNKNOWN_S = 7200.0
#: Failed changes that are kept.
_MOST = 64


@dataclass(slots=True, kw_only=True)
class ShapeTrials:
    """Present attempt of a job, and what is known of those before. Times are epoch seconds.

    Attributes:
        run: restart count of the attempt; -1: none is followed.
        held: allocation of the attempt.
        since: when it was first seen.
        base: newest checkpoint before it; None: there is none.
        learning: whether `base` is to be taken from its first report: earlier ones were not seen.
        on: whether it is on trial.
        failure: how it failed on trial; None: it has not.
        step: its newest step.
        moved: when that last rose, or a checkpoint was completed.
        newest: newest checkpoint of all attempts.
        saved: when that was completed.
        interval_s: longest time between two checkpoints, or from a start to the first one.
        interval_gpu_s: the same times the GPUs held.
        shapes: those that worked, and those that it is not to get.
        failures: attempts in a row that failed on trial, since the newest checkpoint.
        ways_back: times that its way back was to be begun.
        changed_run, transition: attempt that a transition began or changed, and the id of that.
        restarts: start of the attempt that was the last to fail after a change in place.
        left: the shape in which that was, and how it failed, until the next checkpoint.
        doubted: transition on trial when a companion was lost; 0: none.
        failed: transitions that failed on trial, and how.
    """

    run: int = -1
    held: Allocation | None = None
    since: float = 0.0
    base: int | None = None
    learning: bool = False
    on: bool = False
    failure: Reason | None = None
    step: int | None = None
    moved: float = 0.0
    newest: int | None = None
    saved: float | None = None
    interval_s: float | None = None
    interval_gpu_s: float = 0.0
    shapes: ShapeRecord = field(default_factory=ShapeRecord)
    failures: int = 0
    ways_back: int = 0
    changed_run: int = -1
    transition: int = 0
    restarts: int = 0
    left: BarredShape | None = None
    doubted: int = 0
    failed: dict[int, Reason] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether a change began the attempt, or its shape is not the last that worked."""
        return self.changed_run == self.run or shape_of(self.held) != self.shapes.last_shape

    @property
    def on_half(self) -> bool:
        """Whether the attempt holds half of a GPU."""
        return self.held is not None and self.held.half

    def begun(self, run: int, transition: int) -> None:
        """Record the transition that began an attempt."""
        self.changed_run, self.transition = run, transition

    def follow(self, run: int, held: Allocation | None, *, now: float) -> None:
        """Follow a running attempt, if it is another one than before."""
        if run == self.run:
            self.held = self.held or held
            return
        known = self.run >= 0 or run == 0
        self.run, self.held, self.since, self.moved = run, held, now, now
        self.base, self.learning = self.newest, not known
        self.on = known and self.newest is not None
        self.failure = self.step = self.left = None
        self.ways_back, self.restarts, self.saved = 0, 0, now

    def regroup(self, report: Report, held: Allocation | None, *, now: float) -> None:
        """Follow a change in place of the attempt, once it trains on what it holds then.

        More GPUs, and a shape that has not worked, are on trial; a loss of companions is not.

        Args:
            report: the newest one, of this attempt.
            held: with its companions.
            now: epoch s.
        """
        known = held is not None and self.held is not None and held.gpus == report.gpus
        if not known or report.change is None or held == self.held or self.failure is not None:
            return
        assert held is not None
        assert self.held is not None
        grows, self.held = held.gpus > self.held.gpus, held
        if not grows and report.change == self.transition:
            self.doubted = self.transition if self.on else self.doubted
            return
        self.on = grows or shape_of(held) not in self.shapes.worked
        self.begun(self.run, report.change)
        self.base = _newest(self.newest, self.step, report.step)
        self.since = self.moved = now

    def fail_in_place(
        self, report: Report, own: Allocation, reason: Reason, *, now: float, bars: bool = True
    ) -> bool:
        """Record, once, that a start has failed after a change in place.

        Args:
            report: of an esrun that waits, with `failed_gpus`.
            own: what the job itself holds; its program is started again there, unless an attempt
                has failed since the newest checkpoint already.
            reason: how it failed.
            now: epoch s.
            bars: whether the job is not to get that shape again.

        Returns:
            Whether that is new.
        """
        start, gpus = report.failed_start or 0, report.failed_gpus or 0
        if self.failure is not None or start <= self.restarts:
            return False
        shape, again = (own.gpu_type, gpus), self.failures > 0
        if self.changed_run != self.run and report.change:
            self.begun(self.run, report.change)
        if again:
            self.held = own
            self.fail(reason, now=now)
            return True
        self._count_failure(reason)
        if bars and shape != shape_of(own):
            self.shapes.bar(shape, reason, now)
        self.restarts, self.left, self.held = start, BarredShape(*shape, reason, now), own
        self.on, self.step, self.base = True, None, _newest(self.newest, report.checkpoint_step)
        self.since = self.moved = now
        return True

    def lose_companions(self, own: Allocation | None, reason: Reason, *, now: float) -> None:
        """Follow a program that is started again on the job's own GPUs, in another plan.

        The size in which it failed is not barred: that plan may do there, too.

        Args:
            own: what the job itself holds.
            reason: how it failed.
            now: epoch s.
        """
        if self.changed_run == self.run and self.transition:
            self.failed[self.transition] = reason
        self.go_back(own, now=now)

    def go_back(self, held: Allocation | None, *, now: float) -> None:
        """Follow the program, which has failed, on other GPUs in the same attempt."""
        self.held, self.since, self.moved = held, now, now
        self.failure, self.step, self.base = None, None, self.newest
        self.on, self.ways_back, self.saved = self.newest is not None, 0, now

    def record(self, report: Report, *, now: float) -> bool:
        """Record a report of the present attempt; return whether a trial has ended."""
        if report.run != self.run:
            return False
        if report.step is not None and (self.step is None or report.step > self.step):
            self.step, self.moved = report.step, now
        saved = report.checkpoint_step
        self._learn_base(report)
        if saved is None or (self.base is not None and saved <= self.base):
            return False
        if self.newest is None or saved > self.newest or self.on:
            # A script counts its checkpoints: several, if reports were lost.
            before = max(self.newest or 0, self.base or 0)
            count = saved - before if report.kind == "script" else 1
            self._checkpoint(saved, now, count=max(count, 1))
        ended, self.on = self.on, False
        return ended

    def _learn_base(self, report: Report) -> None:
        """Set `base` from the attempt's own report of the checkpoints before it."""
        saved = report.checkpoint_step
        starting = report.kind == "script" and report.phase == "starting"
        starting = starting or report.failed_start is not None  # it has completed none
        if self.learning:
            self.learning = False
            self.base = self.newest = saved
        elif starting and (self.on or self.newest is None):
            self.base = saved  # its own count, which begins anew where its file was lost
        if self.on and report.kind == "library" and report.resumed_from is not None:
            self.base = max(report.resumed_from, self.base or 0)

    def _checkpoint(self, step: int, now: float, *, count: int) -> None:
        self.newest, self.failures, self.failure, self.left = step, 0, None, None
        held = self.held
        if self.saved is not None and now > self.saved:
            gap = (now - self.saved) / count
            self.interval_s = max(gap, self.interval_s or 0.0)
            self.interval_gpu_s = max(gap * (held.gpus if held else 0), self.interval_gpu_s)
        self.saved = self.moved = now
        if held is not None:
            self.shapes.record_work(held)

    def limit_s(self, least_s: float) -> float:
        """Return the seconds without progress after which an attempt on trial has failed."""
        gpu_type, gpus = shape_of(self.held) or ("", 0)
        if self.interval_s is None or not gpus:
            return max(least_s, _UNKNOWN_S)
        longest_s = max(self.interval_s, self.interval_gpu_s / gpus)
        known = any(t == gpu_type for t, _ in self.shapes.worked)
        return max(least_s, _INTERVALS * longest_s * (1.0 if known else _UNKNOWN_TYPE))

    def overdue(self, now: float, least_s: float) -> bool:
        """Return whether the attempt is on trial and has made no progress for too long.

        Args:
            now: epoch s; a clock that was set back begins the wait anew.
            least_s: `[resize] trial_s`; 0: never.
        """
        if not self.on or self.failure is not None or not least_s:
            return False
        self.moved = min(self.moved, now)
        return now - self.moved > self.limit_s(least_s)

    def pause(self, now: float) -> None:
        """Begin the wait for progress anew: the job is suspended."""
        self.moved = now

    def fail(self, reason: Reason, *, now: float, bars: bool = True) -> None:
        """Record, once, that the present attempt has failed.

        Args:
            reason: how.
            now: epoch s.
            bars: whether the job is not to get its shape again.
        """
        if self.failure is not None:
            return
        self.failure, self.on = reason, False
        self._count_failure(reason)
        if bars and (shape := shape_of(self.held)) is not None:
            self.shapes.bar(shape, reason, now, half=self.on_half)

    def _count_failure(self, reason: Reason) -> None:
        self.failures += 1
        if self.changed_run == self.run and self.transition:
            self.failed[self.transition] = reason
            self.failed = dict(list(self.failed.items())[-_MOST:])

    def judge_loss(self, reason: Reason | None) -> bool:
        """Record how a companion was lost, if a change in place was on trial then.

        Args:
            reason: why the change has failed, while the attempt trains on; None: it has not.

        Returns:
            Whether it has.
        """
        doubted, self.doubted = self.doubted, 0
        if reason is None or not doubted or self.left is not None or self.failure is not None:
            return False
        self.failed[doubted] = reason
        return True

    def withdraw_failure(self) -> None:
        """Remove the failure of the present attempt: one of its nodes was lost."""
        shape = shape_of(self.held)
        if self.failure is None and self.left is not None:
            shape = self.left.shape
        self.shapes.allow_again(shape, since=self.since, half=self.on_half)
        self.failures -= self.failure is not None or self.left is not None
        self.failure, self.on, self.left = None, self.newest is not None, None
        if self.changed_run == self.run:
            self.failed.pop(self.transition, None)

    def end(self) -> None:
        """Record that the job has ended, perhaps on trial."""
        if self.on and self.changed_run == self.run and self.transition:
            self.failed[self.transition] = Reason("job-ended")
        self.on = False

    def clear(self) -> None:
        """Remove the failures: the owner has changed the job."""
        self.shapes.clear()
        self.failures = 0

    def outcome(self, transition: int) -> str | Reason:
        """Return how a transition that was carried out has ended: `worked`, `trial`, or failed."""
        if transition in self.failed:
            return self.failed[transition]
        present = transition == self.transition and self.changed_run >= self.run
        return "trial" if present and (self.on or self.changed_run > self.run) else "worked"

    def restricted(self, directive: Directive, types: Iterable[str]) -> Directive:
        """Return a directive without the shapes that the job is not to get now.

        After a failure these are all that have not worked, until the job has made progress again.
        """
        return self.shapes.restricted(directive, types, only_worked=self.failures > 0)

    def to_body(self) -> dict[str, Any]:
        """Return JSON for the ledger."""
        body = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del body["shapes"]
        body["held"] = self.held.to_body() if self.held else None
        body["failure"] = self.failure.to_json() if self.failure else None
        body["left"] = self.left.to_json() if self.left else None
        body["failed"] = [[i, r.to_json()] for i, r in self.failed.items()]
        return {**body, **self.shapes.to_body()}

    @classmethod
    def from_body(cls, body: object) -> ShapeTrials:
        """Return the record from the ledger's JSON; unknown fields are ignored, {} if unreadable.

        A ledger of an older release has none.
        """
        names = {f.name for f in dataclasses.fields(cls)} - {"shapes"}
        values: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
        fields = {k: v for k, v in values.items() if k in names}
        try:
            left = fields.get("left")
            fields["held"] = Allocation.from_body(fields.get("held"))
            fields["left"] = BarredShape.from_json(left) if left else None
            fields["failure"] = Reason.from_json(fields.get("failure"))
            fields["failed"] = {int(i): read_reason(r) for i, r in fields.get("failed", ())}
            return cls(**fields, shapes=ShapeRecord.from_body(values))
        except (KeyError, TypeError, ValueError, AttributeError):
            return cls()


def program_failure(report: Report, trials: ShapeTrials) -> Reason | None:
    """Return the failure of a program for which esrun waits; None: the job ends with it.

    None if the job never had a checkpoint, if the controller did not change the attempt or its GPUs
    are not known, and for exit code 0 in a shape that worked: a script may have nothing left to do.
    One that has not even read its checkpoint when it was restarted for its rehearsal has failed.
    """
    if report.phase != "ended" or report.failed_start is None or report.exit_code is None:
        return None
    if report.failed_gpus is not None:
        return Reason("program-failed", exit_code=report.exit_code)
    if trials.newest is None and report.checkpoint_step is None and report.resumed_from is None:
        return None
    if shape_of(trials.held) is None:
        return None
    code, worked = report.exit_code, shape_of(trials.held) in trials.shapes.worked
    if code == 0:
        is_complete = worked and report.rehearsal != "failed"
        return None if is_complete or trials.shapes.last is None else Reason("program-ended")
    if trials.changed or trials.failures or report.failed_start > 1:
        return Reason("program-failed", exit_code=code)
    return None


def _newest(*steps: int | None) -> int | None:
    return max((step for step in steps if step is not None), default=None)
