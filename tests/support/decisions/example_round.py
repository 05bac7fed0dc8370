"""Example round: 24 GPUs in two racks, three elastic jobs and one job that waits."""

import calendar
from dataclasses import replace

from slurm_elastic.controller.queries.dispatch import HistoryRow, SegmentRow, View
from slurm_elastic.core.cluster import (
    Allocation,
    Job,
    JobState,
    Node,
    Partition,
    Snapshot,
    Switch,
)
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import Action, Claim, Decision, JobRecord, Measurement, Plan
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report
from slurm_elastic.core.submission import Submission

#: 14:05:24 UTC; tests run with TZ=UTC.
NOW = float(calendar.timegm((2026, 11, 20, 14, 5, 24)))
ALICE, BOB, ROOT = 2001, 2002, 0


def ago(hour: int, minute: int, second: int = 0) -> float:
    return float(calendar.timegm((2026, 11, 20, hour, minute, second)))


def job(job_id: int, name: str, user: str, directive: str = "", **other: object) -> Job:
    submission = Submission(Directive.parse(directive)) if directive else None
    values = {
        "job_id": job_id,
        "display_id": str(job_id),
        "name": name,
        "user": user,
        "uid": ALICE if user == "alice" else BOB,
        "state": JobState.RUNNING,
        "partition": "gpu",
        "submission": submission,
        "submit_time": ago(14, 0),
        **other,
    }
    allocation = values.get("allocation")
    if isinstance(allocation, Allocation):
        values["gpus"] = allocation.gpus
    return Job(**values)  # type: ignore[arg-type]


def _node(name: str, gpu_type: str, used: int) -> Node:
    return Node(name=name, gpu_type=gpu_type, gpus=4, used_gpus=used, partitions=frozenset({"gpu"}))


A100 = {"g01": 4, "g02": 4}
JOBS = (
    job(
        4711,
        "gpt-small",
        "alice",
        "2-16,types=a100:v100",
        allocation=Allocation.of("a100", A100),
        start_time=ago(14, 2, 10),
        time_limit_s=43200,
    ),
    job(4713, "resnet", "alice", "1-8", allocation=Allocation.of("v100", {"g06": 4})),
    job(4720, "vit", "alice", "1-4", allocation=Allocation.of("a100", {"g03": 1})),
    job(4722, "bert-ft", "bob", state=JobState.PENDING, gpus=4, reason="Resources"),
    job(4700, "rigid", "bob", allocation=Allocation.of("v100", {"g04": 4, "g05": 4})),
)

SNAPSHOT = Snapshot(
    time=NOW,
    nodes=(
        _node("g01", "a100", 4),
        _node("g02", "a100", 4),
        _node("g03", "a100", 1),
        _node("g04", "v100", 4),
        _node("g05", "v100", 4),
        _node("g06", "v100", 4),
    ),
    jobs=JOBS,
    switches=(
        Switch("rack1", 0, ("g01", "g02", "g03")),
        Switch("rack2", 0, ("g04", "g05", "g06")),
        Switch("spine", 1, ("g01", "g02", "g03", "g04", "g05", "g06"), ("rack1", "rack2")),
    ),
    partitions=(Partition(name="gpu", nodes=("g01", "g02", "g03", "g04", "g05", "g06")),),
)

PLAN = Plan(
    time=NOW - 5,
    decisions=(
        Decision(
            job_id=4711,
            current=Allocation.of("a100", A100),
            target=Allocation.of("a100", {"g01": 4}),
            action=Action.SHRINK,
            reason=Reason(
                "gives-gpus", gpus=4, job="4722", user="bob", elastic=False, waited_s=120.0
            ),
            why_not_more=Reason("freed-gpus-kept", gpus=4, job="4722", user="bob"),
            why_not_fewer=Reason(
                "last-gpus-worth", gpus=4, speed=0.21, unit="it/s", part=0.1, compared=True
            ),
            why_here=Reason("across-racks", racks=2, speed=0.62),
            gain=-0.4,
            cost_s=19.0,
        ),
        Decision(
            job_id=4720,
            current=Allocation.of("a100", {"g03": 1}),
            target=Allocation.of("a100", {"g03": 2}),
            action=Action.GROW,
            reason=Reason("fair-share", gpus=2, most=8),
            gain=0.875,
            cost_s=30.6,
        ),
        Decision(
            job_id=4713,
            current=Allocation.of("v100", {"g06": 4}),
            target=Allocation.of("v100", {"g06": 4}),
            action=Action.KEEP,
            reason=Reason("nothing-better"),
            waiting_for=Reason(
                "change-not-paid-back",
                change="move",
                gpus=4,
                gpu_type="v100",
                gain=0.04,
                window_s=1200.0,
                cost_s=60.0,
            ),
        ),
    ),
    claims=(Claim(job_id=4722, shares=(("g02", 4),), since=NOW - 120, until=NOW + 60),),
)

RECORDS = {
    4711: JobRecord(
        job_id=4711,
        proven=True,
        reporting=True,
        checkpoint_s=2.1,
        restart_s=7.4,
        last_change=ago(14, 2, 10),
        changes=(1.0, 2.0, 3.0),
        measurements=(
            Measurement(gpu_type="a100", gpus=8, nodes=2, samples_per_s=486.4, steps=90),
        ),
    ),
    4713: JobRecord(job_id=4713, proven=True, reporting=True, changes=(1.0,)),
    4720: JobRecord(job_id=4720, proven=True, reporting=True),
}

REPORTS = {
    4711: Report(
        job_id=4711, run=0, phase="training", step=340, step_time_s=1 / 1.9, progress=0.34
    ),
    4713: Report(job_id=4713, run=0, phase="training", step_time_s=1 / 5.1, progress=0.71),
    4720: Report(job_id=4720, run=0, phase="training", step_time_s=1 / 0.8, progress=0.02),
}

HISTORY: list[HistoryRow] = [
    {
        "time": ago(14, 2, 1),
        "job_id": 4711,
        "uid": ALICE,
        "action": "grow",
        "from": "4",
        "to": "8",
        "reason": Reason("grows-to-max", gpus=8),
        "state": "DONE",
        "seconds": {"checkpoint": 2.1, "slurm": 3.0, "startup": 4.0, "restore": 1.2},
        "outcome": "done",
        "paid_back_s": 41.0,
    }
]

SEGMENTS: list[SegmentRow] = [
    {"job_id": 4711, "user": "alice", "gpu_type": "a100", "gpus": 4,
     "start": NOW - 7200, "end": NOW - 3600},
    {"job_id": 4711, "user": "alice", "gpu_type": "a100", "gpus": 8,
     "start": NOW - 3600, "end": None},
    {"job_id": 4640, "user": "bob", "gpu_type": "v100", "gpus": 2,
     "start": NOW - 1800, "end": NOW - 900},
]  # fmt: skip

VIEW = View(
    snapshot=SNAPSHOT,
    plan=PLAN,
    records=RECORDS,
    reports=REPORTS,
    transitions=(
        {"id": 18, "job_id": 4711, "state": "NOTIFY", "since": NOW - 0.5, "target": "4 a100"},
    ),
    mode="act",
    policy="fair",
    next_round=ago(14, 5, 30),
)
#: Before the transition has begun.
PLANNED = replace(VIEW, transitions=())
