"""Codes of the reasons that esrun reports for a change of members that failed."""

from __future__ import annotations

from slurm_elastic.core.reasons.reason_definition import (
    GPUS,
    JOB,
    count,
    define,
    seconds,
    text,
)

_ERROR = text("error", "the error")

MEMBERS = (
    define("members-fixed", "The training cannot change its members now."),
    define("members-cancelled", "The controller cancelled the change of members."),
    define("members-ended", "The program ended during the change of members."),
    define(
        "companions-too-many", "The job would have too many companions.",
        count("most", "companions that a job may have"),
    ),
    define("sbatch-failed", "sbatch did not take a companion.", _ERROR),
    define(
        "sbatch-unanswered", "sbatch did not answer in time.",
        seconds("waited_s", "the time it had"),
    ),
    define("companion-late", "A companion did not join by the deadline.", JOB),
    define("companion-not-running", "A companion did not run in time.", JOB),
    define("companion-cancelled", "The controller cancelled a companion.", JOB),
    define("companion-fixed", "A companion ran when the members could not change any more.", JOB),
    define(
        "companion-size-differs", "A companion has another number of GPUs than ordered.",
        JOB, GPUS, count("ordered", "GPUs that were ordered", "GPUs"),
    ),
    define("companion-start-failed", "srun did not start the ranks of a companion.", JOB, _ERROR),
    define(
        "companion-exited", "The ranks of a companion ended.", JOB,
        count("exit_code", "exit code; 128 + n for signal n"),
    ),
    define(
        "companion-out-of-memory", "The ranks of a companion ran out of memory.", JOB,
        count("gpus", "GPUs of the training with them", "GPUs"),
        count("nodes", "nodes of the training with them"),
    ),
    define("companion-killed", "The ranks of a companion were killed.", JOB),
    define("companion-terminated", "Slurm ended a companion.", JOB),
    define(
        "companion-disconnected", "The script of a companion lost its connection to esrun.", JOB,
        text("error", "the error; empty: the script ended the connection"),
    ),
    define("companion-dropped", "Rank 0 continued without a companion.", JOB),
)  # fmt: skip

#: Codes that a report may have.
MEMBER_CODES = frozenset(definition.code for definition in MEMBERS)
