"""Codes of the reasons that eligibility, placement and site limits give."""

from __future__ import annotations

from slurm_elastic.core.reasons.reason_definition import (
    BECAUSE,
    GAIN,
    GPU_TYPE,
    GPUS,
    JOB,
    JOBS,
    NODES,
    UNTIL,
    USER,
    USERS,
    Parameter,
    ParameterKind,
    count,
    define,
    fraction,
    moment,
    number,
    seconds,
    text,
    word,
)

_CHANGE = word("change", "the change that was weighed", "move", "grow", "type")
_COST = seconds("cost_s", "seconds without training that the change costs")
_UNIT = word("unit", "what the GPUs are spread over", "node", "rack")
_WAITED = seconds("waited_s", "how long the other job has waited")
_ELASTIC = Parameter("elastic", ParameterKind.FLAG, "whether the other job is elastic")

PLACEMENT = (
    define("keeps-allocation", "The job keeps its allocation."),
    define("keeps-for-now", "The job keeps its allocation until its new GPUs are free."),
    define("waits", "The job waits."),
    define(
        "gpus-given-up-first", "Other jobs give up the GPUs of the target first.",
        GPUS, GPU_TYPE, NODES,
    ),
    define("shrink-undone", "No other job takes the GPUs that the job would give up."),
    define("takes-promised-gpus", "The job takes the GPUs that other jobs gave up for it."),
    define("trade-not-worth", "Giving GPUs to other jobs would cost more than they gain."),
    define(
        "no-place", "No place that the job may use has so many free GPUs.",
        GPUS, GPU_TYPE,
        Parameter("nodes", ParameterKind.NODES, "the nodes that were chosen", "", True),
    ),
    define(
        "growth-not-supported",
        "The job gets no further GPUs, as it is in a reservation of its user, or its constraint is"
        " more than names, `&`, `|`, parentheses and one pair of brackets.",
        GPUS, GPU_TYPE, word("option", "what prevents it", "constraint", "reservation"),
    ),
    define(
        "group-not-linked",
        "GPUs are free, but a spatial group of the job would leave its link domain or node.",
        GPUS, GPU_TYPE, count("group", "GPUs of a spatial group"),
        word("reach", "how far a group may reach", "domain", "node"),
    ),
    define("nodes-not-free", "The chosen nodes are not free for the job.", NODES),
    define(
        "in-place-no-room", "On its nodes, the job cannot be changed in place to this size.",
        GPUS, GPU_TYPE,
    ),
    define("gpus-short", "There are not enough free GPUs for the job."),
    define("no-choice-free", "Nothing that the policy chose for the job is free."),
    define("makes-room", "The job changes nodes so that other jobs get whole nodes."),
    define("waits-for-nearer-place", "The job waits for a nearer place.", BECAUSE),
    define(
        "place-too-far", "The free GPUs are spread too far.",
        _UNIT, count("spread", "nodes or racks of the free GPUs"),
        count("nearest", "the fewest that the GPUs need"),
        fraction("speed", "speed there, as a part of that on the nearest place"),
        seconds("waited_s", "how long the job has waited for a nearer place"),
        seconds("limit_s", "when it takes the place; null: never", optional=True),
    ),
    define("change-gains-nothing", "The change would gain nothing.", _CHANGE, GPUS, GPU_TYPE),
    define(
        "change-gains-little", "The change would gain less than min_gain.",
        _CHANGE, GPUS, GPU_TYPE, GAIN,
    ),
    define(
        "change-not-paid-back", "The gain in the payback window is below the cost of the change.",
        _CHANGE, GPUS, GPU_TYPE, GAIN, seconds("window_s", "the payback window"), _COST,
    ),
    define(
        "consolidates", "The job moves to fewer nodes or racks, and that pays.",
        _UNIT, count("spread", "nodes or racks of the new GPUs"), GAIN, _COST,
    ),
    define(
        "stays-spread", "Moving to fewer nodes or racks would not pay.",
        _UNIT, count("spread", "nodes or racks of the present GPUs"), GAIN,
        seconds("window_s", "time to pay back; null: the gain is below min_gain", optional=True),
        _COST,
    ),
    define(
        "leaves-neighbour", "The job moves away from a job that slows it down, or that it slows.",
        JOB, fraction("speed", "speed of the slower of both, as a part of that alone"),
        GAIN, _COST,
    ),
    define("shares-gpu", "The job has half of a GPU, and another job the other half.", JOB, USER),
    define(
        "halves-gpu", "The job gives half of its GPU to another job, which waits for one.",
        JOB, USER, fraction("speed", "its speed beside that job, as a part of that alone"), _COST,
    ),
    define(
        "starts-on-half", "The job starts on half of the GPU of another job.",
        JOB, USER, fraction("speed", "its speed beside that job, as a part of that alone"),
    ),
    define("half-given-first", "Another job gives half of its GPU first.", JOB, USER),
    define(
        "leaves-shared-gpu", "The job leaves the GPU that it shares for one of its own.",
        JOB, USER, fraction("speed", "speed of the slower of both, as a part of that alone"),
        GAIN, _COST,
    ),
    define(
        "slows-partner", "The job waits again: it slows the job whose GPU it shares.",
        JOB, USER, fraction("speed", "speed of the slower of both, as a part of that alone"),
    ),
    define(
        "clears-node", "The job moves off a node that falls idle then, so that it can sleep.",
        NODES, seconds("left_s", "time for which the node would else have stayed in use"), _COST,
    ),
    define(
        "changes-places", "The job exchanges its GPUs with another job, which moves first.",
        JOB, BECAUSE,
    ),
    define(
        "exchanges-gpus", "The job and others get GPUs of each other: all are requeued together.",
        JOBS, USERS, BECAUSE,
    ),
)  # fmt: skip

