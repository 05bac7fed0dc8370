r"""Text forms of numbers, times and names.

>>> duration(90061), duration(59.7)
('1-01:01:01', '00:01:00')
>>> span(9.13), span(150), span(7300)
('9.1 s', '2 min 30 s', '2 h 1 min')
>>> short_seconds(2.0), short_seconds(0.0206), short_seconds(0)
('2.0 s', '20.6 ms', '0 s')
>>> digits(1.934), digits(0.0621), digits(123.4), digits(12345)
('1.9', '0.062', '123', '12345')
>>> clean("evil\x1b[31m\nname")
'evil?[31m?name'
"""

from __future__ import annotations

import math
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from slurm_elastic.core.nodelist import fold

if TYPE_CHECKING:
    from slurm_elastic.rpc.answers import JobRow, Place

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def clean(text: object) -> str:
    """Replace unprintable characters, which could control a terminal or break a table."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def size(count: float) -> str:
    """Return a number of bytes with its unit: `1.5 GB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float | None) -> str:
    """Return seconds in Slurm's form, [D-]HH:MM:SS; `-` for None."""
    if seconds is None:
        return "-"
    total_s = max(0, round(seconds))
    days, remainder_s = divmod(total_s, _DAY)
    hours, remainder_s = divmod(remainder_s, _HOUR)
    text = f"{hours:02}:{remainder_s // _MINUTE:02}:{remainder_s % _MINUTE:02}"
    return f"{days}-{text}" if days else text


def span(seconds: float) -> str:
    """Return seconds in the two largest units: `9.1 s`, `2 min 30 s`, `2 h 2 min`."""
    if seconds < 9.95:
        return f"{digits(seconds).removesuffix('.0')} s"
    whole_seconds = round(seconds)
    if whole_seconds < _MINUTE:
        return f"{whole_seconds} s"
    big, small, names = (
        (_MINUTE, 1, ("min", "s")) if whole_seconds < _HOUR else (_HOUR, _MINUTE, ("h", "min"))
    )
    if whole_seconds >= _DAY:
        big, small, names = _DAY, _HOUR, ("d", "h")
    first, remainder_s = divmod(whole_seconds, big)
    return f"{first} {names[0]}" + (
        f" {remainder_s // small} {names[1]}" if remainder_s // small else ""
    )


def short_seconds(value: float) -> str:
    """Return seconds in s, ms or us: `206 ms`."""
    if value >= 1 or value == 0:
        return f"{digits(value)} s"
    for unit, scale in (("ms", 1e3), ("us", 1e6)):
        if value * scale >= 0.1:
            return f"{value * scale:.3g} {unit}"
    return f"{value:.3g} s"


def clock(time_s: float | None, now: float | None = None) -> str:
    """Return a time of today as `14:02:10`, of other days as `2026-11-20T14:02:10`."""
    if time_s is None:
        return "-"
    local_time, today = time.localtime(time_s), time.localtime(now)
    if local_time[:3] == today[:3]:
        return time.strftime("%H:%M:%S", local_time)
    return time.strftime("%Y-%m-%dT%H:%M:%S", local_time)


def records_note(since: float, now: float) -> str:
    """Return a note since when records are kept; "" if that is unknown."""
    return f"(records are kept since {clock(since, now)})" if since else ""


def digits(value: float) -> str:
    """Return a number with two significant digits, or all digits of its integer part."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text and len(text) > 3 else text


def speed(row: JobRow) -> str:
    """Return steps/s, else samples/s, else `-`; of a script, checkpoints saved per second."""
    steps_per_s, samples_per_s = row["steps_per_s"], row["samples_per_s"]
    if steps_per_s is not None:
        return f"{digits(steps_per_s)} {'saves' if row['kind'] == 'script' else 'it'}/s"
    return "-" if samples_per_s is None else f"{digits(samples_per_s)} samples/s"


def percent(fraction: float | None) -> str:
    """Return `34%`; an unfinished job never shows 100%."""
    if fraction is None:
        return "-"
    return f"{100 if fraction >= 1 else min(99, round(fraction * 100))}%"


def percent_gain(fraction: float) -> str:
    """Return a relative gain: `4 %`, `0.4 %`."""
    return f"{digits(fraction * 100)} %"


def places(placement: Iterable[Place]) -> str:
    """Return nodes by switch: `rack1:g[01-02],rack2:g06`."""
    return ",".join(
        (f"{clean(p['switch'])}:" if p["switch"] else "") + clean(fold(p["nodes"]))
        for p in placement
    )


def nodes(placement: Iterable[Place]) -> str:
    """Return nodes without switches: `g[01-02,06]`."""
    return clean(fold(n for p in placement for n in p["nodes"]))


def spelled(placement: Iterable[Place], most: int = 4) -> str:
    """Return nodes and racks for a sentence: `g01, g02 (rack1)`; more than `most` are folded."""
    parts = []
    for place in placement:
        names = place["nodes"] if len(place["nodes"]) <= most else [fold(place["nodes"])]
        rack = f" ({place['switch']})" if place["switch"] else ""
        parts.append(clean(", ".join(names) + rack))
    return "; ".join(parts)


def gpus(count: int, gpu_type: str, *, half: bool = False) -> str:
    """Return a number of GPUs with their type: `8 a100`, `1 GPU`, `half of 1 a100`."""
    amount = f"{'half of ' if half else ''}{count}"
    return f"{amount} {clean(gpu_type) or ('GPU' if count == 1 else 'GPUs')}"


#: Words for the states of a transition.
_PHASES = {
    "RESERVE": "waiting for its GPUs",
    "NOTIFY": "saving",
    "REQUEUE": "stopping",
    "DRAIN": "stopping",
    "RESHAPE": "being reshaped",
    "COOL": "being reshaped",
    "RELEASE": "starting",
    "VERIFY": "starting",
    "CLEAR": "cleaning up",
    "ASK": "getting companions",
    "PIN": "getting companions",
    "START": "getting companions",
    "JOIN": "growing in place",
    "LEAVE": "shrinking in place",
    "FREE": "shrinking in place",
    "CANCEL": "giving companions up",
}


def wrapped(lines: Iterable[str], indent: int) -> list[str]:
    """Wrap long lines on a terminal; continued lines are indented."""
    if not sys.stdout.isatty():
        return list(lines)
    width = max(40, shutil.get_terminal_size().columns)
    indentation = " " * indent
    return [
        part
        for line in lines
        for part in textwrap.wrap(
            line,
            width,
            subsequent_indent=indentation,
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


def phase(state: object) -> str:
    """Return the words for the state of a transition."""
    return _PHASES.get(str(state), clean(state).lower())


def parse_time(text: str, now: float) -> float:
    """Return epoch seconds of `now`, `now-2days`, `today`, `2026-11-20` or `2026-11-20T14:00[:00]`.

    Raises:
        ValueError: the text is none of these.
    """
    units = {"s": 1, "m": _MINUTE, "h": _HOUR, "d": _DAY, "w": 7 * _DAY}
    match = re.fullmatch(r"now(?:-([0-9]{1,12})\s*(s|m|h|d|w)[a-z]*)?", text)
    if match:
        return now - (int(match[1]) * units[match[2]] if match[1] else 0)
    if text == "today":
        return time.mktime((*time.localtime(now)[:3], 0, 0, 0, 0, 0, -1))
    for form in ("%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"):
        try:
            return time.mktime(time.strptime(text, form))
        except (ValueError, OverflowError):
            continue
    examples = "now-2days, today, 2026-11-20 or 2026-11-20T14:00"
    raise ValueError(f'"{text[:40]}" is invalid: expected a time such as {examples}')


def cost(label: str, gpu_seconds: float) -> str:
    """Return a cost with its label, or "" if there is none."""
    return f"{label} {digits(gpu_seconds)} GPU s" if gpu_seconds > 0 else ""
