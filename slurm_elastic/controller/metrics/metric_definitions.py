"""Names, labels and meanings of the gauges that selasticd exports.

Labels are enumerations: no value that a user writes becomes a label, and no metric names a user or
a job.
"""

from __future__ import annotations

from typing import NamedTuple

#: GPU type of jobs that ask for any type, or for one that no node has.
ANY_TYPE = "any"


class MetricDefinition(NamedTuple):
    """One gauge.

    Attributes:
        name: without the prefix `selastic_`.
        meaning: one sentence.
        labels: names of its labels.
    """

    name: str
    meaning: str
    labels: tuple[str, ...] = ()


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

#: Exported by each controller.
ALWAYS = (ACTIVE,)
#: Exported by the controller that acts, once it has read the cluster.
OF_CLUSTER = (
    GPUS, GPUS_PLANNED, GPUS_WANTED, GPUS_PENDING, JOBS, JOBS_STOPPED, JOBS_ON_TRIAL,
    TRANSITIONS_LIVE, RESERVATIONS, RESERVATION_OLDEST, LEASES, LEASE_LENGTH, SNAPSHOT_AGE,
    ROUND_INTERVAL, NOTES,
)  # fmt: skip
