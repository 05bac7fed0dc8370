"""JSON of answers about decisions: `explain`, `show`, `history` and `plan` (docs/cli-json.md).

Times are epoch seconds, durations seconds, `None` means not known. Fields are
only ever added: scripts may rely on every name here.
"""

from __future__ import annotations

from typing import Any, TypedDict

from slurm_elastic.rpc.answers import JobRow, Place, ReasonRow
from slurm_elastic.rpc.duration_answers import LengthRow
from slurm_elastic.rpc.program_answers import ProgramAnswer


class ChangeSeconds(TypedDict, total=False):
    """Seconds of the parts of a change; parts not measured are left out or None.

    `pause`: of a change in place, for how long training stood still.
    """

    checkpoint: float | None
    slurm: float | None
    startup: float | None
    restore: float | None
    pause: float | None
    total: float | None


class TypeRow(TypedDict):
    """One GPU type: `goodput` on as many GPUs as the job holds, in samples/s at its initial batch.

    `observed` counts the shapes it was measured in; 0: the goodput is an estimate from other
    types and earlier jobs. None: it cannot run so. `uncertainty` is the relative standard
    deviation of the goodput (docs/models.md), None: nothing was measured yet.
    """

    gpu_type: str
    gpus: int
    nodes: int
    goodput: float | None
    observed: int
    uncertainty: float | None


class ModelRow(TypedDict):
    """Input of the goodput models: batch in samples, noise scale in samples if measured.

    `sizes`: the next smaller and the next larger size on the GPU type that the job holds.
    """

    application: str
    job_class: str
    batch: int
    noise_scale: float | None
    observed: int
    types: list[TypeRow]
    sizes: list[TypeRow]


class DecisionRow(TypedDict):
    """Decision of the last round for one job.

    `half`: it gets half of one GPU; not from controllers before 0.2.0.
    """

    action: str
    gpus: int
    half: bool
    gpu_type: str
    where: list[Place]
    reason: ReasonRow | None
    why_not_more: ReasonRow | None
    why_not_fewer: ReasonRow | None
    why_here: ReasonRow | None
    waiting_for: ReasonRow | None
    gain: float
    cost_gpu_s: float
    payback_s: float | None


# `from` is a keyword.
ChangeRow = TypedDict(
    "ChangeRow",
    {
        "time": float,
        "job_id": int,
        "display_id": str,
        "action": str,
        "from": str,
        "to": str,
        "reason": ReasonRow | None,
        "state": str,
        "outcome": str,
        "kind": str,
        "seconds": ChangeSeconds,
        "total_s": float | None,
        "paid_back_s": float | None,
    },
)


class BatchRow(TypedDict):
    """A batch that may change: `present` as reported, `batch` as it shall be, in samples.

    `gain`: goodput at `batch` over that at `present`, less 1; 0 where nothing was predicted.
    """

    batch: int
    present: int
    least: int
    most: int
    gain: float
    reason: ReasonRow | None


class BarredRow(TypedDict):
    """A shape in which a job failed after a change: no decision gives it to the job any more.

    `half`: of one GPU, on whatever type; not from controllers before 0.2.0.
    """

    gpu_type: str
    gpus: int
    half: bool
    reason: ReasonRow | None


class EndingRow(TypedDict):
    """End of a job.

    `state`: Slurm's name of it, "" if that is not known; `exit_code`: 128 + n for signal n;
    `gpus`, `gpu_type`, `where`: its last allocation, 0 if none is recorded; `runs`: attempts that
    held GPUs; `changes`: made in its life; `reported`: whether it ever reported; `stopped`: why it
    was held because it made no progress, null: it was not.
    """

    state: str
    exit_code: int
    time: float | None
    gpus: int
    gpu_type: str
    where: list[Place]
    runs: int
    changes: int
    reported: bool
    stopped: ReasonRow | None


class CompanionPlaceRow(TypedDict):
    """A companion: a job that holds a part of another job's GPUs."""

    job_id: int
    gpus: int
    where: list[Place]


class NeighbourRow(TypedDict):
    """A job on the nodes of another one.

    `speed`: of the job beside it, relative to its speed alone; `other_speed`: of the neighbour.
    None: nothing is known. `error`: how much too high `speed` may be, with 90 % certainty;
    `measured`: measurements of this pair, 0: `speed` is predicted. `user` is null where
    PrivateData hides the owner. `resource`: `compute`, `memory`, `network` or `storage`, for which
    they contend as far as that is known; "": not known; not from controllers before 0.2.0.
    `same_gpu`: both have half of one GPU; not from controllers before 0.2.0.
    """

    job_id: int
    display_id: str
    user: str | None
    nodes: list[str]
    speed: float | None
    error: float
    measured: int
    other_speed: float | None
    resource: str
    same_gpu: bool


