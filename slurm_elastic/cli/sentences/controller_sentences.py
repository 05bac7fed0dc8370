"""Sentences of `core.reasons.controller_codes`."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_elastic.cli.formatting import clock, size
from slurm_elastic.cli.sentences.phrases import Parameters, Sentence, duration, nodes, shape


def _elsewhere(p: Parameters) -> str:
    allocation = f"{shape(p)} on {nodes(p)}" if p["gpus"] else "no GPUs"
    return f"it runs on {allocation} instead"


def _no_progress(p: Parameters) -> str:
    progress = "it has reported no checkpoint"
    if p["step"] is not None:
        progress = f"its newest checkpoint is still of step {p['step']}"
    code = f"; exit code {p['exit_code']}" if p["exit_code"] else ""
    return f"no progress in {p['attempts']} attempts in a row: {progress}{code}"


def _refuted(p: Parameters) -> str:
    place = f"; the earlier checkpoint is in {p['directory']}" if p["directory"] else ""
    return (
        "after the restart it began at step 0: give the script its option to"
        f" resume and submit it again{place}"
    )


def _refused(p: Parameters) -> str:
    place = p["directory"] or "the directory of the checkpoints"
    room, gigabytes = "room", p["gigabytes"]
    if gigabytes is not None:
        room = f"{gigabytes:g} GB" if gigabytes >= 1 else size(1e9 * gigabytes)
    remedies = {
        "no-room": f"there is no room for a copy of its checkpoint: free {room} in {place}, or let"
        " the script replace its checkpoint by a rename",
        "not-writable": f"a copy of its checkpoint cannot be written: make {place} writable",
        "changes": "it saves faster than its checkpoint can be copied: save less often",
        "node-local": f"its checkpoints are in {place}, which each node has for itself: write them"
        " to a file system that all nodes share",
        "shared": "another task of its array writes checkpoints of the same pattern: write"
        " $SLURM_ARRAY_TASK_ID in it",
        "no-watch": "reads cannot be seen on its node: raise fs.inotify.max_user_instances or"
        " fs.inotify.max_user_watches; the job's log names the one that is too small",
    }
    return f"no rehearsal: {remedies[p['problem']]}"


def _trials_failed(p: Parameters) -> str:
    step = "" if p["step"] is None else f"; its newest checkpoint is of step {p['step']}"
    return f"{p['attempts']} attempts in a row failed, the last one: {p['reason']}{step}"


def _limits(p: Parameters) -> str:
    low, high = p["least"], p["most"]
    return f"the directive allows {low if low == high else f'{low}-{high}'}"


def _unsupported(p: Parameters) -> str:
    why = f": {p['why']}" if p["why"] else ""
    return f"its training cannot be changed in place{why}"


def _not_joined(p: Parameters) -> str:
    why = f": {p['reason']}" if p["reason"] else ""
    return f"not all companions joined in time{why}"


def _accumulation(p: Parameters) -> str:
    number = p["micro_batches"] or "N"
    remedy = (
        f"esrun --micro-batches {number} (a script that sets its accumulation in code must then"
        " take it from SLURM_ELASTIC_ACCUMULATION)"
        if number != 1
        else "--gradient_accumulation_steps N, an Nth of its batch size and esrun --micro-batches N"
    )
    return (
        "its checkpoints are named by steps, and its gradient accumulation is the same on"
        " any number of GPUs, so on another one it would resume at a wrong epoch: submit it again"
        f" with {remedy}, or with --micro-batches script to have it resized all the same"
        " (docs/esrun-global-batch.md)"
    )


SENTENCES: Mapping[str, Sentence] = {
    "job-ended": "the job ended meanwhile",
    "job-changed": "the job changed by itself",
    "directive-changed": "its new directive rules the change out",
    "job-left-gpus": "the job left its GPUs by itself",
    "gpus-taken": "its GPUs were taken meanwhile",
    "gpu-free-meanwhile": "a whole GPU has become free on its node meanwhile",
    "gpu-undivided": lambda p: f"the GPUs of {nodes(p)} are no longer divided into shards",
    "exchange-given-up": "a job with which it was to exchange GPUs keeps what it has",
    "held-in-slurm": "its owner or an administrator holds the job",
    "no-checkpoint": "no checkpoint within {notice_s:g} s",
    "started-by-others": "the job was started by others",
    "runs-elsewhere": _elsewhere,
    "launch-failed": "Slurm could not launch it",
    "not-started": "Slurm did not start it ({slurm_reason})",
    "node-down": "a node it was to run on is down or drained",
    "node-excluded": "a node it was to run on has been excluded for it meanwhile",
    "change-partial": "Slurm took only part of the change: {difference}",
    "slurm-refused": "{error}",
    "not-written": "the change could not be written to the ledger",
    "ended-unseen": "the job ended while the controller was not running",
    "controller-restarted": "the controller was restarted",
    "controller-stopped": "the controller was stopped",
    "controller-lost": "the controller that began it was lost",
    "nothing-planned": "nothing planned",
    "resume-rehearsal": "rehearsal: shows whether it resumes from its checkpoints",
    "resume-refuted": _refuted,
    "rehearsal-failed": "it failed when it was restarted for the rehearsal: see the job's log",
    "rehearsal-refused": _refused,
    "accumulation-fixed": _accumulation,
    "in-place-declined": "its directive says in-place=never",
    "in-place-unknown": "it has not said yet whether it can be changed in place",
    "in-place-unsupported": _unsupported,
    "in-place-failed": lambda p: (
        f"not before {clock(p['until'])}, since a change in place failed: {p['reason']}"
    ),
    "companions-unsuitable": (
        "it failed in companions and worked with as many GPUs after a requeue; its batch"
        " script may prepare something on its nodes, such as copies of data"
    ),
    "companions-refused": "its esrun could not submit companions: {reason}",
    "companions-unanswered": "its esrun did not submit companions in time",
    "companions-not-joined": _not_joined,
    "companion-waits": "Slurm did not start a companion ({slurm_reason})",
    "companion-ended": "companion {job} ended before it had joined",
    "companion-failed": "the ranks of companion {job} failed before the next checkpoint",
    "companion-orphaned": "the job that it is a companion of does not run any more",
    "companion-unknown": "the job that it is a companion of does not train on it",
    "limit-set-by-others": "it was set by others: it is not extended any more",
    "program-failed": "exit code {exit_code} before its first checkpoint there",
    "program-ended": "it ended with exit code 0 and wrote no checkpoint there",
    "no-newer-checkpoint": lambda p: f"no newer checkpoint within {duration(p['waited_s'])}",
    "change-failed": lambda p: f"it failed on {shape(p)}: {p['reason']}",
    "trials-failed": _trials_failed,
    "no-progress": _no_progress,
    "batch-limits": _limits,
    "noise-unknown": "its gradient noise is not known yet",
    "batch-does-not-fit": "{batch} do not fit into the memory that it is known to use",
    "batch-gains-little": "{batch} would gain {gain:.1%}, a change must gain {min_gain:.0%}",
    "batch-goodput": "goodput {gain:+.0%} over that of {present}",
    "batch-by-policy": "the policy chose {batch} for {gpus} GPUs",
    "slurm-unreachable": "{error}",
    "ledger-unwritable": "{error}",
    "internal-error": "internal error: {error}",
    "solver-fallback": "HiGHS decided the last round in place of {solver}: {error}",
    "nodes-not-switched": "no node is switched off or on: {error}",
    "nice-not-counted": (
        "[durations] rigid_nice has no effect: PriorityType is {error}, not priority/multifactor"
    ),
    "other-controller": "{error}",
    "text": lambda p: "(not shown)" if p["text"] is None else str(p["text"]),
}