OTHER_JOBS = (
    define(
        "waits-for-job", "The job waits so that a job of higher priority can start.",
        JOB, USER, _ELASTIC, _WAITED,
    ),
    define(
        "gives-gpus", "The job gives up GPUs so that another job can start.",
        GPUS, JOB, USER, _ELASTIC, _WAITED,
    ),
    define(
        "moves-for-job", "The job moves so that another job finds its GPUs on one place.",
        NODES, GPUS, JOB, USER, _ELASTIC, _WAITED,
    ),
    define(
        "jobs-give-way", "Other jobs give up the GPUs that the job waits for.",
        GPUS, GPU_TYPE, JOBS, USERS,
    ),
    define("nodes-boot", "Sleeping nodes boot for the job.", NODES),
    define("gpus-kept", "GPUs are kept for the job.", GPUS, GPU_TYPE, NODES),
    define(
        "no-room-for-min", "There is no room for MIN, and no job can give way.", GPUS, GPU_TYPE
    ),
    define(
        "job-gets-gpus", "A pending job gets GPUs that other jobs give up.",
        JOB, USER, GPUS, NODES, JOBS, USERS,
    ),
    define("job-needs-gpus", "A pending job needs the GPUs.", GPUS, JOB, USER),
    define("freed-gpus-kept", "Freed GPUs are kept for a pending job.", GPUS, JOB, USER),
)  # fmt: skip

SIZES = (
    define("holds-max", "The job holds its MAX.", GPUS),
    define("holds-min", "The job holds its MIN.", GPUS),
    define("limit-reached", "A limit of Slurm is reached.", text("limit", "the limit")),
    define(
        "no-gpu-idle", "No GPU is idle, and no job would lose less than the job gains.",
        GPU_TYPE,
    ),
    define("idle-gpus-useless", "The idle GPUs would not help the job enough.", GPUS, GPU_TYPE),
    define(
        "last-gpus-worth", "What the last GPUs of the job add to its speed.",
        GPUS, number("speed", "speed that each adds; null: not measured", optional=True),
        text("unit", "unit of that speed", optional=True),
        fraction("part", "what each adds as a part of the job's speed"),
        Parameter("compared", ParameterKind.FLAG, "whether no other job would gain more from them"),
    ),
    define("nodes-share-rack", "The nodes of the job are in one rack.", count("count", "nodes")),
    define(
        "across-racks", "The job is spread over racks; one had no room or did not pay.",
        count("racks", "racks"), fraction("speed", "speed, as a part of that in one rack"),
    ),
)  # fmt: skip

