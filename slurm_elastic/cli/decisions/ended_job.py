"""Lines of `selastic explain` about a job that has ended."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from slurm_elastic.cli import formatting
from slurm_elastic.cli.reason_text import text as reason_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slurm_elastic.rpc.decision_answers import EndingRow, ExplainAnswer

#: Words for each state in which Slurm ends a job; FAILED also has an exit code.
_ENDS = {
    "BOOT_FAIL": "ended because a node did not boot",
    "CANCELLED": "was cancelled",
    "COMPLETED": "completed",
    "DEADLINE": "was ended at its deadline",
    "FAILED": "failed",
    "NODE_FAIL": "ended because a node failed",
    "OUT_OF_MEMORY": "ran out of memory",
    "PREEMPTED": "was preempted",
    "REVOKED": "was taken over by another cluster",
    "TIMEOUT": "was ended at its time limit",
}


def details(answer: ExplainAnswer, ended: EndingRow) -> Iterator[tuple[str, str]]:
    """Yield (label, text) pairs that describe an ended job; the first label is ""."""
    yield "", _head(answer, ended)
    if ended["gpus"]:
        yield "Last on", _last_on(ended)
    elif not ended["runs"]:
        yield "Never ran", "no run of it is recorded"
    if not answer["job"]["elastic"]:
        yield "Not elastic", "it was submitted without --elastic"
        return
    changes = ended["changes"]
    yield "Changes", f"{changes} in its life" if changes else "none: it kept its GPUs in every run"
    if ended["runs"] and not ended["reported"]:
        yield (
            "Never reported",
            "no report of it arrived, so it could not be resized; was it started with esrun",
        )
    elif ended["runs"] and not answer["proven"]:
        reason = reason_text(answer.get("unproven"))
        text = "it had not written a checkpoint and read it back, so it was not resized"
        yield "Never proven", f"{text}; {reason}" if reason else text
    yield "Stopped", reason_text(ended.get("stopped"))


def _head(answer: ExplainAnswer, ended: EndingRow) -> str:
    job = answer["job"]
    state, name = ended["state"], f"{job['display_id']} {formatting.clean(job['name'])}"
    clock = formatting.clock(ended["time"], answer["time"]) if ended["time"] else ""
    if not state:
        before = f" before {clock}" if clock else ""
        return f"{name} ended{before}; how was not seen"
    end = _ENDS.get(state, f"ended as {state}")
    if state == "FAILED":
        end += f" with {_code(ended['exit_code'])}"
    return f"{name} {end}" + (f" at {clock}" if clock else "")


def _last_on(ended: EndingRow) -> str:
    runs = ended["runs"]
    place = f"{formatting.gpus(ended['gpus'], ended['gpu_type'])} on"
    times = f", in the last of {runs} runs" if runs > 1 else ""
    return f"{place} {formatting.spelled(ended['where'])}{times}"


def _code(code: int) -> str:
    """Return an exit code as text: `exit code 1`, `exit code 137 (signal 9, SIGKILL)`."""
    if code <= 128:
        return f"exit code {code}"
    try:
        name = f", {signal.Signals(code - 128).name}"
    except ValueError:
        return f"exit code {code}"
    return f"exit code {code} (signal {code - 128}{name})"
