"""`selastic explain`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from slurm_elastic.cli import client, formatting, options
from slurm_elastic.cli.decisions import ended_job, neighbours
from slurm_elastic.cli.reason_text import text as reason_text
from slurm_elastic.cli.sentences.phrases import counted
from slurm_elastic.cli.status import probable_start, waits_for
from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.core.nodelist import fold

if TYPE_CHECKING:
    from slurm_elastic.rpc.answers import Waiting
    from slurm_elastic.rpc.decision_answers import (
        ChangeRow,
        DecisionRow,
        EndingRow,
        ExplainAnswer,
        ModelRow,
        TypeRow,
    )

_VERBS = {
    "keep": "stays",
    "start": "starts with",
    "grow": "grows to",
    "shrink": "shrinks to",
    "move": "moves to",
    "preempt": "gives all its GPUs and waits",
}
_WOULD = {
    "keep": "stay",
    "start": "start with",
    "grow": "grow to",
    "shrink": "shrink to",
    "move": "move to",
    "preempt": "give all its GPUs and wait",
}

_RECORD_REPLACED = (
    "its AdminComment has another text than job_submit.lua wrote; the directive read before counts"
)

#: Column in which the texts of `explain` begin.
_INDENT = 18


@options.verb
@click.argument("job", metavar="JOBID")
@options.as_json
def explain(job: str, json_: bool) -> None:
    """Explain why a job holds what it holds, and what comes next.

    Also shows the cost of its last resize, and its estimated speed; for a job that has
    ended, how it ended.
    """
    answer: Any = client.ask("explain", jobs=[job])
    if json_:
        options.put_json(answer)
    else:
        options.put(formatting.wrapped(explained(answer), _INDENT))


def explained(answer: ExplainAnswer) -> list[str]:
    """Return the lines of `explain`."""
    if ended := answer.get("ended"):
        return _ended(answer, ended)
    job, decision = answer["job"], answer["decision"]
    lines = [_state(answer)]
    waiting = job["waiting"]
    is_unproven = job["elastic"] and waiting is None and not answer["proven"]

    def add(label: str, text: str) -> None:
        if text:
            ending = "" if text.endswith((".", "?", "!")) else "."
            lines.append(f"  {label + ':':<{_INDENT - 3}} {formatting.clean(text)}{ending}")

    for label, text in _decided(decision, answer, is_unproven=is_unproven):
        add(label, text)
    add("Start", _start(waiting, answer["time"]) if waiting else "")
    add("Learned", _goodput(answer["model"]))
    add("Next sizes", _next_sizes(answer["model"]))
    add("Batch", _batch(answer))
    add("Layout", _layout(answer))
    add("Exchange", _exchange(answer))
    add("Plans", _plans(answer))
    if is_unproven:
        add("Not yet", _not_yet(answer))
    if job["elastic"] and job["state"] == "RUNNING" and not answer["reporting"]:
        add("Silent", "it has not reported in this run")
        add(
            "Remedy",
            "if its batch script starts the program with srun, torchrun or submitit, write esrun"
            " there (docs/esrun-launchers.md): without it a job is never resized",
        )
    if job["stopped"]:
        add("Stopped", reason_text(job["stopped"]))
        add("Remedy", f"correct the script, then `selastic release {job['display_id']}`")
    if job["held"]:
        add("Held", f"nothing changes until `selastic release {job['display_id']}`")
    add("On trial", _on_trial(answer))
    add("Going back", reason_text(answer.get("failed")))
    add("Barred", _barred(answer))
    add("Record", _RECORD_REPLACED if answer.get("record_replaced") else "")
    add("Companions", _companions(answer))
    add("Neighbours", neighbours.sentence(answer))
    add("Not used", _unmanaged_nodes(answer))
    add("In place", _not_in_place(answer))
    add("Time limit", _time_limit(answer))
    add("Next", _next_change(answer))
    if decision and decision["action"] != "keep" and not job["transition"]:
        add("Because", reason_text(decision["reason"]))
    if answer["last"]:
        add(*_last_change(answer["last"], answer["time"]))
    return lines


def _unmanaged_nodes(answer: ExplainAnswer) -> str:
    """Return the note on nodes with GPUs that are not managed, onto which no job grows, or ""."""
    names = fold(answer.get("unmanaged_nodes", ()))
    return (
        f"{names}: no job grows onto nodes with several GPU types or slices (MIG)" if names else ""
    )


def _decided(
    decision: DecisionRow | None, answer: ExplainAnswer, *, is_unproven: bool
) -> Iterator[tuple[str, str]]:
    """Yield the lines of a decision: label and reason.

    Args:
        decision: of the last round.
        answer: the answer that it is a part of.
        is_unproven: whether another line says that the job is not proven, and why.
    """
    if decision is None:
        return
    more, fewer, here = decision["why_not_more"], decision["why_not_fewer"], decision["why_here"]
    yield "Why not more", reason_text(more)
    yield "Why not fewer", reason_text(fewer)
    yield "Why here", reason_text(here)
    held_back, is_explained = decision["waiting_for"], bool(more or fewer or here)
    if decision["action"] == "keep" and (answer["model"] or not is_explained):
        yield "Why", "" if decision["reason"] == held_back else reason_text(decision["reason"])
    is_said = held_back == answer["unproven"] or (
        isinstance(held_back, dict) and held_back["code"] == "not-proven"
    )
    yield "Held back", "" if is_unproven and is_said else reason_text(held_back)


def _ended(answer: ExplainAnswer, ended: EndingRow) -> list[str]:
    """Return the lines of `explain` of a job that has ended."""
    details = [*ended_job.details(answer, ended), ("Barred", _barred_shapes(answer))]
    if answer["last"]:
        details.append(_last_change(answer["last"], answer["time"]))
    return [
        f"  {label + ':':<{_INDENT - 3}} {formatting.clean(text)}." if label else f"{text}."
        for label, text in details
        if text
    ]


def _exchange(answer: ExplainAnswer) -> str:
    """Return how gradients are exchanged, where a job has a choice."""
    row = answer.get("exchange")  # a controller of an older release sends none
    if row is None:
        return ""
    way = f"gradients are sent by schedule {row['schedule']}"
    if row["exposed"] is None:
        return way
    share = f"{row['exposed']:.0%} of the time that the exchange takes alone"
    return f"{way}, which lengthens a step by {share}"


def _layout(answer: ExplainAnswer) -> str:
    """Return how the job divides model and samples, unless each GPU has the whole model."""
    text = answer.get("layout", "")  # a controller of an older release sends none
    try:
        plan = ExecutionPlan.parse(text)
    except InvalidInputError:
        return text
    if plan.space > 1:
        return f"{counted(plan.replicas, 'spatial group')} of {plan.space} GPUs ({text})"
    if plan.stages > 1:
        return f"a pipeline of {plan.stages} stages ({text})"
    return "" if plan.plain else f"{counted(plan.replicas, 'replica')} ({text})"


def _plans(answer: ExplainAnswer) -> str:
    """Return the plan that the controller has ordered, and the speeds in the present allocation."""
    row = answer.get("plans")  # a controller of an older release sends none
    if row is None:
        return ""
    held = answer["job"]["gpus"], answer["job"]["gpu_type"]
    speeds = ", ".join(
        f"{speed['plan'] or 'own choice'} {speed['samples_per_s']:.3g}/s"
        for speed in sorted(row["measured"], key=lambda r: -r["samples_per_s"])
        if (speed["gpus"], speed["gpu_type"]) == held
    )
    text = f"{row['ordered']} is ordered" if row["ordered"] else "the job's own choice"
    too_large = ", ".join(
        oversized["plan"] or "own choice"
        for oversized in row.get("out_of_memory", [])  # likewise
        if (oversized["gpus"], oversized["gpu_type"]) == held
    )
    text += f"; samples measured here: {speeds}" if speeds else ""
    return f"{text}; out of memory here: {too_large}" if too_large else text


def _not_yet(answer: ExplainAnswer) -> str:
    text = "it is resized once it has written a checkpoint and read it back"
    reason = reason_text(answer.get("unproven"))
    return f"{text}; {reason}" if reason else text


def _not_in_place(answer: ExplainAnswer) -> str:
    """Return why a job is changed by requeues, where that is not just its kind of program."""
    reason = answer.get("not_in_place")
    if reason is None or reason["code"] == "in-place-unknown":
        return ""
    is_restarted = reason["parameters"].get("why") in ("restarted", "launcher")
    return "" if is_restarted else reason_text(reason)  # no requeue: all ranks are started again


def _on_trial(answer: ExplainAnswer) -> str:
    """Return since when a change waits for a newer checkpoint; "" if it does not."""
    since = answer.get("on_trial")
    if since is None:
        return ""
    return (
        f"the change at {formatting.clock(since, answer['time'])} is done once the job has written"
        " a newer checkpoint; if it fails before, it goes back"
    )


def _barred(answer: ExplainAnswer) -> str:
    """Return the shapes that the job is not given any more, and the remedy; "" without any."""
    shapes = _barred_shapes(answer)
    remedy = f"`selastic release {answer['job']['display_id']}` allows them again"
    return f"{shapes}; {remedy}" if shapes else ""


def _barred_shapes(answer: ExplainAnswer) -> str:
    """Return the shapes in which the job failed, and the reasons; "" without any."""
    return ", ".join(
        f"{formatting.gpus(r['gpus'], r['gpu_type'], half=r.get('half', False))}"
        f" ({reason_text(r['reason'])})"
        for r in answer.get("barred") or []
    )


def _time_limit(answer: ExplainAnswer) -> str:
    """Return the time limit and why it was extended; "" if it was not."""
    if not answer["extended_s"] or answer["time_limit_s"] is None:
        return ""
    held, submitted = answer["job"]["gpus"], answer["submitted_gpus"]
    reason = f"since it runs on {held} of {submitted} GPUs"
    if not held:
        reason = f"since it is to start on fewer than {submitted} GPUs"
    elif held >= submitted:
        reason = f"for the time that it had fewer than its {submitted} GPUs"
    limit = formatting.duration(answer["time_limit_s"])
    extension = formatting.duration(answer["extended_s"])
    return f"{limit}, extended by {extension} {reason}"


def _state(answer: ExplainAnswer) -> str:
    job, now = answer["job"], answer["time"]
    name = f"{job['display_id']} {formatting.clean(job['name'])}"
    since = f" since {formatting.clock(answer['since'], now)}" if answer["since"] else ""
    if job["waiting"] is not None:
        text = f"{name} waits for {formatting.gpus(job['waiting']['gpus'], '')}{since}"
        reason = waits_for(job["waiting"])
        text += f": {reason}." if reason else "."
        if job["waiting"]["kept_until"]:
            text += f" Kept for it until {formatting.clock(job['waiting']['kept_until'], now)}."
        return text
    placement = formatting.spelled(job["where"])
    held = formatting.gpus(job["gpus"], job["gpu_type"], half=job.get("half", False))
    text = f"{name} holds {held} on {placement}{since}." if placement else f"{name} holds no GPU."
    if job["unmanaged_reason"]:
        return f"{text} It is not managed: {reason_text(job['unmanaged_reason'])}."
    return text if job["elastic"] else f"{text} It is not elastic: it keeps them until it ends."


def _start(waiting: Waiting, now: float) -> str:
    """Return when a waiting job will probably start; "" if that is not known."""
    start = probable_start(waiting)
    if start is None:
        return ""
    median, latest = (formatting.clock(start[name], now) for name in ("median", "p90"))
    return (
        f"probably at {median}, with 90% probability by {latest}, by the predicted run times of"
        " the jobs before it; later if jobs of higher priority come"
    )


def _goodput(model: ModelRow | None) -> str:
    """Return the expected goodput by GPU type: `4 a100: 160 samples/s (measured), ...`."""
    if model is None:
        return ""
    shown = [t for t in model["types"] if t["goodput"]]
    if not model["observed"]:
        slowest = min((t["goodput"] or 0.0 for t in shown), default=0.0)
        ratios = [
            f"{formatting.clean(t['gpu_type'])} {(t['goodput'] or 0) / slowest:.1f}" for t in shown
        ]
        return "nothing measured yet; expected ratio of types " + " : ".join(ratios)
    parts = [
        f"{formatting.gpus(t['gpus'], t['gpu_type'])}:"
        f" {_rate(t)} " + ("(measured there)" if t["observed"] else "(estimated)")
        for t in shown
    ]
    count = model["observed"]
    return ", ".join(parts) + f"; fitted to {count} shape{'s' if count > 1 else ''}"


def _rate(row: TypeRow) -> str:
    """Return `160 samples/s ±12%`: goodput and its relative standard deviation."""
    uncertainty = row.get("uncertainty")  # a controller of an older release sends none
    margin = f" ±{uncertainty:.0%}" if uncertainty is not None else ""
    return f"{formatting.digits(row['goodput'] or 0.0)} samples/s{margin}"


def _next_sizes(model: ModelRow | None) -> str:
    """Return the expected goodput of the sizes next to the present one; "" if nothing is known."""
    rows = (model.get("sizes") or []) if model and model["observed"] else []
    return ", ".join(
        f"{formatting.gpus(t['gpus'], t['gpu_type'])}: {_rate(t)}" for t in rows if t["goodput"]
    )


def _batch(answer: ExplainAnswer) -> str:
    """Return the batch and its reason: `256 of 256-4096; 512 would gain 3.1%, …`."""
    row = answer.get("batch")
    if row is None:
        return ""
    reason = reason_text(row["reason"])
    if row["batch"] != row["present"]:
        mode = "" if answer["mode"] == "act" else f", but mode is {answer['mode']}"
        return f"{row['present']} → {row['batch']}{mode}: {reason}"
    span = f" of {row['least']}-{row['most']}" if row["least"] < row["most"] else ""
    return f"{row['present']}{span}" + (f"; {reason}" if reason else "")


def _next_change(answer: ExplainAnswer) -> str:
    job, decision, now = answer["job"], answer["decision"], answer["time"]
    transition = job["transition"]
    if transition:
        target = transition["target"] or "no GPUs"
        duration = formatting.span(max(0.0, now - (transition["since"] or now)))
        reason = f"; {reason_text(transition['reason'])}" if transition["reason"] else ""
        phase = formatting.phase(transition["state"])
        return f"on its way to {target}, {phase} for {duration}{reason}"
    if decision is None or decision["action"] == "keep":
        return ""
    round_time = (
        f" at about {formatting.clock(answer['next_round'], now)}" if answer["next_round"] else ""
    )
    parts = [
        f"checkpoint {formatting.span(answer['checkpoint_s'])}" if answer["checkpoint_s"] else "",
        f"restart {formatting.span(answer['restart_s'])}" if answer["restart_s"] else "",
        formatting.cost("expected loss", decision["cost_gpu_s"]),
    ]
    costs = ", ".join(p for p in parts if p)
    shape = _target(decision, job["gpu_type"])
    if answer["mode"] == "act":
        text = f"{_VERBS[decision['action']]} {shape}".rstrip() + round_time
    else:
        text = (
            f"would {_WOULD[decision['action']]} {shape}".rstrip()
            + f", but mode is {answer['mode']}"
        )
    return text + (f" ({costs})" if costs else "")


def _target(decision: DecisionRow, present_type: str) -> str:
    if not decision["gpus"]:
        return ""
    if decision["action"] == "move" or decision["gpu_type"] != present_type:
        half = decision.get("half", False)
        shape = formatting.gpus(decision["gpus"], decision["gpu_type"], half=half)
        return f"{shape} on {formatting.spelled(decision['where'])}"
    return str(decision["gpus"])


def _companions(answer: ExplainAnswer) -> str:
    """Return the jobs that hold a part of its GPUs: `4712 (2 GPUs on g02)`."""
    return ", ".join(
        f"{c['job_id']} ({formatting.gpus(c['gpus'], '')} on {formatting.spelled(c['where'])})"
        for c in answer.get("companions", ())
    )


def _last_change(change: ChangeRow, now: float) -> tuple[str, str]:
    """Return the last change and its outcome."""
    at = f"at {formatting.clock(change['time'], now)}"
    if change["action"] == "hold":
        return "Last change", f"held {at}"
    if not change["from"] and not change["to"]:  # nothing of a waiting job was changed
        reason = reason_text(change["reason"]) or change["state"].lower()
        return "Last change", f"{change['action']} {at}, {change['outcome']}: {reason}"
    name = "Rehearsal" if change["action"] == "rehearsal" else "Last resize"
    return name, _resize(change, at)


def _resize(change: ChangeRow, at: str) -> str:
    """Return the shapes before and after a resize, its time (`at`), and how it went."""
    text = f"{change['from'] or '-'} → {change['to'] or '-'} {at}"
    if change["outcome"] not in ("", "done", "trial"):
        outcome_reason = reason_text(change["reason"]) or change["state"].lower()
        return f"{text}, {change['outcome']}: {outcome_reason}"
    if change["kind"] == "in-place":
        pause_s = change["seconds"].get("pause")
        still = f", training stood still for {1000 * pause_s:.3g} ms" if pause_s else ""
        text += f", in place{still}"
    elif change["total_s"]:
        end = "first step" if change["seconds"].get("startup") else "start"
        text += f", {formatting.span(change['total_s'])} from notice to {end}"
        if change["kind"] == "restart":
            text += ", without a requeue"
    if change["paid_back_s"]:
        text += f", paid back after {formatting.span(change['paid_back_s'])}"
    return text
