"""Answers about jobs: rows of `status`, the texts of `explain`, the details of `show`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from slurm_elastic.controller.batch_tuning import BatchChoice
from slurm_elastic.controller.queries.model_answers import exchange_row, model_row, plans_row
from slurm_elastic.controller.queries.neighbour_answers import neighbour_rows
from slurm_elastic.controller.queries.view import (
    HistoryRow,
    NoAnswerError,
    TransitionRow,
    View,
    Viewer,
)
from slurm_elastic.controller.queries.visibility import Visibility
from slurm_elastic.controller.state.job_ending import EndedJob
from slurm_elastic.core.cluster import Allocation, Companion, Job, JobState
from slurm_elastic.core.gpu_parts import held_gpus
from slurm_elastic.core.plan import Action, Decision, JobRecord
from slurm_elastic.core.report import Report
from slurm_elastic.rpc.answers import (
    GivingJob,
    JobRow,
    PartitionRow,
    Place,
    ReasonRow,
    StatusAnswer,
    Waiting,
)
from slurm_elastic.rpc.decision_answers import (
    BarredRow,
    BatchRow,
    ChangeRow,
    CompanionPlaceRow,
    DecisionRow,
    EndingRow,
    ExplainAnswer,
)
from slurm_elastic.slurm.shape import submitted_gpus

#: Seconds from a complete checkpoint until Slurm counts the GPUs as free, when nothing hinders.
_FREED_AFTER_SAVE_S = 2.0

#: States in which a job has its GPUs.
HOLDING = (JobState.RUNNING, JobState.COMPLETING, JobState.SUSPENDED)


class JobRows:
    """Rows of one view for one viewer; what several rows need is computed once."""

    def __init__(self, view: View, viewer: Viewer) -> None:
        self.view = view
        self._shown = {j.job_id: j for j in viewer.jobs(view)}
        self.reason = Visibility(view, viewer).row
        self._leaf: dict[str, str] = {}
        for switch in sorted(view.snapshot.switches, key=lambda s: -s.level):
            self._leaf.update(dict.fromkeys(switch.nodes, switch.name))
        self._claims = {c.job_id: c for c in view.plan.claims} if view.plan else {}
        self._transitions: dict[int, TransitionRow] = {t["job_id"]: t for t in view.transitions}
        self._holders: dict[str, list[Job]] = defaultdict(list)
        for job in view.snapshot.jobs:
            for node in job.allocation.nodes if job.allocation and job.elastic else ():
                self._holders[node].append(job)

    def record(self, job_id: int) -> JobRecord:
        """Return the record of a job; an empty one when there is none."""
        return self.view.records.get(job_id) or JobRecord(job_id=job_id)

    def display(self, job_id: int) -> str:
        """Return the id that users type."""
        job = self.view.snapshot.job.get(job_id)
        return job.display_id if job else str(job_id)

    def places(self, nodes: Sequence[str]) -> list[Place]:
        """Return nodes by leaf switch, in the order of the first node of each."""
        places: dict[str, list[str]] = {}
        for node in nodes:
            places.setdefault(self._leaf.get(node, ""), []).append(node)
        return [{"switch": switch, "nodes": names} for switch, names in places.items()]

    def job(self, job: Job) -> JobRow:
        """Return one row of `status`."""
        record, report = self.record(job.job_id), self.view.reports.get(job.job_id)
        held = job.allocation if job.state in HOLDING else None
        transition = self._transitions.get(job.job_id)
        progress = report.progress if report and report.progress is not None else record.progress
        return {
            "job_id": job.job_id,
            "display_id": job.display_id,
            "name": job.name,
            "user": job.user,
            "partition": job.partition,
            "state": job.state.value,
            "elastic": job.elastic,
            "unmanaged_reason": self.reason(job.unmanaged_reason),
            "held": record.held,
            "stopped": self.reason(record.stopped) if job.state is JobState.PENDING else None,
            "gpus": held.gpus if held else 0,
            "half": held is not None and held.half,
            "wants": wants(job),
            "gpu_type": held.gpu_type if held else job.gpu_type,
            "where": self.places(held.nodes) if held else [],
            "kind": report.kind if report else "",
            "steps_per_s": self.steps_per_s(job),
            "samples_per_s": _samples_per_s(held, record),
            "progress": progress,
            "resizes": self.view.resizes.get(job.job_id, len(record.changes)),
            "transition": self._transition(transition) if transition else None,
            "waiting": self._waiting(job, record) if job.state is JobState.PENDING else None,
        }

    def notes(self) -> list[ReasonRow]:
        """Return the notes of the controller and of the last round, for all viewers."""
        planned = self.view.plan.notes if self.view.plan else ()
        return [row for n in (*self.view.notes, *planned) if (row := self.reason(n)) is not None]

    def steps_per_s(self, job: Job) -> float | None:
        """Return the speed of a running job as last reported."""
        report = self.view.reports.get(job.job_id)
        if report is None or not report.step_time_s or job.state is not JobState.RUNNING:
            return None
        return 1.0 / report.step_time_s

    def decision(self, decision: Decision) -> DecisionRow:
        """Return the decision of the last round for a job."""
        target, current = decision.target, decision.current
        return {
            "action": decision.action.value,
            "gpus": target.gpus if target else 0,
            "half": target is not None and target.half,
            "gpu_type": target.gpu_type if target else "",
            "where": self.places(target.nodes) if target else [],
            "reason": self.reason(decision.reason),
            "why_not_more": self.reason(decision.why_not_more),
            "why_not_fewer": self.reason(decision.why_not_fewer),
            "why_here": self.reason(decision.why_here),
            "waiting_for": self.reason(decision.waiting_for),
            "gain": decision.gain,
            "cost_gpu_s": decision.cost_s,
            "payback_s": payback_s(decision, current),
        }

    def _transition(self, row: TransitionRow) -> dict[str, object]:
        shown = {k: row.get(k) for k in ("id", "state", "since", "target")}
        return {**shown, "reason": self.reason(row.get("reason"))}

    def _waiting(self, job: Job, record: JobRecord) -> Waiting:
        claim = self._claims.get(job.job_id)
        directive, start = job.directive, self.view.starts.get(job.job_id)
        return {
            "gpus": job.gpus or (directive.min_gpus if directive else 0),
            "since": job.submit_time,
            "slurm_reason": job.reason,
            "kept": dict(claim.shares) if claim else {},
            "kept_until": claim.until if claim else None,
            "givers": self._givers([n for n, _ in claim.shares]) if claim else [],
            "boots": [n for n, _ in claim.shares if self._boots(n)] if claim else [],
            "leased": record.leased,
            "begin_time": job.begin_time,
            "starts": {"median": start.median, "p90": start.p90} if start else None,
        }

    def _boots(self, name: str) -> bool:
        node = self.view.snapshot.node.get(name)
        return node is not None and node.asleep

    def _givers(self, nodes: Sequence[str]) -> list[GivingJob]:
        """Return elastic jobs on these nodes that give up GPUs, now or shortly."""
        decisions = self.view.plan.decision if self.view.plan else {}
        givers: dict[int, GivingJob] = {}
        for node in nodes:
            for job in self._holders[node]:
                transition = self._transitions.get(job.job_id)
                decision = decisions.get(job.job_id)
                if job.job_id not in self._shown or (
                    transition is None and not _gives(decision, node)
                ):
                    continue
                givers[job.job_id] = {
                    "job_id": job.job_id,
                    "display_id": job.display_id,
                    "in_s": self._freed_in_s(job, transition),
                    "under_way": transition is not None,
                }
        return list(givers.values())

    def _freed_in_s(self, job: Job, transition: TransitionRow | None) -> float | None:
        save = self.record(job.job_id).checkpoint_s
        if transition is None or save is None:
            return None
        elapsed = self.view.snapshot.time - transition.get("since", self.view.snapshot.time)
        return max(1.0, save + _FREED_AFTER_SAVE_S - elapsed)


def status(view: View, viewer: Viewer, *, everything: bool = False) -> StatusAnswer:
    """Return the state of the cluster and its jobs.

    Args:
        view: the controller's view.
        viewer: the caller.
        everything: rigid jobs too, not only those for which GPUs are kept.
    """
    rows = JobRows(view, viewer)
    claimed = {c.job_id for c in view.plan.claims} if view.plan else set()
    shown = [
        j
        for j in viewer.jobs(view)
        if j.state is not JobState.ENDED and (j.submission or everything or j.job_id in claimed)
    ]
    shown.sort(key=lambda j: (j.state is JobState.PENDING, order(j.display_id)))
    return {
        "time": view.snapshot.time,
        "mode": view.mode,
        "policy": view.policy,
        "notes": rows.notes(),
        "partitions": _partitions(view) if viewer.may_know("nodes", "partitions") else [],
        "jobs": [rows.job(j) for j in shown],
    }


def explain(
    view: View,
    viewer: Viewer,
    job_id: int,
    history: Sequence[HistoryRow] = (),
    ended: EndedJob | None = None,
) -> ExplainAnswer:
    """Return the decision for one job, and its reasons; for an ended job, how it ended.

    Args:
        view: the controller's view.
        viewer: the caller.
        job_id: the job.
        history: rows of its changes, oldest first.
        ended: record of the job if it has ended.

    Raises:
        NoAnswerError: the job is not in the snapshot, and not recorded as ended.
    """
    job = view.snapshot.job.get(job_id) or (ended.job if ended else None)
    if job is None or not viewer.sees(job.uid):
        raise NoAnswerError(
            f"job {job_id} is neither running nor waiting: see `selastic history {job_id}`"
        )
    rows, record = JobRows(view, viewer), view.records.get(job_id) or JobRecord(job_id=job_id)
    if job.state is not JobState.ENDED:
        ended = None
    elif ended is None:
        ended = EndedJob(job=job, record=record)
    record = ended.record if ended else record
    decision = view.plan.decision.get(job_id) if view.plan and not ended else None
    of_job = [h for h in history if h.get("job_id") == job_id]
    return {
        "time": view.snapshot.time,
        "mode": view.mode,
        "job": rows.job(job),
        "since": _since(job, record),
        "proven": record.proven,
        "unproven": rows.reason(record.unproven),
        "reporting": record.reporting,
        "checkpoint_s": record.checkpoint_s,
        "restart_s": record.restart_s,
        "time_limit_s": job.time_limit_s,
        "extended_s": record.extended_s,
        "on_trial": record.on_trial,
        "failed": rows.reason(record.failed),
        "barred": _barred(rows, record),
        "record_replaced": job.record_replaced,
        "companions": [_companion(rows, companion) for companion in job.companions],
        "neighbours": [] if ended else neighbour_rows(view, viewer, job_id),
        "unmanaged_nodes": _unmanaged_nodes(view, viewer, job) if job.elastic and not ended else [],
        "not_in_place": rows.reason(record.not_in_place),
        "submitted_gpus": submitted_gpus(job) if job.submission else job.gpus,
        "decision": rows.decision(decision) if decision else None,
        "model": model_row(view.snapshot, job, record.learned),
        "batch": None if ended else _batch(rows, view.batches.get(job_id)),
        "exchange": None if ended else exchange_row(job, view.reports.get(job_id)),
        "layout": "" if ended else _layout(job, view.reports.get(job_id)),
        "plans": None if ended else plans_row(job, record),
        "next_round": view.next_round,
        "last": change(rows, of_job[-1]) if of_job else None,
        "ended": _ending(rows, ended) if ended else None,
    }


def _unmanaged_nodes(view: View, viewer: Viewer, job: Job) -> list[str]:
    """Return the nodes of a job's partitions whose GPUs are not managed."""
    if not viewer.may_know("nodes"):
        return []
    partitions = set(job.partition.split(","))
    nodes = view.snapshot.nodes
    return [n.name for n in nodes if n.unmanaged_gpus and not partitions.isdisjoint(n.partitions)]


