"""Advice of the controller on a job's time limit, for `esbatch --advise`; standard library only."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import PurePath

from slurm_elastic.rpc import frames, requests

_CALL_S = 5.0
_GPUS = re.compile(r"(?:^|,)(?:gres/)?gpu(?::[^:=,]+)?[:=](\d+)")
_COUNT = re.compile(r"(?:^|[:=,])(\d+)")
_BASIS = {
    "same-name": "your earlier jobs of this name",
    "similar-name": "earlier jobs of similar names",
    "user": "your earlier jobs",
    "shape": "earlier jobs of this size",
    "all": "all earlier jobs",
}


def advice(
    address: str, values: Mapping[str, str], script: str | None, default_gpus: int = 1
) -> str:
    """Return one line about the run time of a job that is to be submitted.

    Args:
        address: of the controller.
        values: sbatch's options by their long names.
        script: its file, which names the job by default; None: standard input.
        default_gpus: GPUs if the options name none.
    """
    name = (
        values.get("job-name")
        or values.get("-J")
        or (PurePath(script).name if script else "sbatch")
    )
    limit_s = seconds(values.get("time") or values.get("-t") or "")
    try:
        answer = frames.call(
            address,
            requests.build(
                "durations",
                name=name[: requests.MAX_TEXT],
                gpus=gpus(values) or default_gpus,
                partition=values.get("partition", "")[: requests.MAX_TEXT],
                limit_s=limit_s,
            ),
            timeout_s=_CALL_S,
        )
    except frames.ChannelError as error:
        return f"no advice: {error}"
    try:
        return _sentence(answer, limit_s)
    except (KeyError, TypeError, ValueError):
        return "no advice: the controller's answer cannot be read"


def _sentence(answer: Mapping[str, object], limit_s: float | None) -> str:
    length, advised_s = answer["length"], answer["advised_limit_s"]
    if not answer["enabled"]:
        return "no advice: this site does not predict run times ([durations] predict)"
    if not isinstance(length, Mapping):
        return "no advice: nothing is known of earlier jobs yet"
    basis = _BASIS.get(str(length["basis"]), "earlier jobs")
    text = (
        f"half of such jobs end within {clock(float(length['median_s']))}, 90 % within"
        f" {clock(float(length['p90_s']))} ({int(length['jobs'])}: {basis})"
    )
    if isinstance(advised_s, int | float):
        text += f"; --time={clock(advised_s)} would do"
        if limit_s is not None:
            text += f", {clock(limit_s)} is asked for"
    return text


def gpus(values: Mapping[str, str]) -> int | None:
    """Return the GPUs that sbatch's options ask for; None: they name none."""
    nodes = _first(values.get("nodes", "")) or 1
    if total := _first(values.get("gpus", ""), last=True):
        return total
    if per_node := _first(values.get("gpus-per-node", ""), last=True):
        return nodes * per_node
    if request := _GPUS.search(values.get("gres", "")):
        return nodes * int(request[1])
    return None


def _first(text: str, *, last: bool = False) -> int | None:
    numbers = _COUNT.findall(text)
    return int(numbers[-1 if last else 0]) if numbers and len(numbers[-1]) < 8 else None


def seconds(text: str) -> float | None:
    """Return the seconds of a time limit as sbatch reads it; None: none, or not readable.

    >>> seconds("90"), seconds("1:30:00"), seconds("2-12"), seconds("UNLIMITED")
    (5400.0, 5400.0, 216000.0, None)
    """
    days, dash, rest = text.strip().rpartition("-")
    parts = rest.split(":")
    if not all(p.isdecimal() and len(p) < 8 for p in (*parts, days or "0")) or len(parts) > 3:
        return None
    numbers = [int(p) for p in parts]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, secs = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, secs = numbers
    else:  # minutes[:seconds]
        hours, (minutes, secs) = 0, (*numbers, 0)[:2]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs) or None


def clock(value_s: float) -> str:
    """Return a time in Slurm's form, rounded up to minutes.

    >>> clock(4500), clock(200_000)
    ('01:15:00', '2-07:34:00')
    """
    minutes = math.ceil(value_s / 60)
    days, minutes = divmod(minutes, 1440)
    text = f"{minutes // 60:02}:{minutes % 60:02}:00"
    return f"{days}-{text}" if days else text
