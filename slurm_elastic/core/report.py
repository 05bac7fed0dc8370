"""Reports of a running job to the controller, and the orders in reply.

Both travel as JSON objects (`to_wire`, `from_wire`) over `slurm_elastic.rpc`. Standard library
only: this module is imported inside jobs.

A report is hostile input: `from_wire` checks the type and range of every field and raises
`ReportError` with the name of the field. A report can only affect the job that its sender owns.

>>> r = Report(job_id=7, run=0, phase="training", step=12, gpus=4, step_time_s=0.25)
>>> Report.from_wire(r.to_wire()) == r
True
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from slurm_elastic.core.directive_grammar import MAX_BYTES
from slurm_elastic.core.execution.execution_plan import ExecutionPlan, ExecutionPlanError
from slurm_elastic.core.execution.supported_options import (
    SupportedOptions,
    SupportedOptionsError,
)
from slurm_elastic.core.layout import LayoutText, LayoutTextError
from slurm_elastic.core.member_orders import (
    CHANGE_STATES,
    CompanionRow,
    MemberOrders,
    MemberOrdersError,
    companion_rows,
)
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.reasons.controller_codes import REHEARSAL_REFUSALS
from slurm_elastic.core.report_fields import (
    MAX_TEXT,
    ProfileRow,
    ReportError,
    change_reason,
    profile_rows,
)

#: Phases of one attempt, in order. `saved` acknowledges a notice: the job waits, at a checkpoint,
#: to be requeued or to continue.
PHASES = ("starting", "training", "saving", "saved", "ended")

#: `run`: nothing to do. `notice`: save, report `saved`, wait. `resume`: continue, the notice is
#: withdrawn. `rehearse`: of controllers of 0.1.0 only; save soon, nothing else.
ACTIONS = ("run", "notice", "resume", "rehearse")

#: State of the rehearsal of an unmodified script (docs/esrun-proven.md): "": none, or it is
#: proven; `able`: its checkpoint can be kept; `refuted`: it does not resume; `failed`: it failed
#: when restarted; the others: why its checkpoint cannot be kept.
REHEARSALS = ("", "able", "refuted", "failed", "accumulation", *REHEARSAL_REFUSALS)

#: `wait`: the controller takes the job back to where it worked. `restart`: the program is started
#: again on the GPUs of the job itself. `end`: end with the program's code.
ON_FAILURE = ("wait", "restart", "end")

#: Fewer steps than this are no measurement of their duration.
LEAST_STEPS = 3

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One message from esrun on behalf of its job.

    Attributes:
        job_id, run: raw job id and restart count of the attempt.
        phase: one of `PHASES`.
        kind: "library" (slurm_elastic.training) or "script" (esrun --checkpoint).
        gpus, gpu_type, nodes: allocation of this attempt; type "" if the job does not have it.
        step: global optimisation step, or for a script the count of complete checkpoints.
        progress: fraction done, 0-1; None if not known.
        step_time_s: median seconds per step in this shape since the last report that had one;
            None: fewer than `LEAST_STEPS` since then.
        steps_measured: number of steps in that median.
        global_batch: samples per optimisation step.
        micro_batch: samples that a rank computes at once.
        accumulation: micro-batches of a rank beyond the first in one step; 0 with stages.
        micro_batches: micro-batches of a replica in one pass through its stages, of which
            `micro_batch` is the sum then; None: no stages, or an older library.
        micro_step_s: one micro-batch without gradient synchronisation
            (docs/training-measurements.md), in this shape since the last report; with stages,
            one pass.
        grad_sqr, grad_var: squared norm of the gradient, and its variance at `initial_batch`.
        initial_batch: global batch that the training was begun with.
        max_micro_batch: most samples that a rank can compute at once.
        application: name of the training as the script states it; "": the job's name.
        checkpoint_step, checkpoint_age_s: newest complete checkpoint.
        checkpoint_s: seconds that training waited for the last save.
        startup_s: from process start to the first step of this attempt, restore included.
        restore_s: of that, loading the checkpoint.
        resumed_from: step this attempt resumed from; None when it started afresh.
        proven: a checkpoint has been written *and* read back by this job (our definition:
            docs/esrun-proven.md).
        rehearsal: one of `REHEARSALS`; "" of launchers before 0.2.0, too.
        kept_in: directory of the checkpoint that was kept for a rehearsal, or in which there is
            no room for it.
        kept_bytes: to be freed there.
        needed_micro_batches: `esrun --micro-batches` without which the script would resume wrongly
            on another number of ranks; 1: one batch cannot be shared. None: not known.
        notice: id of the notice being acknowledged (phases `saving` and `saved`).
        exit_code: of the child, in phase `ended`.
        failed_start: number, from 1 on, of the start in this attempt whose program has ended
            before it completed a checkpoint, while starts before had: esrun waits for orders.
        failed_gpus: on how many GPUs that start failed, if its members had changed since its
            newest checkpoint; those of the job itself where the new size did not cause it. None:
            its members had not changed.
        out_of_memory: whether a rank of that start has shown that it ran out of memory.
        failed_in_companions: whether ranks of companions failed in that start while those of the
            job itself went on.
        layout: replicas and stages of this attempt (`slurm_elastic.core.layout`); "" if not
            reported.
        plan: execution plan of this attempt, if one with options was ordered; else "".
        supported_options: parts of execution plans that the training can carry out
            (`slurm_elastic.core.execution.supported_options`); "": none, or not reported.
        layers, frozen: layers of the model, and how many from the front are frozen now.
        certified: how many may be frozen by the library's criteria.
        penalty, certified_penalty: fraction, 0-1, of useful progress lost at `frozen` and at
            `certified` layers.
        data_s, forward_s, backward_s, sync_s, optimizer_s: a step's parts, medians in seconds:
            waiting for data, the passes, waiting for other ranks, the optimizer.
        exchange: name of the schedule by which gradients are exchanged
            (`slurm_elastic.training.exchange`); "": as of old, after the backward pass.
        exposed: the part of the exchange that lengthens a step, above 1 where ranks also wait for
            slower ones; None: not measured.
        exchange_s: seconds that the exchange takes alone, without computation; None: not measured.
        peak_memory_bytes: largest memory use of a rank.
        weight_bytes: of all parameters of the model, divided or not.
        optimizer_bytes: of the whole state of its optimizer.
        gpu_bytes: memory of a GPU; None: the ranks have none.
        profile: each layer's costs in seconds and bytes for `profile_batch` samples, in the
            order of the model; () if not measured. Sent once per attempt.
        profile_batch: samples computed at once when `profile` was measured.
        jump: what a checkpoint shows to have jumped over a change of the world
            (docs/esrun-global-batch.md); "": nothing. Such a job is not resized any more.
        in_place: whether the training can change its members while it runs; None: not known yet.
        not_in_place: code of the reason why it cannot.
        restarts: whether esrun can start the ranks again on other companions, without a requeue.
        change, change_state, change_reason: last change of members that this esrun has answered,
            one of `CHANGE_STATES`, and the reason of its failure; None: none.
        companions: those of this run that have not ended, and those of the last change.
        generation: number of the process group that trains now.
        pause_s: for how long training stood still at the last change of members.
        busy_cpus: CPUs that the ranks on esrun's node kept busy since the last report, for each of
            their GPUs; None: not measured.
        read_bytes_s: bytes a second that these ranks have read from storage since then, for each
            of their GPUs; None: not measured.
        memory_bytes_s: bytes a second that these ranks have moved between memory and the last cache
            since then, for each of their GPUs; None: not measured (no counters).
        gpu_busy, gpu_memory_busy: part of the time since then in which the GPUs on that node
            computed, and their memory was read or written; None: not measured (no NVML).
        exchange_bytes: of a step, that the ranks of one node pass on to those of the next, where
            they stand on several; None: not known.
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
    micro_batches: int | None = None
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
    rehearsal: str = ""
    kept_in: str = ""
    kept_bytes: int | None = None
    needed_micro_batches: int | None = None
    notice: int | None = None
    exit_code: int | None = None
    failed_start: int | None = None
    failed_gpus: int | None = None
    out_of_memory: bool = False
    failed_in_companions: bool = False
    layout: str = ""
    plan: str = ""
    supported_options: str = ""
    layers: int | None = None
    frozen: int | None = None
    certified: int | None = None
    penalty: float | None = None
    certified_penalty: float | None = None
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    sync_s: float | None = None
    optimizer_s: float | None = None
    exchange: str = ""
    exposed: float | None = None
    exchange_s: float | None = None
    peak_memory_bytes: int | None = None
    weight_bytes: int | None = None
    optimizer_bytes: int | None = None
    gpu_bytes: int | None = None
    profile: tuple[ProfileRow, ...] = ()
    profile_batch: int | None = None
    jump: str = ""
    in_place: bool | None = None
    not_in_place: str = ""
    restarts: bool = False
    change: int | None = None
    change_state: str = ""
    change_reason: Reason | None = None
    companions: tuple[CompanionRow, ...] = ()
    generation: int | None = None
    pause_s: float | None = None
    busy_cpus: float | None = None
    read_bytes_s: float | None = None
    memory_bytes_s: float | None = None
    gpu_busy: float | None = None
    gpu_memory_busy: float | None = None
    exchange_bytes: int | None = None

    def to_wire(self) -> dict[str, Any]:
        """Return a JSON object without fields that are None, and without empty lists."""
        values = dataclasses.asdict(self)
        if self.change_reason is not None:
            values["change_reason"] = self.change_reason.to_json()
        return {k: v for k, v in values.items() if v is not None and v != ()}

    @classmethod
    def from_wire(cls, data: Any) -> Report:
        """Check and build. Unknown fields are ignored, so that newer launchers are understood."""
        if isinstance(data, dict) and data.get("change_problem"):  # a sentence of an older esrun
            data = {"change_reason": data["change_problem"], **data}
        report = _build(cls, data, REPORT_BOUNDS)
        if report.phase not in PHASES:
            raise ReportError(
                "phase", f"{report.phase!r} is invalid: expected one of {', '.join(PHASES)}"
            )
        if report.kind not in ("library", "script"):
            raise ReportError("kind", f"{report.kind!r} is neither library nor script")
        if report.rehearsal not in REHEARSALS:  # of a newer launcher
            report = dataclasses.replace(report, rehearsal="")
        if report.change_state not in CHANGE_STATES:
            report = dataclasses.replace(report, change_state="")
        return report


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The reply to a report or a long poll.

    Attributes:
        seq: rises whenever the orders of this job change; a poll names the last one received.
        action: one of `ACTIONS`.
        notice: id of the transition that requests a save; repeated in the acknowledgement.
        deadline_s: seconds, from the moment of sending, until the controller gives up waiting.
        rehearsal: the notice is for a rehearsal: keep the newest checkpoint before the answer.
        report_every_s: how often to report while training.
        reason: text for the job's log.
        reason_code: the same as code and parameters; None: there is none, or an older controller.
        layout: replicas and stages to run in (`slurm_elastic.core.layout`); "": the job's own
            choice. A layout for another number of ranks waits until the job has them.
        plan: execution plan of that layout, with options (`slurm_elastic.core.execution`); "":
            options are the job's own choice.
        batch: samples per optimisation step; None: the job's own choice.
        frozen: layers from the front to freeze, at most the certified; None: the job's own choice.
        directive: the directive in force if it is not the submitted one, else "".
        failed_start: start that `on_failure` is about, as in `Report`.
        on_failure: one of `ON_FAILURE`, for a program that has failed on trial; None: no answer.
        members: the change of members that is under way; None: none.
        in_place: whether changes of members may be ordered, and the program prepares for them.
    """

    seq: int = 0
    action: str = "run"
    notice: int | None = None
    deadline_s: float | None = None
    rehearsal: bool = False
    report_every_s: float = 10.0
    reason: str = ""
    reason_code: Reason | None = None
    layout: str = ""
    plan: str = ""
    batch: int | None = None
    frozen: int | None = None
    directive: str = ""
    failed_start: int | None = None
    on_failure: str | None = None
    members: MemberOrders | None = None
    in_place: bool = False

    def to_wire(self) -> dict[str, Any]:
        """Return a JSON object without fields that are None."""
        values = dataclasses.asdict(self)
        if self.reason_code is not None:
            values["reason_code"] = self.reason_code.to_json()
        return {k: v for k, v in values.items() if v is not None}

    @classmethod
    def from_wire(cls, data: Any) -> Orders:
        """Check and build; an unknown action is an error, because ignoring it could lose state."""
        orders = _build(cls, data, _ORDERS_BOUNDS)
        if orders.action not in ACTIONS:
            raise ReportError(
                "action", f"{orders.action!r} is invalid: expected one of {', '.join(ACTIONS)}"
            )
        if orders.on_failure not in (None, *ON_FAILURE):
            orders = dataclasses.replace(orders, on_failure=None)  # of a newer controller
        return orders


