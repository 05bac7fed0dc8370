"""One run of a job in a file of accounting, in whatever format, and its texts and numbers."""

from __future__ import annotations

import datetime
import functools
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_elastic.core.errors import InvalidInputError

#: Columns that `sacct -P` must print.
COLUMNS = "JobID,JobName,User,Submit,Start,End,ElapsedRaw,State,AllocTRES,NNodes"
#: State of a job that did what it was to do.
ENDED_WELL = "COMPLETED"
#: Larger times, run times and numbers are taken for a damaged file.
LATEST_S = 1e10
LONGEST_S = 3.2e8  # ten years
MOST_GPUS = 65536

_UNKNOWN_TIMES = frozenset(("", "Unknown", "None", "None assigned", "N/A", "NaT", "nan", "NULL"))
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d):(\d\d)(?::(\d\d)(?:\.\d{1,9})?)?\s?(Z|UTC|[+-]\d\d:?\d\d)?",
    re.ASCII,
)


class SacctError(InvalidInputError):
    """The file is invalid; the message names file, line and remedy."""

    def __init__(self, text: str) -> None:
        # The message quotes the file, whose lines may have any length.
        super().__init__(text if len(text) <= 500 else f"{text[:500]}...")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountingRow:
    """One run of a job, or a job that never ran.

    Attributes:
        job_id: id as users type it; with a `+`: a part of a heterogeneous job.
        submit, start, end: epoch seconds, or seconds of a trace; None: unknown.
        seconds: run time; None: unknown.
        state: one word, as Slurm's.
        gpu_type: "": unknown.
        gpus: over all nodes.
        partition: "": the file does not name it.
        limit_s: time limit; None: unlimited, or the file does not name it.
        note: what is remarkable of it, for the summary.
    """

    job_id: str
    name: str
    user: str
    submit: float | None
    start: float | None
    end: float | None
    seconds: float | None
    state: str = ENDED_WELL
    gpu_type: str = ""
    gpus: int = 0
    nodes: int = 1
    partition: str = ""
    limit_s: float | None = None
    note: str = ""


def epoch_s(text: str, location: str, remedy: str) -> float | None:
    """Return the epoch seconds of a time; None if it is unknown.

    A time without zone is local.

    Raises:
        SacctError: it is no time.
    """
    if text in _UNKNOWN_TIMES:
        return None
    seconds: float | None = None
    if text.isdecimal() and text.isascii() and len(text) < 19:
        seconds = float(text)
    elif match := _TIME.fullmatch(text):
        day, hour, minute, second, zone = match.groups()
        try:
            seconds = _hour_s(day, hour, zone) + 60 * int(minute) + int(second or 0)
        except (ValueError, OverflowError):
            seconds = None
    if seconds is None or not 0 <= seconds <= LATEST_S:
        raise SacctError(f'{location}: "{text}" is invalid: expected a time; {remedy}')
    return seconds


@functools.lru_cache(maxsize=4096)
def _hour_s(day: str, hour: str, zone: str | None) -> float:
    """Return the epoch seconds of the beginning of an hour; zones change at full hours."""
    if zone is None:
        return time.mktime(time.strptime(f"{day} {hour}", "%Y-%m-%d %H"))
    offset = "+00:00" if zone in ("Z", "UTC") else zone
    return datetime.datetime.strptime(f"{day} {hour} {offset}", "%Y-%m-%d %H %z").timestamp()


def one_word(state: str) -> str:
    """Return a state without its details: `CANCELLED by 1000` is CANCELLED; "" ended well."""
    return next(iter(state.split()), ENDED_WELL)


def most_of(counts: Mapping[str, int]) -> tuple[str, int]:
    """Return type and number of GPUs; counts are by type, "" is that of all types.

    A job with GPUs of several types counts as one of the type it has most of.
    """
    typed = {kind: count for kind, count in counts.items() if kind and count}
    total = max(counts.get("", 0), sum(typed.values()))
    return (max(typed, key=lambda kind: typed[kind]) if typed else ""), total