class ExchangeRow(TypedDict):
    """Exchange of gradients between the replicas of a job; see `core.report`."""

    schedule: str
    exposed: float | None


class PlanSpeedRow(TypedDict):
    """Measured speed of an execution plan; `plan` "": the job's own choice."""

    gpu_type: str
    gpus: int
    nodes: int
    plan: str
    samples_per_s: float


class OversizedPlanRow(TypedDict):
    """A plan that ran out of memory in one allocation; `plan` "": the job's own choice."""

    gpu_type: str
    gpus: int
    nodes: int
    plan: str


class PlansRow(TypedDict):
    """Plans that the controller tries for a job; `ordered` "": the job's own choice."""

    ordered: str
    measured: list[PlanSpeedRow]
    out_of_memory: list[OversizedPlanRow]


class ExplainAnswer(TypedDict):
    """`selastic explain`. `ended`: null for a job that has not ended.

    `exchange`: null where nothing but the exchange after the backward pass is chosen.
    `on_trial`: since when the attempt lacks a checkpoint newer than the last change; null: it has
    one. `failed`: why the job goes back to where it worked. `layout`: replicas, stages, spatial
    groups and options of the present attempt, as it reported them; "": it has not. `plans`: null
    unless the directive has `plan=auto`. `record_replaced`: others have written AdminComment; not
    from controllers before 0.2.0. `unmanaged_nodes`: nodes of its partitions that have GPUs of
    several types, or slices of GPUs; not from controllers before 0.2.0.
    """

    time: float
    mode: str
    job: JobRow
    since: float | None
    proven: bool
    unproven: ReasonRow | None
    reporting: bool
    checkpoint_s: float | None
    restart_s: float | None
    time_limit_s: int | None
    extended_s: int
    on_trial: float | None
    failed: ReasonRow | None
    barred: list[BarredRow]
    record_replaced: bool
    companions: list[CompanionPlaceRow]
    neighbours: list[NeighbourRow]
    unmanaged_nodes: list[str]
    not_in_place: ReasonRow | None
    submitted_gpus: int
    decision: DecisionRow | None
    model: ModelRow | None
    batch: BatchRow | None
    exchange: ExchangeRow | None
    layout: str
    plans: PlansRow | None
    next_round: float | None
    last: ChangeRow | None
    ended: EndingRow | None


class RunningRow(TypedDict):
    """State of the present attempt of a job, as last reported; see `core.report`."""

    layout: str
    plan: str
    micro_batches: int | None
    layers: int | None
    frozen: int | None
    certified: int | None
    penalty: float | None
    certified_penalty: float | None
    data_s: float | None
    forward_s: float | None
    backward_s: float | None
    sync_s: float | None
    optimizer_s: float | None
    peak_memory_bytes: int | None


class ShowAnswer(ExplainAnswer):
    """`selastic show job`: the fields of `explain`, and all measurements."""

    account: str
    qos: str
    directive: str
    override: str
    run: int
    submit_time: float
    start_time: float | None
    end_time: float | None
    step: int | None
    global_batch: int | None
    checkpoint_step: int | None
    measurements: list[dict[str, Any]]
    history: list[ChangeRow]
    ordered_layout: str
    ordered_batch: int | None
    ordered_frozen: int | None
    running: RunningRow | None
    profile_layers: int | None
    profile_batch: int | None
    profile: dict[str, Any] | None
    length: LengthRow | None


class HistoryAnswer(TypedDict):
    """`selastic history`; `kept_since` is the epoch s from which on changes are kept."""

    time: float
    kept_since: float
    changes: list[ChangeRow]


class PlanRow(DecisionRow):
    """One job of `selastic plan`."""

    job_id: int
    display_id: str
    name: str
    user: str
    from_gpus: int
    from_type: str
    from_where: list[Place]
    kind: str
    steps_per_s: float | None


class ClaimRow(TypedDict):
    """GPUs kept for a pending job."""

    job_id: int
    display_id: str
    gpus: dict[str, int]
    since: float
    until: float


class PlanAnswer(TypedDict):
    """`selastic plan`; `changes` are decisions to change an allocation, `stays` the others.

    `program` is the integer program of the round, if it was asked for, else None.
    """

    time: float
    planned: float | None
    mode: str
    policy: str
    changes: list[PlanRow]
    stays: list[PlanRow]
    claims: list[ClaimRow]
    notes: list[ReasonRow]
    program: ProgramAnswer | None