#: Largest accepted values; the smallest is 0.
REPORT_BOUNDS = {
    "job_id": 2**32 - 1,
    "run": 2**31,
    "gpus": 2**16,
    "nodes": 2**16,
    "step": 2**62,
    "steps_measured": 2**31,
    "global_batch": 2**31,
    "micro_batch": 2**31,
    "accumulation": 2**31,
    "micro_batches": 2**31,
    "initial_batch": 2**31,
    "max_micro_batch": 2**31,
    "checkpoint_step": 2**62,
    "resumed_from": 2**62,
    "kept_bytes": 2**62,
    "needed_micro_batches": 2**62,
    "notice": 2**62,
    "exit_code": 2**31,
    "failed_start": 2**31,
    "failed_gpus": 2**16,
    "progress": 1.0,
    "step_time_s": 1e6,
    "micro_step_s": 1e6,
    "grad_sqr": 1e30,
    "grad_var": 1e30,
    "checkpoint_age_s": 1e9,
    "checkpoint_s": 1e6,
    "startup_s": 1e6,
    "restore_s": 1e6,
    "layers": 2**20,
    "frozen": 2**20,
    "certified": 2**20,
    "penalty": 1.0,
    "certified_penalty": 1.0,
    "data_s": 1e6,
    "forward_s": 1e6,
    "backward_s": 1e6,
    "sync_s": 1e6,
    "optimizer_s": 1e6,
    "exposed": 1e6,
    "exchange_s": 1e6,
    "peak_memory_bytes": 2**50,
    "weight_bytes": 2**50,
    "optimizer_bytes": 2**50,
    "gpu_bytes": 2**50,
    "profile_batch": 2**31,
    "change": 2**62,
    "generation": 2**31,
    "pause_s": 1e6,
    "busy_cpus": 2**16,
    "read_bytes_s": 1e12,
    "memory_bytes_s": 1e13,
    "gpu_busy": 1.0,
    "gpu_memory_busy": 1.0,
    "exchange_bytes": 2**50,
}
_ORDERS_BOUNDS = {
    "seq": 2**62,
    "notice": 2**62,
    "deadline_s": 1e6,
    "report_every_s": 1e5,
    "batch": 2**31,
    "frozen": 2**20,
    "failed_start": 2**31,
}


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


