"""Names, labels and meanings of the metrics that selasticd exports.

Labels are enumerations: no value that a user writes becomes a label, and no metric names a user or
a job.
"""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

from slurm_elastic.controller.state.transition import TransitionState
from slurm_elastic.core.plan import Action
from slurm_elastic.core.resize_kind import ResizeKind
from slurm_elastic.rpc.protocol import CODES

#: Prefix of the name of each metric.
PREFIX = "selastic_"
#: GPU type of jobs that ask for any type, or for one that no node has.
ANY_TYPE = "any"
#: Results of a request beside the codes of refusals: answered, and not sealed by munge.
ANSWERED, UNAUTHENTICATED = "ok", "unauthenticated"
#: Operation of a request that names none of the protocol.
OTHER_OPERATION = "other"

Kind = Literal["gauge", "counter", "histogram"]


class MetricDefinition(NamedTuple):
    """One metric.

    Attributes:
        name: without prefix, and for a counter without `_total`.
        meaning: one sentence.
        labels: names of its labels.
        kind: of OpenMetrics.
        buckets: upper bounds of a histogram.
        initial: values of the labels that are exported before anything is counted.
    """

    name: str
    meaning: str
    labels: tuple[str, ...] = ()
    kind: Kind = "gauge"
    buckets: tuple[float, ...] = ()
    initial: tuple[tuple[str, ...], ...] = ()

    @property
    def full_name(self) -> str:
        """The name as exported."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")


ACTIVE = MetricDefinition("active", "1: this controller acts; 0: it stands by or is starting.")
GPUS = MetricDefinition(
    "gpus",
    "GPUs held by elastic and by rigid jobs, idle, and on nodes that are not available.",
    ("gpu_type", "use"),
)
GPUS_PLANNED = MetricDefinition(
    "gpus_planned", "GPUs that the last round gave to elastic jobs.", ("gpu_type",)
)
GPUS_WANTED = MetricDefinition(
    "gpus_wanted",
    "GPUs up to their MAX that elastic jobs do not hold, of each job at most those of the cluster.",
)
GPUS_PENDING = MetricDefinition(
    "gpus_pending", "GPUs requested by pending jobs, of elastic jobs their MIN.", ("jobs",)
)
JOBS = MetricDefinition("jobs", "Jobs that have not ended.", ("jobs", "state"))
JOBS_STOPPED = MetricDefinition("jobs_stopped", "Pending jobs that the crash-loop guard holds.")
JOBS_ON_TRIAL = MetricDefinition(
    "jobs_on_trial", "Jobs without a checkpoint newer than their last change."
)
TRANSITIONS_LIVE = MetricDefinition(
    "transitions_live", "Transitions under way, by their present state.", ("state",)
)
RESERVATIONS = MetricDefinition("reservations", "Reservations of the controller.")
RESERVATION_OLDEST = MetricDefinition(
    "reservation_oldest_seconds", "Age of the oldest reservation of the controller; 0: none."
)
LEASES = MetricDefinition("leases", "Pending jobs that a BeginTime lease makes wait.")
LEASE_OLDEST = MetricDefinition(
    "lease_oldest_seconds",
    "Seconds since the lease was renewed whose renewal is longest ago; 0: none.",
)
LEASE_LENGTH = MetricDefinition(
    "lease_length_seconds", "Length of a lease and of a reservation, `[slurm] lease_s`."
)
SNAPSHOT_AGE = MetricDefinition(
    "snapshot_age_seconds", "Seconds since the cluster was read for the last round."
)
ROUND_INTERVAL = MetricDefinition(
    "round_interval_seconds", "Seconds between rounds, `[controller] interval_s`."
)
NOTES = MetricDefinition("notes", "Present warnings of the controller, by reason.", ("reason",))

LEDGER_SIZE = MetricDefinition("ledger_bytes", "Size of the ledger's file and its log.")
LEADER_LEASE = MetricDefinition(
    "leader_lease_seconds",
    "Seconds for which this controller may still act, with several; 0: it stands by.",
)
LEADER_GENERATION = MetricDefinition(
    "leader_generation", "Number of the lease that this controller held last; 0: none."
)

TRANSITIONS = MetricDefinition(
    "transitions",
    "Transitions that ended: `done`; `undone`, the job is in its old or its MIN shape; `ended`, "
    "the job ended meanwhile. By kind: `in-place`, `restart` of the ranks, `requeue`.",
    ("action", "outcome", "kind"),
    "counter",
    initial=tuple(
        itertools.product(
            (a.value for a in Action if a not in (Action.KEEP, Action.HOLD)),
            (s.value.lower() for s in TransitionState if not s.live),
            (kind.value for kind in ResizeKind),
        )
    ),
)
#: Parts of a transition, in their order.
PHASES = ("notice", "save", "slurm", "start", "restore")
TRANSITION_SECONDS = MetricDefinition(
    "transition_seconds",
    "Parts of a change: `notice`, until the job reports that it saves; `save`; `slurm`, from "
    "requeue to running; `start`, from the program's start to its first step, without `restore`; "
    "`total`, from notice to first step.",
    ("phase",),
    "histogram",
    buckets=(0.1, 0.3, 1, 2, 3, 5, 10, 20, 30, 60, 120, 300, 600),
    initial=tuple((phase,) for phase in (*PHASES, "total")),
)
CHANGES_FAILED = MetricDefinition(
    "changes_failed",
    "Attempts that failed before they had a checkpoint newer than their change.",
    kind="counter",
)
HOLDS = MetricDefinition("holds", "Jobs that the crash-loop guard has held.", kind="counter")
LOST_STEPS = MetricDefinition(
    "lost_steps",
    "Steps that jobs had reported and computed again after a restart, by a change or by others.",
    ("cause",),
    "counter",
    initial=(("change",), ("other",)),
)
SPEEDUP = MetricDefinition(
    "change_speedup",
    "Speed after a change over that before: `promised` by the model, `delivered` as measured; both "
    "are observed once the job has measured its new GPUs.",
    ("speed",),
    "histogram",
    buckets=(0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 4, 8),
    initial=(("promised",), ("delivered",)),
)
REQUESTS = MetricDefinition(
    "requests",
    "Requests by operation and result: `ok`, a code of refusal, or `unauthenticated`.",
    ("operation", "result"),
    "counter",
    initial=tuple(("report", result) for result in (ANSWERED, *CODES)),
)
ROUND_SECONDS = MetricDefinition(
    "round_seconds",
    "Seconds that rounds took.",
    kind="histogram",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
    initial=((),),
)
ROUND_CPU = MetricDefinition(
    "round_cpu_seconds", "Seconds of CPU that rounds took, of commands too.", kind="counter"
)

#: Gauges that each controller shows, the standby too.
ALWAYS = (ACTIVE, LEADER_LEASE, LEADER_GENERATION, LEDGER_SIZE)
#: Counted by each controller from its start on.
COUNTED = (
    TRANSITIONS, TRANSITION_SECONDS, CHANGES_FAILED, HOLDS, LOST_STEPS, SPEEDUP, REQUESTS,
    ROUND_SECONDS, ROUND_CPU,
)  # fmt: skip
#: Exported by the controller that acts, once it has read the cluster.
OF_CLUSTER = (
    GPUS, GPUS_PLANNED, GPUS_WANTED, GPUS_PENDING, JOBS, JOBS_STOPPED, JOBS_ON_TRIAL,
    TRANSITIONS_LIVE, RESERVATIONS, RESERVATION_OLDEST, LEASES, LEASE_OLDEST, LEASE_LENGTH,
    SNAPSHOT_AGE, ROUND_INTERVAL, NOTES,
)  # fmt: skip
