"""Data that answers are made of: the controller's view, and rows of its ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from slurm_elastic.config.placement_settings import TopologySettings
from slurm_elastic.controller.batch_tuning import BatchChoice
from slurm_elastic.controller.neighbours.neighbour_learning import Neighbour
from slurm_elastic.controller.sleep.sleep_record import ObservedSleep
from slurm_elastic.controller.state.reported.layer_profiles import StoredProfile
from slurm_elastic.core.cluster import Job, Snapshot
from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.core.plan import JobRecord, Plan
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Orders, Report
from slurm_elastic.placement.starts.start_estimates import StartEstimate
from slurm_elastic.policies.milp.round_program import RoundProgram
from slurm_elastic.rpc.decision_answers import ChangeSeconds

#: Values of PrivateData in slurm.conf that are obeyed; orders go to the job's owner only.
PRIVATE = frozenset({"jobs", "usage", "nodes", "partitions"})


#: One change made (or given up), a row of the ledger. `from` is a keyword: functional form.
#: `from`/`to` are GPUs as shown to people ("4", "8 a100", "-"); `state` the state it ended in;
#: `kind` "requeue", "restart" (of the ranks) or "in-place";
#: `outcome` "trial" (no newer checkpoint yet), "done", "undone", "failed" or "" while it lasts;
#: `paid_back_s` seconds until the gain had paid the cost, None when unknown; `uid` the job's owner
#: (rows without one are shown to operators only where PrivateData=jobs).
HistoryRow = TypedDict(
    "HistoryRow",
    {
        "time": float,
        "job_id": int,
        "uid": int,
        "action": str,
        "from": str,
        "to": str,
        "reason": Reason,
        "state": str,
        "kind": str,
        "seconds": ChangeSeconds,
        "outcome": str,
        "paid_back_s": float | None,
    },
    total=False,
)


class TransitionRow(TypedDict, total=False):
    """One transition in flight; `target` is GPUs as shown to people, `since` epoch s."""

    id: int
    job_id: int
    state: str
    since: float
    target: str
    reason: Reason


class SegmentRow(TypedDict, total=False):
    """Time during which a job held one allocation; `end` None: the job still holds it.

    `seconds` as Slurm's accounting counts them, None: not known yet; `run`, the restart count;
    `base`, of a companion's segment: the job that it counts for, else `job_id`.
    """

    job_id: int
    base: int
    user: str
    uid: int
    gpu_type: str
    gpus: float
    start: float
    end: float | None
    seconds: int | None
    run: int


@dataclass(frozen=True, kw_only=True)
class View:
    """Consistent view of the cluster; a new one is made after each round and look.

    Attributes:
        plan: of the last round; None before the first.
        reports: the last report of each job's present attempt.
        batches: decisions about batches, by job.
        resizes: changes made to each job in its life; absent: `len(record.changes)`.
        kept_since: epoch s from which on past changes and allocations are kept; 0: not known.
        notes: warnings of the controller to show above the status.
        next_round: epoch s.
        topology: configured links of the network.
        program: integer program of the last round; None: the policy solves none.
        sleep: nodes that could have slept; None: that is not observed.
        neighbours: jobs on the nodes of each running elastic job.
        starts: probable starts of pending elastic jobs.
    """

    snapshot: Snapshot
    plan: Plan | None = None
    records: Mapping[int, JobRecord] = field(default_factory=dict)
    reports: Mapping[int, Report] = field(default_factory=dict)
    transitions: Sequence[TransitionRow] = ()
    resizes: Mapping[int, int] = field(default_factory=dict)
    batches: Mapping[int, BatchChoice] = field(default_factory=dict)
    mode: str = "observe"
    policy: str = ""
    next_round: float | None = None
    topology: TopologySettings = field(default_factory=TopologySettings)
    kept_since: float = 0.0
    notes: tuple[Reason, ...] = ()
    program: RoundProgram | None = None
    sleep: ObservedSleep | None = None
    neighbours: Mapping[int, Sequence[Neighbour]] = field(default_factory=dict)
    starts: Mapping[int, StartEstimate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Particulars:
    """Data of one job for `show` that the view does not hold.

    Attributes:
        layout: ordered by a user; "": none.
        orders: of its present attempt.
        profile: costs of its layers.
    """

    layout: str = ""
    orders: Orders = field(default_factory=Orders)
    profile: StoredProfile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """The caller of a request. Operators see all.

    Attributes:
        private: users see only their own jobs (PrivateData=jobs).
        hidden: further private data, of `PRIVATE`.
    """

    uid: int = 0
    operator: bool = True
    private: bool = False
    hidden: frozenset[str] = frozenset()

    def sees(self, uid: int | None) -> bool:
        """Return whether a job of this owner may be shown."""
        return self.operator or not self.private or uid == self.uid

    def sees_usage(self, uid: int | None) -> bool:
        """Return whether the usage of this owner's jobs may be shown."""
        return self.sees(uid) and (self.operator or "usage" not in self.hidden or uid == self.uid)

    def may_know(self, *what: str) -> bool:
        """Return whether all of these, values of `PRIVATE`, may be shown."""
        return self.operator or self.hidden.isdisjoint(what)

    def jobs(self, view: View) -> tuple[Job, ...]:
        """Return the jobs that may be shown."""
        return tuple(j for j in view.snapshot.jobs if self.sees(j.uid))


class NoAnswerError(SlurmElasticError):
    """Error: a request cannot be answered; the message is one line with the remedy."""