ELIGIBILITY = (
    define("change-under-way", "A change of the job is under way."),
    define("not-managed", "The job is not managed."),
    define(
        "partition-not-managed", "The partition is not managed.",
        Parameter("partition", ParameterKind.NAME, "name of the partition"),
    ),
    define(
        "partition-down", "The partition is not up: a job that is requeued would wait.",
        Parameter("partition", ParameterKind.NAME, "name of the partition"),
    ),
    define(
        "gpus-not-managed",
        "The job runs on a node with GPUs of several types, or with slices of GPUs: it stays as it"
        " is.",
        Parameter("node", ParameterKind.NAME, "name of the node"),
    ),
    define(
        "limit-awaited",
        "Another job waits for a limit under which this one is, and would start in its place.",
        text("slurm_reason", "Slurm's reason of the pending job"),
    ),
    define("slurm-starts", "Slurm starts the job."),
    define("job-ending", "The job is ending."),
    define("job-suspended", "The job is suspended."),
    define("gpus-unknown", "The GPUs of the job are not known."),
    define("no-requeue", "The job was submitted with --no-requeue."),
    define("held-by-command", "`selastic hold` holds the allocation of the job."),
    define("not-proven", "The job has not yet written a checkpoint and resumed from it."),
    define(
        "training-jumped",
        "Step, epoch or learning rate of the job jumped over a change, or each rank trains alone.",
        text("difference", "what jumped"),
    ),
    define("no-report", "The job has not reported in this run; esrun sends the reports."),
    define("save-missed", "The job did not save in time; it is asked again later.", UNTIL),
    define("resizes-forbidden", "The configuration allows no resizes (per_hour = 0)."),
    define(
        "job-resizes-used", "The resizes of this hour are used up.",
        count("most", "resizes of a job in an hour"), UNTIL,
    ),
    define("minimum-interval", "The last change is too recent.", UNTIL),
    define(
        "change-on-trial", "The job has written no checkpoint since its last change.",
        moment("since", "when the attempt began"),
    ),
    define("time-limit-near", "The time limit ends the job before a change would pay.", UNTIL),
    define("interactive", "Only batch jobs can be requeued."),
    define("heterogeneous", "The job is a component of a heterogeneous job."),
    define("held-while-running", "The job is held: a requeue would leave it in the queue."),
    define("licenses-lost", "This release of Slurm loses the licenses of requeued jobs."),
    define("array-waits", "Tasks of an array that never ran: Slurm starts them."),
    define("several-gpu-types", "The job holds GPUs of several types."),
    define("no-gpus-held", "The job runs, and Slurm shows no GPUs of it."),
    define("directive-invalid", "The directive cannot be read.", text("error", "why")),
    define("record-unreadable", "The record of the job cannot be read.", text("error", "why")),
)  # fmt: skip

SITE_LIMITS = (
    define(
        "share-used", "The GPUs above MIN that `[limits]` allows are in use.",
        word("scope", "of whom", "site", "partition", "user"),
        Parameter("partition", ParameterKind.NAME, "name of the partition", "", True),
        Parameter("user", ParameterKind.USER, "the user", "", True),
        count("most", "GPUs above MIN that may be held", "GPUs"),
        count("used", "GPUs above MIN that are held", "GPUs"),
    ),
    define(
        "resizes-used", "The resizes of this hour that `[limits]` allows are used up.",
        word("scope", "of whom", "site", "user"),
        Parameter("user", ParameterKind.USER, "the user", "", True),
        count("used", "resizes in this hour"), count("most", "resizes that are allowed"),
        moment("until", "when the next is allowed", optional=True),
    ),
    define(
        "change-refused", "The job would change, but may not.",
        word("action", "the change", "grow", "shrink", "move", "preempt"),
        count("gpus", "GPUs that it would hold", "GPUs"), GPU_TYPE, BECAUSE,
    ),
)  # fmt: skip
