"""What a running job tells the controller, and what it is told in return.

Both travel as JSON objects (`to_wire`, `from_wire`); the transport and its
munge seal are in `slurm_elastic.job`. Standard library only: this module is
imported inside jobs.

A report is hostile input: `from_wire` checks every field's type and range and
raises `ReportError` naming the field. What a report claims can only ever
affect the job that its sender owns.

>>> r = Report(job_id=7, run=0, phase="training", step=12, gpus=4, step_time_s=0.25)
>>> Report.from_wire(r.to_wire()) == r
True
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, TypeVar

#: Phases of one attempt, in order. `saved` acknowledges a notice and means that the job waits,
#: at a checkpoint, to be killed or told to go on.
PHASES = ("starting", "training", "saving", "saved", "ended")

#: `run`: nothing to do. `notice`: save, report `saved`, wait. `resume`: go on, the notice is
#: withdrawn. `rehearse`: after the next checkpoint restart in place once, to prove a resume.
ACTIONS = ("run", "notice", "resume", "rehearse")

_MAX_TEXT = 200

T = TypeVar("T")


class ReportError(ValueError):
    """A report or an order whose `field` is missing, of the wrong type or out of range."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"field {field}: {reason}")
        self.field = field
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One message from esrun on behalf of its job.

    Attributes:
        job_id, run: raw job id and restart count of the attempt.
        phase: one of `PHASES`.
        kind: "library" (slurm_elastic.training) or "script" (esrun --checkpoint).
        gpus, gpu_type, nodes: the world this attempt runs with; type "" if not known inside.
        step: global optimisation step, or for a script the count of complete checkpoints.
        progress: fraction done, 0-1, if the job knows.
        step_time_s: median seconds per step in this shape since the last report.
        steps_measured: steps behind that median.
        global_batch: samples per optimisation step.
        micro_batch: samples that a rank puts through the model at once.
        accumulation: micro-batches of a rank beyond the first in one step.
        micro_step_s: one micro-batch without gradient synchronisation (docs/training.md,
            "What is measured"), in this shape since the last report.
        grad_sqr, grad_var: squared norm of the gradient, and its variance at `initial_batch`.
        initial_batch: global batch that the training was begun with.
        max_micro_batch: most samples that a rank may put through the model at once.
        application: what the script calls what it trains; "" leaves it to the job's name.
        checkpoint_step, checkpoint_age_s: newest complete checkpoint.
        checkpoint_s: how long training stood still for the last save.
        startup_s: from process start to the first step of this attempt, restore included.
        restore_s: of that, loading the checkpoint.
        resumed_from: step this attempt resumed from; None when it started afresh.
        proven: a checkpoint has been written *and* read back by this job (our definition:
            docs/esrun.md).
        notice: id of the notice being acknowledged (phases `saving` and `saved`).
        exit_code: of the child, in phase `ended`.
    """

    job_id: int
    run: int
    phase: str
    kind: str = "library"
    gpus: int = 0
    gpu_type: str = ""
    nodes: int = 1
    step: int | None = None
    progress: float | None = None
    step_time_s: float | None = None
    steps_measured: int = 0
    global_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    micro_step_s: float | None = None
    grad_sqr: float | None = None
    grad_var: float | None = None
    initial_batch: int | None = None
    max_micro_batch: int | None = None
    application: str = ""
    checkpoint_step: int | None = None
    checkpoint_age_s: float | None = None
    checkpoint_s: float | None = None
    startup_s: float | None = None
    restore_s: float | None = None
    resumed_from: int | None = None
    proven: bool = False
    notice: int | None = None
    exit_code: int | None = None

    def to_wire(self) -> dict[str, Any]:
        """A JSON object; fields that are None are left out."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}

    @classmethod
    def from_wire(cls, data: Any) -> Report:
        """Check and build. Unknown fields are ignored, so that newer jobs can talk to us."""
        report = _build(cls, data, _REPORT_BOUNDS)
        if report.phase not in PHASES:
            raise ReportError("phase", f"{report.phase!r} is none of {', '.join(PHASES)}")
        if report.kind not in ("library", "script"):
            raise ReportError("kind", f"{report.kind!r} is neither library nor script")
        return report


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The answer to a report, and what a long poll waits for.

    Attributes:
        seq: rises whenever the orders of this job change; a poll names the last it has seen.
        action: one of `ACTIONS`.
        notice: id of the transition that asks for a save; repeated in the acknowledgement.
        deadline_s: seconds, from the moment of sending, until the controller gives up waiting.
        report_every_s: how often to report while training.
        reason: in words, for the job's log.
    """

    seq: int = 0
    action: str = "run"
    notice: int | None = None
    deadline_s: float | None = None
    report_every_s: float = 10.0
    reason: str = ""

    def to_wire(self) -> dict[str, Any]:
        """A JSON object; fields that are None are left out."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}

    @classmethod
    def from_wire(cls, data: Any) -> Orders:
        """Check and build; an unknown action is an error, because ignoring it may lose state."""
        orders = _build(cls, data, _ORDERS_BOUNDS)
        if orders.action not in ACTIONS:
            raise ReportError("action", f"{orders.action!r} is none of {', '.join(ACTIONS)}")
        return orders


#: Largest values believed; the smallest is 0 throughout.
_REPORT_BOUNDS = {
    "job_id": 2**32 - 1,
    "run": 2**31,
    "gpus": 2**16,
    "nodes": 2**16,
    "step": 2**62,
    "steps_measured": 2**31,
    "global_batch": 2**31,
    "micro_batch": 2**31,
    "accumulation": 2**31,
    "initial_batch": 2**31,
    "max_micro_batch": 2**31,
    "checkpoint_step": 2**62,
    "resumed_from": 2**62,
    "notice": 2**62,
    "exit_code": 2**31,
    "progress": 1.0,
    "step_time_s": 1e6,
    "micro_step_s": 1e6,
    "grad_sqr": 1e30,
    "grad_var": 1e30,
    "checkpoint_age_s": 1e9,
    "checkpoint_s": 1e6,
    "startup_s": 1e6,
    "restore_s": 1e6,
}
_ORDERS_BOUNDS = {"seq": 2**62, "notice": 2**62, "deadline_s": 1e6, "report_every_s": 1e5}


def _build(cls: type[T], data: Any, bounds: dict[str, float]) -> T:
    if not isinstance(data, dict):
        raise ReportError("(message)", "must be a JSON object")
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):  # type: ignore[arg-type]
        value = data.get(spec.name)
        if value is None:
            if spec.default is dataclasses.MISSING:
                raise ReportError(spec.name, "is missing")
            continue
        values[spec.name] = _checked(spec.name, value, str(spec.type), bounds)
    return cls(**values)


def _checked(name: str, value: Any, kind: str, bounds: dict[str, float]) -> Any:
    if "str" in kind:
        if not isinstance(value, str) or len(value) > _MAX_TEXT or not value.isprintable():
            raise ReportError(name, f"must be printable text of at most {_MAX_TEXT} characters")
        return value
    if "bool" in kind:
        if not isinstance(value, bool):
            raise ReportError(name, "must be true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ReportError(name, "must be a number")
    if "int" in kind and not isinstance(value, int):
        raise ReportError(name, "must be a whole number")
    if not math.isfinite(value) or not 0 <= value <= bounds[name]:
        raise ReportError(name, f"{value} is outside 0 to {bounds[name]:g}")
    return float(value) if "float" in kind else value
