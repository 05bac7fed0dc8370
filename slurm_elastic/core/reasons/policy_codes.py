"""Codes of the reasons that policies give."""

from __future__ import annotations

from slurm_elastic.core.reasons.reason_definition import (
    BECAUSE,
    GAIN,
    GPU_TYPE,
    GPUS,
    JOB,
    JOBS,
    NODES,
    SHAPES,
    UNTIL,
    Parameter,
    ParameterKind,
    count,
    define,
    fraction,
    moment,
    number,
    seconds,
    word,
)

_TIMES = number("times", "goodput, in multiples of the smallest of the job")
_TIER = word("tier", "how far its GPUs are spread", "gpu", "node", "rack", "network")
_ORDER = word("order", "the order of the jobs", "remaining-time", "network-sensitivity")

ALL_POLICIES = (
    define("next-size", "The next size for which GPUs are free."),
    define("nothing-better", "Nothing else is better for the job."),
    define("no-suitable-gpus", "No GPUs of this cluster suit the job."),
    define("nothing-free", "Nothing that the job could run on is free."),
    define("assigned-not-free", "Nothing else that the job was assigned is free."),
    define("gpus-not-free", "The GPUs that the job was assigned are not free yet.", GPUS, GPU_TYPE),
    define("more-not-faster", "More GPUs would not make the job faster."),
    define("waits-for-shapes", "The job waits for one of these sizes.", SHAPES),
    define(
        "several", "Several reasons together.",
        Parameter("reasons", ParameterKind.REASONS, "the reasons"),
    ),
)  # fmt: skip

FAIR = (
    define("min-first", "The job gets its MIN."),
    define("min-share", "The job gets its MIN; each further GPU helps another job more.", GPUS),
    define("fair-share", "The job gets its fair share.", GPUS, count("most", "its MAX", "GPUs")),
    define("grows-to-max", "Idle GPUs bring the job to its MAX.", GPUS),
    define("idle-type-helps", "Idle GPUs of another type make the job faster.", GPU_TYPE),
    define("share-on-present-type", "The share of the job on its present GPU type."),
    define("waits-for-min", "The job waits for its MIN.", GPUS, GPU_TYPE),
    define("no-gpu-type", "The directive names no GPU type of this cluster."),
)

BASELINES = (
    define("choice-no-place", "No GPUs are free for what the policy chose for the job."),
    define("runs-until-end", "A running job keeps its GPUs until it ends."),
    define("its-turn", "It is the turn of the job, and there is room."),
    define("job-came-first", "Another job came first.", JOB),
    define("fills-gap", "The job fills a gap before another job.", JOB),
    define("would-delay-job", "The job would delay another job.", JOB),
    define(
        "short-remaining", "Little time is left, and there is room.",
        seconds("left_s", "time left"),
    ),
    define("others-shorter", "Other jobs have less time left."),
    define(
        "least-service", "Little service is predicted for the job, less what it has waited.",
        number("service_s", "predicted service", "GPU seconds"), BECAUSE,
    ),
    define(
        "queue-turn", "The queue of the job has its turn, and there is room.",
        count("queue", "1 or 2"),
    ),
    define("others-less-served", "Other jobs have had fewer GPU hours."),
    define("others-turn", "It is the turn of other jobs in this round."),
    define(
        "time-share", "The job gets its share of GPU time.",
        GPU_TYPE, fraction("share", "share of the time"),
    ),
    define("left-over", "The job has no share, but GPUs were left over."),
    define(
        "speedup-search", "The genetic search found these GPUs for the job.",
        GPUS, GPU_TYPE, number("fair", "fair share of the job", "GPUs"),
    ),
    define("others-speedup-more", "The genetic search gave the GPUs to other jobs."),
    define(
        "auction-won", "The job won an auction of GPUs.",
        number("rho", "its finish-time fairness before it", optional=True),
    ),
    define("evolved-schedule", "The GPUs of the job in the best evolved schedule.", GPUS, GPU_TYPE),
    define("others-scheduled", "The best evolved schedule gives the GPUs to other jobs."),
    define(
        "schedule-waits-for-epoch",
        "A better schedule waits until each job that it changes has ended an epoch.",
    ),
    define("auction-left-over", "GPUs were left over after the auction."),
    define("lease-lasts", "The lease of the job lasts.", seconds("left_s", "rest of the lease")),
    define("others-less-fair", "Other jobs are further from their fair finish time."),
    define(
        "window-turn", "The plan gives the job rounds of the window, and there is room.",
        number("rounds", "rounds that it gets"), count("window", "rounds of the window"),
    ),
)  # fmt: skip