def _layout(job: Job, report: Report | None) -> str:
    """Return the layout or plan of the present attempt, as it reported it."""
    if report is None or report.run != job.run or job.allocation is None:
        return ""
    return report.plan or report.layout


def _barred(rows: JobRows, record: JobRecord) -> list[BarredRow]:
    """Return the shapes that a job is not to get any more, halves of GPUs last."""
    shapes = [(gpu_type, gpus, False, reason) for gpu_type, gpus, reason in record.barred]
    if record.half_barred is not None:
        shapes.append(("", 1, True, record.half_barred))
    return [
        {"gpu_type": gpu_type, "gpus": gpus, "half": half, "reason": rows.reason(reason)}
        for gpu_type, gpus, half, reason in shapes
    ]


def _companion(rows: JobRows, companion: Companion) -> CompanionPlaceRow:
    held = companion.allocation
    return {
        "job_id": companion.job_id,
        "gpus": held.gpus,
        "where": rows.places(held.nodes),
    }


def _ending(rows: JobRows, ended: EndedJob) -> EndingRow:
    job, held = ended.job, ended.held
    # Slurm gives a job that is cancelled while it waits the same start and end.
    ran = job.start_time and job.end_time and job.end_time > job.start_time
    return {
        "state": job.end_state,
        "exit_code": job.exit_code,
        "time": job.end_time,
        "gpus": held.gpus if held else 0,
        "gpu_type": held.gpu_type if held else "",
        "where": rows.places(held.nodes) if held else [],
        "runs": ended.runs or (job.run + 1 if ran else 0),
        "changes": ended.record.resizes,
        "reported": ended.reported,
        "stopped": rows.reason(ended.record.stopped),
    }


