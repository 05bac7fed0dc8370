"""JSON of the controller's answers, but for usage and topology; docs/cli.md describes it.

Times are epoch seconds, durations seconds, `None` means not known. Fields are
only ever added: scripts may rely on every name here.
"""

from __future__ import annotations

from typing import Any, TypedDict

from slurm_elastic.rpc.program_answers import ProgramAnswer


class _ReasonAlways(TypedDict):
    code: str
    parameters: dict[str, Any]


class ReasonRow(_ReasonAlways, total=False):
    """A reason: a code of docs/reasons.md and its parameters; null stands for what is hidden.

    `selastic --json` adds `text`, the reason in words.
    """

    text: str


class PingAnswer(TypedDict):
    """`selastic ping`: `protocol` is the version of `rpc.protocol`, `uid` the caller's.

    `role`: alone, active or standby; `active`: address of the active controller, "" if unknown;
    `reader`: how it reads slurmctld, and why.
    """

    version: str
    protocol: int
    uid: int
    role: str
    active: str
    reader: str


class _OrdersAlways(TypedDict):
    seq: int
    action: str
    report_every_s: float
    reason: str
    layout: str
    directive: str
    in_place: bool


class MembersRow(TypedDict):
    """A change of a job's members; see `core.member_orders.MemberOrders`."""

    change: int
    join: list[int]
    gpu_type: str
    leave: list[int]
    deadline_s: float
    cancel: bool


class OrdersRow(_OrdersAlways, total=False):
    """Orders of one attempt of a job; see `core.report.Orders`."""

    notice: int
    deadline_s: float
    rehearsal: bool
    batch: int
    frozen: int
    failed_start: int
    on_failure: str
    members: MembersRow


class OrdersAnswer(TypedDict):
    """The answer to `report` and `orders`."""

    orders: OrdersRow


class CommandRow(TypedDict):
    """Whether a command was carried out for one job; `text`: its effect, or why not."""

    job_id: int
    display_id: str
    ok: bool
    text: str


class CommandAnswer(TypedDict):
    """`selastic hold`, `release`, `update`, and `teach`; `uid` is the caller's."""

    results: list[CommandRow]
    uid: int


class TextAnswer(TypedDict):
    """`selastic retire` and `reconfigure`."""

    text: str


class CopyAnswer(TypedDict):
    """Rows of the ledger for a controller that stands by; the next request names `since`.

    `version` of the ledger's schema; `rows` by table; `more`: another request gets more at once.
    """

    version: int
    rows: dict[str, list[dict[str, Any]]]
    since: dict[str, float]
    more: bool
    kept_since: float
    policy_state: dict[str, Any]


class CheckAnswer(TypedDict):
    """The running controller's part of `selastic check`.

    `slowest_save_s` and `slowest_job`: the longest checkpoint measured and its job's display id;
    `pyslurm`: version beside the controller, "" when missing; `reader`: how it reads slurmctld, and
    why; `account`: its Unix user;
    `problems`: what the controller reports of itself, one line each.
    """

    version: str
    mode: str
    account: str
    pyslurm: str
    reader: str
    slowest_save_s: float | None
    slowest_job: str
    problems: list[str]


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


class Place(TypedDict):
    """Nodes under one leaf switch ("" without a topology)."""

    switch: str
    nodes: list[str]


class GivingJob(TypedDict):
    """A job that gives GPUs to a waiting one; `in_s` None: not known."""

    job_id: int
    display_id: str
    in_s: float | None
    under_way: bool


class Waiting(TypedDict):
    """A wait; `leased`: the controller starts the job, `givers`: jobs that give GPUs to it."""

    gpus: int
    since: float
    slurm_reason: str
    kept: dict[str, int]
    kept_until: float | None
    givers: list[GivingJob]
    leased: bool
    begin_time: float | None


class JobRow(TypedDict):
    """One job of `status`."""

    job_id: int
    display_id: str
    name: str
    user: str
    partition: str
    state: str
    elastic: bool
    unmanaged_reason: ReasonRow | None
    held: bool
    stopped: ReasonRow | None
    gpus: int
    wants: str
    gpu_type: str
    where: list[Place]
    kind: str
    steps_per_s: float | None
    samples_per_s: float | None
    progress: float | None
    resizes: int
    transition: dict[str, Any] | None
    waiting: Waiting | None


class PartitionRow(TypedDict):
    """GPUs of one partition; `unavailable`: idle ones on nodes that are down or drained."""

    name: str
    gpus: int
    types: dict[str, int]
    elastic: int
    rigid: int
    idle: int
    unavailable: int
    waiting: int


class StatusAnswer(TypedDict):
    """`selastic status`."""

    time: float
    mode: str
    policy: str
    notes: list[ReasonRow]
    partitions: list[PartitionRow]
    jobs: list[JobRow]


class DecisionRow(TypedDict):
    """Decision of the last round for one job."""

    action: str
    gpus: int
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
    """A shape in which a job failed after a change: no decision gives it to the job any more."""

    gpu_type: str
    gpus: int
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


class ExchangeRow(TypedDict):
    """How the replicas of a job exchange gradients; see `core.report`."""

    schedule: str
    exposed: float | None


class ExplainAnswer(TypedDict):
    """`selastic explain`. `ended`: null for a job that has not ended.

    `exchange`: null where nothing but the exchange after the backward pass is chosen.
    `on_trial`: since when the attempt lacks a checkpoint newer than the last change; null: it has
    one. `failed`: why the job goes back to where it worked.
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
    companions: list[CompanionPlaceRow]
    not_in_place: ReasonRow | None
    submitted_gpus: int
    decision: DecisionRow | None
    model: ModelRow | None
    batch: BatchRow | None
    exchange: ExchangeRow | None
    next_round: float | None
    last: ChangeRow | None
    ended: EndingRow | None


class RunningRow(TypedDict):
    """State of the present attempt of a job, as last reported; see `core.report`."""

    layout: str
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