#: Fields with texts of a form of their own.
_TEXTS: dict[str, Callable[[str], object]] = {
    "layout": LayoutText.parse,
    "plan": ExecutionPlan.parse,
    "supported_options": SupportedOptions.parse,
}
_READERS = {
    "profile": profile_rows,
    "change_reason": change_reason,
    "companions": companion_rows,
    "members": MemberOrders.from_wire,
    "reason_code": Reason.from_json,
}


def _checked(name: str, value: Any, kind: str, bounds: dict[str, float]) -> Any:
    if name in _READERS:
        try:
            return _READERS[name](value)
        except MemberOrdersError as error:
            raise ReportError(name, str(error)) from None
    if "str" in kind:
        most = MAX_BYTES if name == "directive" else MAX_TEXT
        if not isinstance(value, str) or len(value) > most or not value.isprintable():
            raise ReportError(name, f"must be printable text of at most {most} characters")
        if name in _TEXTS and value:
            try:
                _TEXTS[name](value)
            except (LayoutTextError, ExecutionPlanError, SupportedOptionsError) as error:
                raise ReportError(name, str(error)) from None
        return value
    if "bool" in kind:
        if not isinstance(value, bool):
            raise ReportError(name, "must be true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ReportError(name, "must be a number")
    if "int" in kind and not isinstance(value, int):
        raise ReportError(name, "must be a whole number")
    if not 0 <= value <= bounds[name]:  # nor is NaN; whole numbers may be too large for a float
        raise ReportError(name, f"{value!r:.40} is outside 0 to {bounds[name]:g}")
    return float(value) if "float" in kind else value