def change(rows: JobRows, row: HistoryRow) -> ChangeRow:
    """Return a row of the history with every field present."""
    seconds = row.get("seconds") or {}
    parts = (seconds.get("checkpoint"), seconds.get("slurm"), seconds.get("startup"))
    known_parts = [s for s in (*parts, seconds.get("pause")) if s]
    return {
        "time": row.get("time", 0.0),
        "job_id": row.get("job_id", 0),
        "display_id": rows.display(row.get("job_id", 0)),
        "action": row.get("action", ""),
        "from": str(row.get("from", "")),
        "to": str(row.get("to", "")),
        "reason": rows.reason(row.get("reason")),
        "state": row.get("state", ""),
        "outcome": row.get("outcome", ""),
        "kind": row.get("kind", "requeue"),
        "seconds": seconds,
        "total_s": sum(known_parts) if known_parts else None,
        "paid_back_s": row.get("paid_back_s"),
    }


def order(display_id: str) -> tuple[int, ...]:
    """Return a key that sorts `9`, `10_2`, `10_11` by number; other ids come first."""
    parts = display_id.split("_")
    return tuple(int(p) for p in parts) if all(p.isdecimal() for p in parts) else ()


def wants(job: Job) -> str:
    """Return the requested GPUs: `2-16` of the directive in force, or a rigid job's number."""
    directive = job.directive
    if directive is None:
        return str(job.gpus)
    low, high = directive.min_gpus, directive.max_gpus
    return str(low) if low == high else f"{low}-{high}"


