"""Slurm's folded node lists. Standard library only: used inside jobs as well.

>>> expand("g[01-03,07],login")
('g01', 'g02', 'g03', 'g07', 'login')
>>> expand("r[1-2]n[1-2]")
('r1n1', 'r1n2', 'r2n1', 'r2n2')
>>> fold(["g03", "g01", "g02", "login"])
'g[01-03],login'
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_WORD = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_RANGES = re.compile(r"^([^\[]*)\[([^\]]*)\](.*)$")
_NUMBERED = re.compile(r"^(.*?)(\d+)$")


def expand(text: str) -> tuple[str, ...]:
    """Names in a folded list, in its order; an empty or "(null)" list has none.

    Raises:
        ValueError: a range that is none, as `g[1-x]`.
    """
    if not text or text == "(null)":
        return ()
    return tuple(name for word in _WORD.findall(text) for name in _expand_word(word))


def _expand_word(word: str) -> list[str]:
    match = _RANGES.match(word)
    if not match:
        return [word]
    prefix, ranges, suffix = match.groups()
    numbers: list[str] = []
    for part in ranges.split(","):
        low, dash, high = part.partition("-")
        if dash:
            numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
        else:
            numbers.append(str(int(low)).zfill(len(low)))
    return [f"{prefix}{number}{rest}" for number in numbers for rest in _expand_word(suffix)]


def fold(names: Iterable[str]) -> str:
    """The shortest list that Slurm prints the same way: one range of trailing numbers a prefix."""
    groups: dict[tuple[str, int], list[int]] = {}
    plain = []
    for name in sorted(set(names)):
        match = _NUMBERED.match(name)
        if match:
            groups.setdefault((match[1], len(match[2])), []).append(int(match[2]))
        else:
            plain.append(name)
    folded = [_fold_group(prefix, width, nums) for (prefix, width), nums in groups.items()]
    return ",".join(folded + plain)


def _fold_group(prefix: str, width: int, numbers: list[int]) -> str:
    numbers = sorted(numbers)
    if len(numbers) == 1:
        return f"{prefix}{numbers[0]:0{width}d}"
    parts, start, last = [], numbers[0], numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == last + 1:
            last = number
            continue
        low, high = f"{start:0{width}d}", f"{last:0{width}d}"
        parts.append(low if start == last else f"{low}-{high}")
        if number is not None:
            start = last = number
    return f"{prefix}[{','.join(parts)}]"
