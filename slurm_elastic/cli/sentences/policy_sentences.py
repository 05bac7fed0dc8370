"""Sentences of `core.reasons.policy_codes`."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_elastic.cli.formatting import clock
from slurm_elastic.cli.sentences.phrases import (
    Parameters,
    Sentence,
    counted,
    gpus,
    job,
    nodes,
    numbered,
    shape,
    shapes,
)

_ELSEWHERE = {
    "lower": "",
    "restart": ", not worth a restart",
    "contested": ", others gain more from those",
}
_TIERS = {
    "gpu": "on one GPU",
    "node": "on one node",
    "rack": "in one rack",
    "network": "across racks",
}
_ORDERS = {
    "remaining-time": "least GPU time left",
    "network-sensitivity": "lowest network sensitivity",
}
#: A smaller gain counts as nothing.
_LEAST_GAIN = 0.005


def _goodput_chosen(p: Parameters) -> str:
    base = gpus(p["base_gpus"], p["base_type"])
    if p["base_gpus"] == 1:
        base = f"one {p['base_type'] or 'GPU'}"
    return f"{shape(p)}: goodput {p['times']:.1f} times {base}"


def _goodput_elsewhere(p: Parameters) -> str:
    if p["why"] == "equal":
        return f"{shape(p)} would give as much"
    return f"{shape(p)} would give {p['times']:.1f}{_ELSEWHERE[p['why']]}"


def _layers_frozen(p: Parameters) -> str:
    text = f"layers 1-{p['frozen']} of {p['layers']} frozen"
    if p["held"] is not None:
        gain = p["gain"]
        gain_text = f"{gain:.0%}" if gain is not None and gain >= _LEAST_GAIN else "nothing"
        text += f": {p['held']} GPUs would gain it {gain_text}"
    if p["given"]:
        text += f"; {p['given']} go to {numbered(p['jobs'])}"
    return f"{text}; {p['reason']}"


def _largest_sum(p: Parameters) -> str:
    batch = f", with {p['batch']} samples per step" if p["batch"] else ""
    return (
        f"with {shape(p)} for it the sum over all jobs is largest: {p['times']:.2f} times its"
        f" speed on one{batch}"
    )


def _turned_away(p: Parameters) -> str:
    reason = p["reason"] or "no room"
    return f'rejected, not queued again ([elastic_batch] mode = "drop"): {reason}'


def _waits_for_place(p: Parameters) -> str:
    unit = p["unit"].replace("-", " ")
    most = f" of at most {p['limit_s']:.0f} s" if p["limit_s"] is not None else ""
    return (
        f"waits for {counted(p['nearest'], unit)}: over {counted(p['spread'], unit)} it would"
        f" compute {p['speed']:.2f} of its time; waited {p['waited_s']:.0f} s{most}"
    )


def _preempted(p: Parameters) -> str:
    value = f"{p['value']:.1f} h" if p["order"] == "remaining-time" else f"{p['value']:.2f}"
    return f"gives way to {job(p)} ({_ORDERS[p['order']]}, {value})"


def _gives_to_job(p: Parameters) -> str:
    verb = "runs on" if p["running"] else "starts on"
    return f"gives {gpus(p['gpus'])}, which {job(p)} {verb}, so that no job is preempted"


SENTENCES: Mapping[str, Sentence] = {
    "next-size": "the next size for which GPUs are free",
    "nothing-better": "nothing else is better for it",
    "no-suitable-gpus": "no GPUs of this cluster suit it",
    "nothing-free": "nothing that it could run on is free",
    "assigned-not-free": "nothing else that it was given is free",
    "gpus-not-free": lambda p: f"{shape(p)} for it are not free yet",
    "more-not-faster": "more GPUs would not make it faster",
    "waits-for-shapes": lambda p: f"waits for {shapes(p['shapes'])}",
    "several": lambda p: "; ".join(p["reasons"]),
    "min-first": "its MIN",
    "min-share": "{gpus} is its MIN; each further GPU helps another job more",
    "fair-share": "its fair share is {gpus} of at most {most}",
    "grows-to-max": "idle GPUs bring it to its MAX of {gpus}",
    "idle-type-helps": "{gpu_type} GPUs are idle and make it faster",
    "share-on-present-type": "its share on its present type",
    "waits-for-min": lambda p: f"waits for {shape(p)}, its MIN",
    "no-gpu-type": "its directive names no type of GPU that this cluster has",
    "choice-no-place": "no GPUs are free for what was chosen for it",
    "runs-until-end": "runs until it ends",
    "its-turn": "its turn, and there is room",
    "job-came-first": lambda p: f"{job(p)} came first",
    "fills-gap": lambda p: f"fills a gap before {job(p)}",
    "would-delay-job": lambda p: f"would delay {job(p)}",
    "short-remaining": "about {left_s:.0f} s are left, and there is room",
    "others-shorter": "other jobs have less left to do",
    "least-service": lambda p: (
        f"{p['reason']}; about {p['service_s'] / 3600:.1f} GPU hours are predicted"
    ),
    "queue-turn": lambda p: (
        f"in the {'first' if p['queue'] == 1 else 'second'} queue, and there is room"
    ),
    "others-less-served": "other jobs have had fewer GPU hours",
    "others-turn": "other jobs have their turn in this round",
    "time-share": lambda p: (
        f"its share of {p['gpu_type'] or 'GPU'} time is {p['share']:.0%}; its turn"
    ),
    "left-over": "no share, but GPUs were left over",
    "speedup-search": lambda p: f"the search gave it {shape(p)}; its fair share is {p['fair']:g}",
    "others-speedup-more": "the search gave the GPUs to others",
    "auction-won": lambda p: (
        "new: nothing is known of its finish"
        if p["rho"] is None
        else f"won the auction; its finish-time fairness is {p['rho']:.2f}"
    ),
    "evolved-schedule": lambda p: f"the best evolved schedule gives it {shape(p)}",
    "others-scheduled": "the best evolved schedule gives the GPUs to others",
    "schedule-waits-for-epoch": "a better schedule waits until all that it changes end an epoch",
    "auction-left-over": "left over after the auction",
    "lease-lasts": "its lease lasts {left_s:.0f} s more",
    "others-less-fair": "others are further from their fair finish time",
    "window-turn": "gets {rounds:.1f} of the next {window} rounds, and there is room",
    "goodput-smallest": lambda p: f"{shape(p)}: its smallest goodput",
    "goodput-chosen": _goodput_chosen,
    "goodput-elsewhere": _goodput_elsewhere,
    "goodput-change": lambda p: f"{p['times']:.2f} times that of the present {shape(p)}",
    "more-not-worth-restart": (
        "{gpus} would be {gain:.0%} faster, but a restart would cost more (factor {factor:.2f})"
    ),
    "more-contested": "{gpus} would give {times:.1f}, others gain more",
    "unmeasured-bound": "no more than {gpus} before it was measured on more",
    "no-fit": "no GPUs of this cluster fit its directive and its model",
    "others-gain-its-gpus": lambda p: (
        f"others gain more from its GPUs; {shape(p)} would be its best"
    ),
    "others-gain-more": lambda p: (
        f"all GPUs that it could use help others more; {shape(p)} would be its best"
    ),
    "largest-with-place": "the largest size on its type for which GPUs are free",
    "solver-limit": "{reason} (the solver's time limit was hit: the best answer by then)",
    "waited-longest": "waited for {waited_s:.0f} s, so its smallest size comes first: {reason}",
    "measures-type": (
        "measures its speed on one idle {gpu_type}, of which nothing is known, for at most"
        " {limit_s:.0f} s"
    ),
    "work-left": (
        "about {left_s:.0f} s are left on these GPUs, so its gain counts {weight:.2f} times"
    ),
    "layers-frozen": _layers_frozen,
    "largest-sum": _largest_sum,
    "min-for-now": "its MIN for now",
    "keeps-until-divided": "keeps what it has: {reason}",
    "next-division": lambda p: f"GPUs are divided next at {clock(p['at'])}",
    "turned-away": _turned_away,
    "request-impossible": "nothing that it asks for is possible: {reason}",
    "too-few-in-cluster": "the cluster has no {gpus} GPUs of a type that it may have",
    "batch-exceeds-memory": (
        "no batch that it allows fits into the memory of the GPUs that it may have"
    ),
    "earlier-jobs-first": lambda p: (
        f"waits for {shapes(p['shapes'])}: earlier jobs hold all of them or wait for them"
    ),
    "lease-running": lambda p: f"keeps its GPUs: its lease ends at {clock(p['until'])}",
    "protected": lambda p: f"keeps its GPUs: no job takes them before {clock(p['until'])}",
    "lease-renewed": "keeps its GPUs for another lease: no job before it in the order needs them",
    "lease-kept": "keeps its GPUs for another lease",
    "lease-until-job": lambda p: (
        f"keeps its GPUs until {job(p)}, which waited long, can have the nodes"
    ),
    "lease-kept-by-shrink": lambda p: (
        f"keeps its GPUs: {numbered(p['jobs'])}"
        f" {'takes' if len(p['jobs'] or ()) == 1 else 'take'} fewer instead"
    ),
    "waits-in-order": lambda p: (
        f"waits for {shapes(p['shapes'])}; they are held, or go to jobs before it"
        f" ({_ORDERS[p['order']]})"
    ),
    "no-even-place": lambda p: f"waits: no nodes that it may use have {shape(p)} in even shares",
    "waits-for-place": _waits_for_place,
    "starts-there": lambda p: f"starts {_TIERS[p['tier']]}",
    "starts-after": lambda p: f"starts {_TIERS[p['tier']]} after {p['waited_s']:.0f} s",
    "starts-anywhere": lambda p: f"starts at once, {_TIERS[p['tier']]}: distance costs it nothing",
    "starts-smaller": lambda p: (
        f"starts {_TIERS[p['tier']]} with {p['gpus']} of {p['wanted']}:"
        " no place that it accepts has more"
    ),
    "starts-by-shrink": lambda p: (
        f"starts {_TIERS[p['tier']]}: {numbered(p['jobs'])}"
        f" {'shrinks' if len(p['jobs'] or ()) == 1 else 'shrink'} for it"
    ),
    "starts-smaller-for": lambda p: (
        f"starts on {gpus(p['gpus'])}, so that {job(p)} is not preempted"
    ),
    "moves-for-earlier": lambda p: f"moves to {nodes(p)}: a job before it takes its GPUs",
    "gives-to-job": _gives_to_job,
    "gpus-to-earlier": "waits: its GPUs went to jobs before it in the order",
    "preempted-by": _preempted,
    "idle-type-faster": lambda p: f"{shape(p)} are idle: {p['gain']:.0%} faster",
    "grows-to-wanted": "idle GPUs bring it nearer to the {gpus} that it asked for",
    "comes-together": "moves to one place: {gain:.0%} faster",
    "keeps-until-free": "keeps what it has until its new GPUs are free",
    "waits-for-nodes": lambda p: (
        f"waits until {nodes(p)} {'is' if len(p['nodes']) == 1 else 'are'} free: {p['reason']}"
    ),
}