def payback_s(decision: Decision, current: Allocation | None) -> float | None:
    """Return the seconds at the new speed until the work lost by a change is regained."""
    if decision.gain <= 0 or decision.cost_s <= 0 or current is None or not current.gpus:
        return None
    return decision.cost_s / current.gpus / decision.gain


def _batch(rows: JobRows, choice: BatchChoice | None) -> BatchRow | None:
    if choice is None:
        return None
    least, most = choice.limits
    return {
        "batch": choice.batch,
        "present": choice.present,
        "least": least,
        "most": most,
        "gain": choice.gain,
        "reason": rows.reason(choice.reason),
    }


def _gives(decision: Decision | None, node: str) -> bool:
    if decision is None or decision.action is Action.KEEP or decision.current is None:
        return False
    target_gpus = decision.target.on(node) if decision.target else 0
    return target_gpus < decision.current.on(node)


def _since(job: Job, record: JobRecord) -> float | None:
    if job.state is JobState.PENDING:
        return job.submit_time or None
    times = [t for t in (job.start_time, record.last_change) if t]
    return max(times) if times else None


def _samples_per_s(held: Allocation | None, record: JobRecord) -> float | None:
    if held is None:
        return None
    shape = (held.gpu_type, held.gpus, len(held.nodes))
    for m in record.measurements:
        if (m.gpu_type, m.gpus, m.nodes) == shape:
            return m.samples_per_s
    return None


def _partitions(view: View) -> list[PartitionRow]:
    elastic = held_gpus(j for j in view.snapshot.jobs if j.elastic)
    waiting: Counter[str] = Counter()
    for job in view.snapshot.jobs:
        if job.state is JobState.PENDING and (job.gpus or job.submission):
            waiting.update(job.partition.split(","))
    nodes: Mapping[str, list[str]] = {p.name: list(p.nodes) for p in view.snapshot.partitions}
    if not nodes:
        named = sorted({p for n in view.snapshot.nodes for p in n.partitions})
        nodes = {p: [n.name for n in view.snapshot.nodes if p in n.partitions] for p in named}
    rows: list[PartitionRow] = []
    for name, members in nodes.items():
        present = [view.snapshot.node[n] for n in members if n in view.snapshot.node]
        types: Counter[str] = Counter()
        for node in present:
            types[node.gpu_type] += node.gpus
        counted = [n for n in present if n.gpus]
        used = sum(n.used_gpus for n in counted)
        in_use_elastic = min(used, sum(elastic[n.name] for n in counted))
        idle = sum(n.free_gpus for n in present)
        gpus = sum(n.gpus for n in present)
        unmanaged = sum(n.unmanaged_gpus for n in present)
        asleep = sum(n.gpus - n.used_gpus for n in counted if n.asleep)
        if not gpus and not unmanaged:
            continue
        rows.append(
            {
                "name": name,
                "gpus": gpus,
                "types": {t: c for t, c in sorted(types.items()) if c},
                "elastic": in_use_elastic,
                "rigid": used - in_use_elastic,
                "idle": idle,
                "unavailable": max(0, gpus - used - idle - asleep),
                "asleep": asleep,
                "unmanaged": unmanaged,
                "waiting": waiting[name],
            }
        )
    return rows