GOODPUT = (
    define("goodput-smallest", "The size with the smallest goodput of the job.", GPUS, GPU_TYPE),
    define(
        "goodput-chosen", "The size that was chosen by its goodput.",
        GPUS, GPU_TYPE, _TIMES, count("base_gpus", "GPUs of the smallest goodput", "GPUs"),
        Parameter("base_type", ParameterKind.GPU_TYPE, "GPU type of the smallest goodput"),
    ),
    define(
        "goodput-elsewhere", "What the best size of another GPU type would give.",
        GPUS, GPU_TYPE, _TIMES,
        word("why", "why it was not chosen", "lower", "equal", "restart", "contested"),
    ),
    define(
        "goodput-change", "What the change of a running job promises, as predicted.",
        number("times", "goodput, in multiples of that on the present GPUs"),
        GPUS, GPU_TYPE,
    ),
    define(
        "more-not-worth-restart", "More GPUs would be faster, but not worth a restart.",
        GPUS, GAIN, number("factor", "factor by which a restart lowers the goodput"),
    ),
    define("more-contested", "Other jobs gain more from further GPUs.", GPUS, _TIMES),
    define("unmeasured-bound", "No more GPUs before the job was measured on more.", GPUS),
    define("no-fit", "No GPUs of this cluster fit the directive and the model of the job."),
    define(
        "others-gain-its-gpus", "Other jobs gain more from the GPUs of the job.",
        GPUS, GPU_TYPE,
    ),
    define(
        "others-gain-more", "Other jobs gain more from all GPUs that it could use.",
        GPUS, GPU_TYPE,
    ),
    define("largest-with-place", "The largest size on its GPU type for which GPUs are free."),
    define(
        "solver-limit", "The time limit of the solver was reached: the best answer by then.",
        BECAUSE,
    ),
    define(
        "waited-longest", "The job waited for so long that its smallest size comes first.",
        seconds("waited_s", "the wait"), BECAUSE,
    ),
    define(
        "measures-type", "A short run on one idle GPU measures the speed of the job on its type.",
        GPU_TYPE, seconds("limit_s", "longest time that this takes"),
    ),
    define(
        "work-left", "The work that is left of the job decides how much its gain counts.",
        seconds("left_s", "time left on the chosen GPUs"),
        number("weight", "factor of its gain"),
    ),
    define(
        "layers-frozen", "Frozen layers lower what further GPUs would gain.",
        count("frozen", "frozen layers, from the first"), count("layers", "layers of the model"),
        count("held", "GPUs that it held, where it gives some up", "GPUs", optional=True),
        fraction("gain", "relative gain of holding those", optional=True),
        count("given", "GPUs that other jobs take", "GPUs", optional=True), JOBS, BECAUSE,
    ),
)  # fmt: skip

ELASTIC_BATCH = (
    define(
        "largest-sum",
        "With these GPUs the sum over all jobs is largest.",
        GPUS,
        GPU_TYPE,
        number("times", "speed, in multiples of that on one GPU"),
        count("batch", "samples per step", "samples", optional=True),
    ),
    define("min-for-now", "The job gets its MIN for now."),
    define("keeps-until-divided", "The job keeps its allocation.", BECAUSE),
    define("next-division", "GPUs are divided later.", moment("at", "when")),
    define(
        "turned-away",
        'The job is rejected, and not queued again ([elastic_batch] mode = "drop").',
        Parameter("reason", ParameterKind.REASON, "the reason for that", "", True),
    ),
    define("request-impossible", "Nothing that the job asks for is possible.", BECAUSE),
    define("too-few-in-cluster", "The cluster has not so many GPUs of an allowed type.", GPUS),
    define("batch-exceeds-memory", "No allowed batch fits into the memory of the allowed GPUs."),
    define("earlier-jobs-first", "Earlier jobs hold all GPUs or wait for them.", SHAPES),
)

DALLY = (
    define("lease-running", "The lease of the job runs.", UNTIL),
    define("protected", "No job takes the GPUs before this time.", UNTIL),
    define("lease-renewed", "A new lease begins: no earlier job in the order needs the GPUs."),
    define("lease-kept", "The job keeps its GPUs for another lease."),
    define("lease-until-job", "The nodes go to a job that has waited long.", JOB),
    define("lease-kept-by-shrink", "The job keeps its GPUs: other jobs take fewer.", JOBS),
    define(
        "waits-in-order", "The GPUs are held, or go to earlier jobs in the order.",
        SHAPES, _ORDER,
    ),
    define(
        "no-even-place", "No nodes have so many GPUs in even shares.",
        GPUS, GPU_TYPE,
    ),
    define(
        "waits-for-place", "The free GPUs are spread too far.",
        word("unit", "what is counted", "rack", "node", "link-domain"),
        count("nearest", "the fewest that the GPUs need"),
        count("spread", "those of the free GPUs"),
        fraction("speed", "part of its time that it would compute there"),
        seconds("waited_s", "how long the job has waited"),
        seconds("limit_s", "how long it waits at most", optional=True),
    ),
    define("starts-there", "The job starts.", _TIER),
    define(
        "starts-after", "The job starts after a wait.",
        _TIER, seconds("waited_s", "the wait"),
    ),
    define("starts-anywhere", "The job starts at once: distance costs it nothing.", _TIER),
    define(
        "starts-smaller", "The job starts on fewer GPUs than it asked for.",
        _TIER, GPUS, count("wanted", "GPUs that it asked for", "GPUs"),
    ),
    define("starts-by-shrink", "Other jobs shrink for the job.", _TIER, JOBS),
    define(
        "starts-smaller-for", "The job starts on fewer GPUs, so that another is not preempted.",
        GPUS, JOB,
    ),
    define("moves-for-earlier", "An earlier job in the order takes the GPUs of the job.", NODES),
    define(
        "gives-to-job", "The job gives GPUs to another, so that no job is preempted.",
        GPUS, JOB, Parameter("running", ParameterKind.FLAG, "whether the other job runs already"),
    ),
    define("gpus-to-earlier", "The GPUs of the job went to earlier jobs in the order."),
    define(
        "preempted-by", "The job gives way to an earlier job in the order.",
        JOB, _ORDER, number("value", "of the other job: hours left, or its sensitivity"),
    ),
    define("idle-type-faster", "Idle GPUs of another type are faster.", GPUS, GPU_TYPE, GAIN),
    define("grows-to-wanted", "Idle GPUs bring the job nearer to what it asked for.", GPUS),
    define("comes-together", "The job moves to GPUs that are nearer to each other.", GAIN),
    define("keeps-until-free", "The job keeps its GPUs until its new ones are free."),
    define("waits-for-nodes", "The job waits until its nodes are free.", NODES, BECAUSE),
)  # fmt: skip
