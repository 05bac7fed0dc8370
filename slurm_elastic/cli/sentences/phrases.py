"""Parts of the sentences: GPUs, jobs, durations.

>>> gpus(1), gpus(4, "a100"), shapes((("a100", 4), ("v100", 8)))
('1 GPU', '4 a100', '4 a100 or 8 v100')
>>> owned("4722", "bob"), owned(None, None), numbered(("4711", None, None))
("bob's 4722", 'another job', 'job 4711 and 2 other jobs')
>>> duration(40), duration(1200), duration(10800), counted(1, "rack"), counted(3, "node")
('40 s', '20 min', '3 h', 'one rack', '3 nodes')
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Parameters = Mapping[str, Any]
#: A template of `str.format`, or a function of the parameters.
Sentence = str | Callable[[Parameters], str]
OTHER = "another job"


def gpus(count: int, gpu_type: str = "") -> str:
    """Return `4 a100`, `1 GPU`."""
    return f"{count} {gpu_type or ('GPU' if count == 1 else 'GPUs')}"


def shape(p: Parameters) -> str:
    """Return the parameters `gpus`, `gpu_type` and `gpu_part` as one phrase."""
    part = "half of " if p.get("gpu_part") else ""
    return part + gpus(p["gpus"], p["gpu_type"])


def shapes(of: Iterable[tuple[str, int]]) -> str:
    """Return `4 a100 or 8 v100`."""
    return " or ".join(gpus(count, kind) for kind, count in of)


def nodes(p: Parameters) -> str:
    """Return the names of the nodes."""
    return ", ".join(p["nodes"])


def owned(job: str | None, user: str | None) -> str:
    """Return `bob's 4722`; a job that is hidden is `another job`."""
    if job is None:
        return OTHER
    return f"{user}'s {job}" if user else f"job {job}"


def job(p: Parameters) -> str:
    """Return `job 4722`."""
    return owned(p["job"], None)


def job_of(p: Parameters) -> str:
    """Return `bob's 4722`."""
    return owned(p["job"], p["user"])


def numbered(jobs: Sequence[str | None] | None) -> str:
    """Return `job 4711 and 4712`."""
    names = [j for j in jobs or () if j is not None]
    text = f"job {names[0]}" if len(names) == 1 else "jobs " + " and ".join(names)
    return _with_others(text if names else "", len(jobs or ()) - len(names))


def jobs_of(p: Parameters) -> str:
    """Return `bob's 4711 and carol's 4712`."""
    jobs = p["jobs"] or ()
    users = p["users"] or (None,) * len(jobs)
    names = [owned(j, u) for j, u in zip(jobs, users, strict=True) if j is not None]
    return _with_others(" and ".join(names), len(jobs) - len(names))


def give_way(p: Parameters) -> str:
    """Return `bob's 4711 gives way`, for one or several."""
    return f"{jobs_of(p)} {'gives' if len(p['jobs'] or ()) <= 1 else 'give'} way"


def duration(seconds: float) -> str:
    """Return a rough duration: `40 s`, `20 min`, `3 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.0f} h"


def counted(number: int, word: str) -> str:
    """Return `one rack`, `3 nodes`."""
    return f"one {word}" if number == 1 else f"{number} {word}s"


def _with_others(text: str, hidden: int) -> str:
    if not hidden:
        return text or OTHER
    others = OTHER if hidden == 1 else f"{hidden} other jobs"
    return f"{text} and {others}" if text else others
