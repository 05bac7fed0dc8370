"""Codes of the reasons that the controller gives: transitions, batches, holds, notes."""

from __future__ import annotations

from slurm_elastic.core.reasons.reason_definition import (
    BECAUSE,
    GPU_PART,
    GPU_TYPE,
    GPUS,
    JOB,
    NODES,
    UNTIL,
    Parameter,
    ParameterKind,
    count,
    define,
    fraction,
    number,
    seconds,
    text,
    word,
)

#: Why the checkpoint of an unmodified script cannot be kept for a rehearsal.
REHEARSAL_REFUSALS = (
    "no-room", "not-writable", "changes", "no-watch", "node-local", "shared",
)  # fmt: skip

_BATCH = count("batch", "samples per step", "samples")
_ERROR = text("error", "the error")

TRANSITIONS = (
    define("job-ended", "The job ended meanwhile."),
    define("job-changed", "The job changed by itself."),
    define("directive-changed", "The owner gave the job a directive that rules the change out."),
    define("job-left-gpus", "The job left its GPUs by itself."),
    define("gpus-taken", "The GPUs were taken meanwhile."),
    define("gpu-free-meanwhile", "A whole GPU of the node has become free meanwhile."),
    define("gpu-undivided", "The GPUs of the node are no longer divided into shards.", NODES),
    define("exchange-given-up", "Another job of an exchange of GPUs keeps what it has."),
    define("held-in-slurm", "The owner of the job or an administrator holds it."),
    define(
        "no-checkpoint", "The job wrote no checkpoint in time.",
        seconds("notice_s", "the time it had"),
    ),
    define("started-by-others", "The job was started by others."),
    define(
        "runs-elsewhere", "The job runs on other GPUs than planned.",
        GPUS, GPU_TYPE, NODES, GPU_PART,
    ),
    define("launch-failed", "Slurm could not launch the job."),
    define(
        "not-started", "Slurm did not start the job.",
        text("slurm_reason", "the reason that Slurm shows"),
    ),
    define("node-down", "A planned node is down or drained."),
    define("node-excluded", "A planned node has been excluded for the job."),
    define(
        "change-partial", "Slurm took only part of the change.",
        text("difference", "what differs"),
    ),
    define("slurm-refused", "Slurm refused the change.", _ERROR),
    define("not-written", "The change could not be written to the ledger."),
    define("ended-unseen", "The job ended while the controller was not running."),
    define("controller-restarted", "The controller was restarted."),
    define("controller-stopped", "The controller was stopped."),
    define("controller-lost", "The controller that began the change was lost."),
    define("nothing-planned", "No change of the job is planned."),
    define(
        "resume-rehearsal",
        "The job is requeued once, to show that it resumes from its checkpoints.",
    ),
    define(
        "resume-refuted",
        "The script started anew when it was restarted: it does not resume.",
        text("directory", "with the checkpoint from before the restart", optional=True),
    ),
    define(
        "accumulation-fixed",
        "On another number of GPUs the script would resume at a wrong epoch: its accumulation is"
        " the same on any.",
        count(
            "micro_batches", "to be given to esrun; 1: one batch cannot be shared", optional=True
        ),
    ),
    define("rehearsal-failed", "The script failed when it was restarted for the rehearsal."),
    define(
        "rehearsal-refused", "The checkpoint cannot be kept, so there is no rehearsal.",
        word(
            "problem", "why it cannot be kept",
            *REHEARSAL_REFUSALS,
        ),
        text("directory", "in which it would be kept", optional=True),
        number("gigabytes", "to be freed there", "GB", optional=True),
    ),
    define("limit-set-by-others", "The time limit was set by others: it is not extended any more."),
)  # fmt: skip

