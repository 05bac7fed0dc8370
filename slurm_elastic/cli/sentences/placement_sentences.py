"""Sentences of `core.reasons.placement_codes`."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_elastic.cli.formatting import clock
from slurm_elastic.cli.sentences.phrases import (
    Parameters,
    Sentence,
    counted,
    duration,
    give_way,
    gpus,
    job,
    job_of,
    jobs_of,
    nodes,
    shape,
)

_ACTIONS = {
    "grow": "grow to",
    "shrink": "shrink to",
    "move": "move to",
    "preempt": "wait",
}


def _no_place(p: Parameters) -> str:
    on_nodes = f" on {nodes(p)}" if p["nodes"] else ""
    return f"no place that it may use has {shape(p)} free{on_nodes}"


def _growth_not_supported(p: Parameters) -> str:
    if p["option"] == "reservation":
        return "no job gets further GPUs while it is in a reservation of its user"
    return (
        "with its --constraint no job gets further GPUs: only names with &, | and (), and one"
        " [a|b], are supported"
    )


def _not_linked(p: Parameters) -> str:
    where = {"domain": "one link domain", "node": "one node"}[p["reach"]]
    return (
        f"{shape(p)} are free only where a spatial group of {p['group']} GPUs would leave {where}"
        " ([topology] spatial_reach)"
    )


def _too_far(p: Parameters) -> str:
    limit = "any length of time" if p["limit_s"] is None else f"at most {p['limit_s']:.0f} s"
    return (
        f"over {counted(p['spread'], p['unit'])} it would run at {p['speed']:.2f} of its speed in"
        f" {counted(p['nearest'], p['unit'])}; it waited {p['waited_s']:.0f} s of {limit} for that"
    )


def _change(p: Parameters) -> str:
    if p["change"] == "type":
        return f"changing to {shape(p)}"
    return "moving" if p["change"] == "move" else f"growing to {p['gpus']}"


def _not_paid_back(p: Parameters) -> str:
    return (
        f"{_change(p)} would gain {p['gain']:.0%}, less in {duration(p['window_s'])} than the"
        f" {p['cost_s']:.0f} s it costs"
    )


def _consolidates(p: Parameters) -> str:
    cost, gain = p["cost_s"], p["gain"]
    return (
        f"moves to {counted(p['spread'], p['unit'])}: {1 + gain:.2g} times as"
        f" fast, pays back its {cost:.0f} s in {duration(cost + cost / max(gain, 1e-9))}"
    )


def _stays_spread(p: Parameters) -> str:
    text = f"stays spread over {counted(p['spread'], p['unit'])}: moving together would"
    if p["window_s"] is None:
        return f"{text} gain only {p['gain']:.0%}"
    return (
        f"{text} gain {p['gain']:.0%}, less in {duration(p['window_s'])} than the"
        f" {p['cost_s']:.0f} s it costs"
    )


def _waiting_job(p: Parameters) -> str:
    kind = "elastic" if p["elastic"] else "rigid"
    return f"{job_of(p)} ({kind}, waiting {duration(p['waited_s'])})"


def _last_gpus(p: Parameters) -> str:
    which = f"each of its last {p['gpus']} GPUs" if p["gpus"] > 1 else "its last GPU"
    gain = f"{p['part']:.0%} of its speed"
    if p["speed"] is not None:
        gain = f"{p['speed']:.3g} {p['unit']}"
    compared = ", and no other job would gain more from it" if p["compared"] else ""
    return f"{which} adds {gain}{compared}"


def _share_used(p: Parameters) -> str:
    whose = {
        "site": "elasticity",
        "partition": f"elasticity in partition {p['partition']}",
        "user": f"{p['user']}'s elasticity" if p["user"] else "the elasticity of its user",
    }[p["scope"]]
    return f"{whose} may have {p['most']} GPUs above MIN ([limits]), and {p['used']} are in use"


def _resizes_used(p: Parameters) -> str:
    quota_owner = "the site" if p["scope"] == "site" else p["user"] or "its user"
    end = f", until {clock(p['until'])}" if p["until"] is not None else ""
    if p["used"] < p["most"]:
        end = ", and others come first"
    return f"{quota_owner} has used {p['used']} of {p['most']} resizes this hour{end}"


def _own_speed(p: Parameters) -> str:
    return f"about {p['speed']:.0%} of its speed alone"


def _refused(p: Parameters) -> str:
    target = f" {p['gpus']} {p['gpu_type']}".rstrip() if p["gpus"] else ""
    return f"would {_ACTIONS[p['action']]}{target}, but {p['reason']}"


SENTENCES: Mapping[str, Sentence] = {
    "keeps-allocation": "keeps what it has",
    "keeps-for-now": "keeps what it has for now",
    "waits": "waits",
    "gpus-given-up-first": lambda p: f"{shape(p)} on {nodes(p)}, which others give up first",
    "shrink-undone": "no other job needs its GPUs more",
    "takes-promised-gpus": "takes the GPUs that were given up for it",
    "trade-not-worth": "giving GPUs to others would cost more than they gain",
    "no-place": _no_place,
    "growth-not-supported": _growth_not_supported,
    "group-not-linked": _not_linked,
    "nodes-not-free": lambda p: f"{nodes(p)} are not free for it",
    "in-place-no-room": lambda p: (
        f"its nodes have no room to change it to {shape(p)} without a requeue"
    ),
    "gpus-short": "there are not enough free GPUs for it",
    "no-choice-free": "nothing that its policy chose for it is free",
    "makes-room": "changes nodes so that other jobs get whole nodes",
    "waits-for-nearer-place": "waits for a nearer place: {reason}",
    "place-too-far": _too_far,
    "change-gains-nothing": lambda p: f"{_change(p)} would gain nothing",
    "change-gains-little": lambda p: f"{_change(p)} would gain only {p['gain']:.0%}",
    "change-not-paid-back": _not_paid_back,
    "consolidates": _consolidates,
    "stays-spread": _stays_spread,
    "leaves-neighbour": lambda p: (
        f"moves away from {job(p)}: side by side one of them is {1 - p['speed']:.0%} slower;"
        f" {p['gain']:.0%} more speed in all for {duration(p['cost_s'])} without training"
    ),
    "shares-gpu": lambda p: f"has half of a GPU beside {job_of(p)}",
    "halves-gpu": lambda p: (
        f"gives half of its GPU to {job_of(p)}: {_own_speed(p)},"
        f" after {duration(p['cost_s'])} without training"
    ),
    "starts-on-half": lambda p: f"starts on half of the GPU of {job_of(p)}: {_own_speed(p)}",
    "half-given-first": lambda p: f"half of a GPU, which {job_of(p)} gives first",
    "leaves-shared-gpu": lambda p: (
        f"leaves the GPU that it shares with {job_of(p)} for one of its own:"
        f" {p['gain']:.0%} more speed in all for {duration(p['cost_s'])} without training"
    ),
    "slows-partner": lambda p: (
        f"waits again: beside {job_of(p)} one of them runs at {p['speed']:.0%} of its speed"
    ),
    "clears-node": lambda p: (
        f"moves off {nodes(p)} so that the node can sleep, for up to {duration(p['left_s'])}:"
        f" {duration(p['cost_s'])} without training"
    ),
    "changes-places": lambda p: (
        f"exchanges its GPUs with {job(p)}, which moves first; then: {p['reason']}"
    ),
    "exchanges-gpus": lambda p: f"exchanges GPUs with {jobs_of(p)}: {p['reason']}",
    "waits-for-job": lambda p: f"waits so that {_waiting_job(p)}, of higher priority, can start",
    "gives-gpus": lambda p: f"gives {gpus(p['gpus'])} so that {_waiting_job(p)} can start",
    "moves-for-job": lambda p: (
        f"moves to {nodes(p)} so that {_waiting_job(p)} finds {gpus(p['gpus'])} together"
    ),
    "jobs-give-way": lambda p: f"{shape(p)}: {give_way(p)}",
    "nodes-boot": lambda p: f"{nodes(p)} must boot for it",
    "gpus-kept": lambda p: f"{shape(p)}, kept for it on {nodes(p)}",
    "no-room-for-min": lambda p: f"{shape(p)}: not even its MIN has room, and no job can give way",
    "job-gets-gpus": lambda p: f"{job_of(p)} gets {gpus(p['gpus'])} on {nodes(p)}: {give_way(p)}",
    "job-needs-gpus": lambda p: f"{job_of(p)} needs {gpus(p['gpus'])}",
    "freed-gpus-kept": lambda p: (
        f"{job_of(p)} needs {gpus(p['gpus'])} and freed ones are kept for it"
    ),
    "holds-max": "{gpus} is its MAX",
    "holds-min": "{gpus} is its MIN",
    "limit-reached": "{limit} is reached",
    "no-gpu-idle": lambda p: (
        f"no {p['gpu_type'] or 'GPU'} is idle, and no other job would lose less than it gains"
    ),
    "idle-gpus-useless": lambda p: f"none of the {shape(p)} that are idle would help it enough",
    "last-gpus-worth": _last_gpus,
    "nodes-share-rack": "its {count} nodes share one rack",
    "across-racks": (
        "across {racks} racks it runs at {speed:.2f} of its speed in one,"
        " which had no room or was not worth the move"
    ),
    "change-under-way": "a change is under way",
    "not-managed": "not managed",
    "partition-not-managed": "partition {partition} is not managed",
    "limit-awaited": "another job waits for the same limit ({slurm_reason}) and would start in its"
    " place if it were requeued",
    "partition-down": "partition {partition} is not up, a requeued job would wait there",
    "gpus-not-managed": "node {node} has GPUs of several types, or slices of GPUs (MIG):"
    " jobs there are not resized",
    "slurm-starts": "Slurm starts it",
    "job-ending": "it is ending",
    "job-suspended": "it is suspended",
    "gpus-unknown": "its GPUs are not known",
    "no-requeue": "submitted with --no-requeue",
    "held-by-command": "held by `selastic hold`",
    "not-proven": "it is not proven yet: it has to write a checkpoint and resume from it",
    "training-jumped": lambda p: (
        f"its training state jumped after a resize ({p['difference']}): keep the global batch and"
        " the schedule (docs/esrun-global-batch.md), or give a program for one process one GPU"
        " (--elastic=1-1), and submit it again"
    ),
    "no-report": "waits for the first report of esrun in this run",
    "save-missed": lambda p: f"it did not save in time; asked again after {clock(p['until'])}",
    "resizes-forbidden": "no resizes are allowed (per_hour = 0)",
    "job-resizes-used": lambda p: (
        f"{p['most']} resizes an hour are used up until {clock(p['until'])}"
    ),
    "minimum-interval": lambda p: f"minimum interval until {clock(p['until'])}",
    "change-on-trial": lambda p: (
        f"it has written no checkpoint since its change at {clock(p['since'])}"
    ),
    "time-limit-near": lambda p: (
        f"its time limit ends it at {clock(p['until'])}: a change would not be worth it"
    ),
    "interactive": "interactive: only batch jobs can be requeued",
    "heterogeneous": "a component of a heterogeneous job",
    "held-while-running": (
        "held by its owner or an administrator: a requeue would leave it in the queue"
    ),
    "licenses-lost": "has licenses, which this release of Slurm loses at a requeue",
    "array-waits": "tasks of an array that never ran: Slurm starts them",
    "several-gpu-types": "holds GPUs of several types",
    "no-gpus-held": "runs, and Slurm shows no GPUs of it",
    "directive-invalid": "{error}",
    "record-unreadable": "cannot be read: {error}",
    "share-used": _share_used,
    "resizes-used": _resizes_used,
    "change-refused": _refused,
}
