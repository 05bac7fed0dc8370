"""One job on its way from one allocation to another: the record that is persisted.

The protocol (docs/adr/0001-plain-requeue.md) never holds a job: from REQUEUE
to RELEASE it waits in the queue with a start time about two minutes ahead,
which Slurm itself sets. If the controller dies meanwhile, Slurm starts the job.

| state | done on entering | left when |
|---|---|---|
| RESERVE | the round's target nodes are reserved | the target's GPUs are free |
| NOTIFY | the job is asked to save | it says `saved` |
| REQUEUE | `scontrol requeue` | the job is no longer running |
| DRAIN | - | it is pending and its nodes have let it go |
| RESHAPE | one update: size, CPUs, memory, time left | Slurm shows that size |
| COOL | - | before Slurm 25.11: a wait after DRAIN, else the old credential's end hits the run |
| RELEASE | one update: nodes, reservation, start now, priority | - |
| VERIFY | - | it runs as planned |
| CLEAR | reservation and priority are given back | - |

It ends DONE, UNDONE (the job is in its old or its MIN shape), ENDED (the job
finished meanwhile).

Jobs that exchange GPUs leave RESERVE together, NOTIFY when all of them have saved, and DRAIN when
the GPUs are free that the others had. Before that each has its old shape, so that it starts again
in it if the others, or the controller, do not go on.

A change in place (docs/adr/0018-in-place-changes.md) leaves the job running:

| state | done on entering | left when |
|---|---|---|
| RESERVE | the nodes of new companions are reserved | their GPUs are free, or about to be |
| ASK | esrun is asked for new companions | it has submitted them, held |
| PIN | each is read back, and gets its node | Slurm shows that |
| START | each is released, first in the queue | all run as planned |
| JOIN | - | esrun says that their ranks train; those that leave have left |
| NOTIFY | only for a restart of all ranks: the job is asked to save | it says `saved` |
| LEAVE | esrun is told which companions leave | their jobs have ended |
| FREE | - | their GPUs are free |
| CANCEL | esrun is told to give up, companions are cancelled | they are gone; then UNDONE |

A job that only gives up companions leaves RESERVE when the new companions of the job that gets
their GPUs have been released (transitions/handovers.py).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic.controller.state.time_limits import ExtensionTerms, TimeBudget
from slurm_elastic.core.cluster import Allocation, Job
from slurm_elastic.core.plan import Action
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.resize_kind import ResizeKind

#: Fields that a transition copies from its job, under the same names.
_OF_JOB = ("job_id", "display_id", "key", "user", "uid", "run")


class TransitionState(enum.Enum):
    """State of one transition."""

    RESERVE = "RESERVE"
    NOTIFY = "NOTIFY"
    REQUEUE = "REQUEUE"
    DRAIN = "DRAIN"
    RESHAPE = "RESHAPE"
    COOL = "COOL"
    RELEASE = "RELEASE"
    VERIFY = "VERIFY"
    CLEAR = "CLEAR"
    ASK = "ASK"
    PIN = "PIN"
    START = "START"
    JOIN = "JOIN"
    LEAVE = "LEAVE"
    FREE = "FREE"
    CANCEL = "CANCEL"
    DONE = "DONE"
    UNDONE = "UNDONE"
    ENDED = "ENDED"

    @property
    def live(self) -> bool:
        """Whether something is still to be done."""
        return self not in (TransitionState.DONE, TransitionState.UNDONE, TransitionState.ENDED)


#: States in which the job has left its old allocation, or may have.
UPROOTED = (
    TransitionState.REQUEUE,
    TransitionState.DRAIN,
    TransitionState.RESHAPE,
    TransitionState.COOL,
    TransitionState.RELEASE,
    TransitionState.VERIFY,
)


@dataclass(slots=True)
class PlannedCompanion:
    """A companion that is to join: its node and GPUs, and its job once esrun has submitted it."""

    node: str
    gpus: int
    job_id: int = 0


@dataclass(slots=True, kw_only=True)
class Transition:
    """One transition as the ledger keeps it. Times are epoch seconds.

    Attributes:
        key: of the job, distinct for reused ids (`Job.key`).
        run: restart count of the attempt that it ends.
        old: None for a job that was waiting.
        target: None: the job shall wait, with a lease.
        planned: the first target; differs from `target` once the plan was given up.
        reservation: shared by the transitions of one round; "" when none is needed.
        notice_s: how long the job gets to save.
        limit_s: what is left of its time limit, known when it leaves its allocation.
        budget: of its time, where limits may be extended; as it was when the attempt began, and
            from RESHAPE on as it is for the next one.
        terms: conditions on which its time limit may be extended.
        spare_s: seconds that are left on top of the running attempt's limit, which Slurm keeps
            in whole minutes.
        nice: to be restored after the priority was.
        entered: when each state was last entered; `saving`, `saved`, `unanswered` (no such word
            came in time), `declined` (the job cannot be rehearsed), `running`, `first_step`,
            `cleared`, `switched` (members have joined or left), `over` (new companions have
            ended), `given` (others have left the GPUs of new companions), `no_gpus` (Slurm has
            started the job without GPUs), `revised` (its owner has given the job a directive that
            does not allow the target) as well.
        tries: updates sent in the present state.
        refused: updates that Slurm refused in the present state.
        problem: why the plan was given up; None: it was not.
        step: of the checkpoint that the job acknowledged.
        checkpoint_s, startup_s, restore_s: measured, for the history.
        result: of a rehearsal: `proven`, `refuted` or `failed`; "": not known.
        failed: whether the program has failed in `old`: it is not asked to save, and does not go
            back there.
        kind: how the job is changed.
        joins: of a change in place: companions that are to join. Those that did not are left out
            once it has ended.
        leaves: job ids of the companions that are to leave: of a requeue all.
        pause_s: of a change without a requeue: how long training stood still; None: not known.
        exchange: jobs with which it exchanges GPUs.
        givers: jobs whose companions leave in the same plan, for its own new ones.
    """

    id: int
    job_id: int
    display_id: str
    key: str
    user: str
    uid: int
    action: Action
    run: int
    old: Allocation | None
    target: Allocation | None
    reason: Reason
    planned: Allocation | None = None
    reservation: str = ""
    state: TransitionState = TransitionState.RESERVE
    notice_s: float = 60.0
    limit_s: int | None = None
    spare_s: int = 0
    budget: TimeBudget | None = None
    terms: ExtensionTerms | None = None
    nice: int = 0
    entered: dict[str, float] = field(default_factory=dict)
    tries: int = 0
    refused: int = 0
    problem: Reason | None = None
    step: int | None = None
    checkpoint_s: float | None = None
    startup_s: float | None = None
    restore_s: float | None = None
    result: str = ""
    failed: bool = False
    kind: ResizeKind = ResizeKind.REQUEUE
    joins: list[PlannedCompanion] = field(default_factory=list)
    leaves: tuple[int, ...] = ()
    pause_s: float | None = None
    exchange: tuple[int, ...] = ()
    givers: tuple[int, ...] = ()

    @classmethod
    def of(cls, job: Job, *, action: Action, reason: Reason, **more: Any) -> Transition:
        """Return a new one (id 0) of a job; `more`: other attributes, `target` is None."""
        of_job = {name: getattr(job, name) for name in _OF_JOB}
        fields = {"target": None, **more}
        return cls(id=0, action=action, reason=reason, old=job.allocation, **of_job, **fields)

    @property
    def since(self) -> float:
        """Time at which the present state was entered."""
        return self.entered.get(self.state.value, 0.0)

    def waited(self, now: float, mark: str = "") -> float:
        """Return the seconds since the present state, or another mark in `entered`.

        After the clock was set back the wait begins anew.
        """
        name = mark or self.state.value
        if self.entered.get(name, 0.0) > now:
            self.entered[name] = now
        return now - self.entered.get(name, 0.0)

    @property
    def given_up(self) -> bool:
        """Whether the job is on its way back rather than to the plan."""
        return self.problem is not None

    @property
    def moved(self) -> bool:
        """Whether the job was touched at all."""
        if self.by_companions:
            return "switched" in self.entered
        return (
            TransitionState.RESHAPE.value in self.entered
            or TransitionState.REQUEUE.value in self.entered
        )

    @property
    def in_place(self) -> bool:
        """Whether the training goes on during the change."""
        return self.kind is ResizeKind.IN_PLACE

    @property
    def by_companions(self) -> bool:
        """Whether the job runs on during the change, and companions join or leave it."""
        return self.kind is not ResizeKind.REQUEUE

    @property
    def reserved_nodes(self) -> frozenset[str]:
        """Nodes on which GPUs are reserved for the change."""
        if self.by_companions:
            return frozenset(join.node for join in self.joins)
        return frozenset(self.planned.nodes if self.planned else ())

    def seconds(self) -> dict[str, float | None]:
        """Return the seconds of its parts: checkpoint, Slurm, process start, restore."""
        at = self.entered
        slurm = None
        if "running" in at and "REQUEUE" in at:
            slurm = at["running"] - at["REQUEUE"]
        checkpoint = at["saved"] - at["NOTIFY"] if "saved" in at and "NOTIFY" in at else None
        startup = None
        if self.startup_s is not None:
            startup = max(0.0, self.startup_s - (self.restore_s or 0.0))
        total = None
        if "first_step" in at and "NOTIFY" in at:
            total = at["first_step"] - at["NOTIFY"]
        return {
            "checkpoint": checkpoint,
            "slurm": slurm,
            "startup": startup,
            "restore": self.restore_s,
            "pause": self.pause_s,
            "total": self.pause_s if self.in_place else total,
        }

    def seconds_text(self) -> str:
        """Return the seconds for a log line: `checkpoint:0.41,slurm:2.63`."""
        known_seconds = ((k, v) for k, v in self.seconds().items() if v is not None)
        return ",".join(f"{k}:{v:.2f}" for k, v in known_seconds)

    def __str__(self) -> str:
        return f"JobId={self.display_id} Transition={self.id}"

    def to_body(self) -> dict[str, Any]:
        """Return JSON for the ledger."""
        body = dataclasses.asdict(self)
        for name in ("old", "target", "planned"):
            held: Allocation | None = getattr(self, name)
            body[name] = held.to_body() if held else None
        body["reason"] = self.reason.to_json()
        body["problem"] = self.problem.to_json() if self.problem else None
        body["action"], body["state"] = self.action.value, self.state.value
        body["kind"] = self.kind.value
        body["seconds"] = self.seconds()
        return body

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Transition:
        """Return it from the ledger's JSON; unknown fields are ignored.

        Raises:
            ValueError: it is no transition.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        values = {k: v for k, v in body.items() if k in names}
        try:
            for name in ("old", "target", "planned"):
                values[name] = Allocation.from_body(values.get(name))
            values["reason"] = Reason.from_json(values["reason"]) or Reason("text", text="")
            values["problem"] = Reason.from_json(values.get("problem"))
            values["budget"] = TimeBudget.from_body(values.get("budget"))
            values["terms"] = ExtensionTerms.from_body(values.get("terms"))
            values["kind"] = ResizeKind(values.get("kind", ResizeKind.REQUEUE))
            values["joins"] = [PlannedCompanion(**join) for join in values.get("joins", ())]
            for name in ("leaves", "exchange", "givers"):
                values[name] = tuple(values.get(name, ()))
            values["action"], values["state"] = (
                Action(body["action"]),
                TransitionState(body["state"]),
            )
            return cls(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no transition: {error}") from None