IN_PLACE = (
    define("in-place-declined", "The directive says in-place=never."),
    define("in-place-unknown", "The job has not said yet whether it can be changed in place."),
    define(
        "in-place-unsupported", "The training cannot be changed in place.",
        text("why", "a code of the training library"),
    ),
    define(
        "in-place-failed",
        "A change in place failed, so the job is changed by requeues for some time.",
        BECAUSE, UNTIL,
    ),
    define(
        "companions-unsuitable",
        "The program failed in companions, and worked with as many GPUs after a requeue, so the job"
        " is changed by requeues.",
    ),
    define("companions-refused", "esrun could not submit companions.", BECAUSE),
    define("companions-unanswered", "esrun did not say in time that it has submitted companions."),
    define(
        "companions-not-joined", "The ranks of companions did not join in time.",
        Parameter("reason", ParameterKind.REASON, "the reason, if esrun gave one", optional=True),
    ),
    define(
        "companion-waits", "Slurm did not start a companion.",
        text("slurm_reason", "the reason that Slurm shows"),
    ),
    define("companion-ended", "A companion ended before it had joined.", JOB),
    define(
        "companion-failed", "The ranks of a companion failed before the next checkpoint.", JOB
    ),
    define("companion-orphaned", "The job that this is a companion of does not run any more."),
    define("companion-unknown", "The job that this is a companion of does not train on it."),
)  # fmt: skip

_EXIT_CODE = count("exit_code", "exit code; 128 + n for signal n")

TRIALS = (
    define(
        "program-failed", "The program failed before it completed a checkpoint.", _EXIT_CODE,
    ),
    define(
        "program-ended", "The program ended with exit code 0 and without a checkpoint of its own.",
    ),
    define(
        "no-newer-checkpoint", "The program ran on without a newer checkpoint.",
        seconds("waited_s", "the time it had"),
    ),
    define(
        "change-failed", "The job failed in this shape and goes back.",
        GPUS, GPU_TYPE, BECAUSE, GPU_PART,
    ),
)  # fmt: skip

GUARD = (
    define(
        "trials-failed", "Attempts in a row failed before they completed a checkpoint.",
        count("attempts", "attempts that failed"),
        count("step", "step of the newest checkpoint", optional=True), BECAUSE,
    ),
    define(
        "no-progress", "Attempts in a row ended without progress.",
        count("attempts", "attempts without progress"),
        count("step", "step of the newest checkpoint", optional=True),
        count("exit_code", "exit code of the last attempt", optional=True),
    ),
)  # fmt: skip

BATCH = (
    define(
        "batch-limits", "The directive allows these batches.",
        count("least", "smallest batch", "samples"), count("most", "largest batch", "samples"),
    ),
    define("noise-unknown", "The gradient noise of the job is not known yet."),
    define("batch-does-not-fit", "The batch does not fit into the known memory.", _BATCH),
    define(
        "batch-gains-little", "The best batch would gain too little.",
        _BATCH, fraction("gain", "relative gain of goodput"),
        fraction("min_gain", "gain that a change needs"),
    ),
    define(
        "batch-goodput", "The new batch has a better goodput.",
        fraction("gain", "relative gain of goodput"), count("present", "present batch", "samples"),
    ),
    define("batch-by-policy", "The policy chose the batch.", _BATCH, GPUS),
)  # fmt: skip

NOTES = (
    define("slurm-unreachable", "Slurm does not answer.", _ERROR),
    define("ledger-unwritable", "The ledger cannot be written.", _ERROR),
    define("internal-error", "An internal error.", _ERROR),
    define(
        "solver-fallback", "The configured solver gave no answer: HiGHS decided the round.",
        text("solver", "as in elastic.toml"), _ERROR,
    ),
    define("nodes-not-switched", "Slurm does not switch idle nodes off and on.", _ERROR),
    define("nice-not-counted", "Slurm does not count nice values in priorities.", _ERROR),
    define("other-controller", "Another controller seems to act on this cluster.", _ERROR),
    define(
        "text",
        "A sentence of a site's own policy, an older esrun, or a ledger of slurm-elastic 0.1.0.",
        Parameter("text", ParameterKind.SENTENCE, "the sentence"),
    ),
)  # fmt: skip
