"""JSON of the controller's answers: ping, orders, commands, check and status (docs/cli-json.md).

Times are epoch seconds, durations seconds, `None` means not known. Fields are
only ever added: scripts may rely on every name here.
"""

from __future__ import annotations

from typing import Any, TypedDict


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
    plan: str
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
    restart: str


class OrdersRow(_OrdersAlways, total=False):
    """Orders of one attempt of a job; see `core.report.Orders`."""

    reason_code: ReasonRow
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
    """Result of a command for one job; `text`: its effect, or the reason why it was refused."""

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
    sleeping_nodes: dict[str, Any]


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


class ProbableStart(TypedDict):
    """Start of a pending job (epoch s) that it reaches with 50 % and with 90 % probability."""

    median: float
    p90: float


class Waiting(TypedDict):
    """A wait; `leased`: the controller starts the job, `givers`: jobs that give GPUs to it.

    `boots`: nodes that are kept for it and have to boot. `starts`: when it will probably start,
    from predicted run times; null: they are switched off, or too little is known.
    """

    gpus: int
    since: float
    slurm_reason: str
    kept: dict[str, int]
    kept_until: float | None
    givers: list[GivingJob]
    boots: list[str]
    leased: bool
    begin_time: float | None
    starts: ProbableStart | None


class JobRow(TypedDict):
    """One job of `status`; `half`: it holds half of one GPU; not from controllers before 0.2.0."""

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
    half: bool
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
    """GPUs of one partition; `unavailable`: idle ones on nodes that are down or drained.

    `asleep`: idle ones on nodes that have to boot first. `unmanaged`: those of nodes with several
    types or with slices of GPUs, which are not part of `gpus`; not from controllers before 0.2.0.
    """

    name: str
    gpus: int
    types: dict[str, int]
    elastic: int
    rigid: int
    idle: int
    unavailable: int
    asleep: int
    unmanaged: int
    waiting: int


class StatusAnswer(TypedDict):
    """`selastic status`."""

    time: float
    mode: str
    policy: str
    notes: list[ReasonRow]
    partitions: list[PartitionRow]
    jobs: list[JobRow]
