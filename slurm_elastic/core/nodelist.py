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
from typing import NoReturn

#: Most names in one list, four times the nodes of the largest clusters: a range that a user wrote
#: must not fill the memory.
MOST = 65536
#: Longest element of a list in characters, ranges included; node names have at most 255.
_LONGEST = 4096

_WORD = re.compile(r"(?:[^,\s\[]|\[[^\]]*\])+")
_RANGES = re.compile(r"^([^\[]*)\[([^\]]*)\](.*)$")
_NUMBERED = re.compile(r"^(.*?)([0-9]{1,18})$", re.DOTALL)
_PART = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)


def expand(text: str) -> tuple[str, ...]:
    """Return the names in a folded list, in its order; an empty or "(null)" list has none.

    Raises:
        ValueError: an invalid range, as `g[1-x]`, or more than `MOST` names.
    """
    if not text or text == "(null)":
        return ()
    if text.count("[") != text.count("]"):
        raise ValueError("node list with unbalanced brackets")
    names: list[str] = []
    for word in _WORD.findall(text):
        names += _expand_word(word, MOST - len(names))
    return tuple(names)


def _expand_word(word: str, room: int) -> list[str]:
    match = _RANGES.match(word)
    if not match:
        return [word] if room > 0 else _too_many()
    prefix, ranges, suffix = match.groups()
    if len(word) > _LONGEST:
        raise ValueError(
            f"node list with a name of {len(word)} characters; expected at most {_LONGEST}"
        )
    numbers: list[str] = []
    for part in ranges.split(","):
        part_match = _PART.fullmatch(part)
        if part_match is None:
            raise ValueError(
                f"{part[:40]!r} in a node list is invalid: expected a number or a range"
            )
        low, high = part_match[1], part_match[2] or part_match[1]
        if int(high) - int(low) >= room - len(numbers):
            _too_many()
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
    endings = _expand_word(suffix, room // max(1, len(numbers)))
    return [f"{prefix}{number}{end}" for number in numbers for end in endings]


def _too_many() -> NoReturn:
    raise ValueError(f"node list with more than {MOST} names")


def fold(names: Iterable[str]) -> str:
    """Return the list as Slurm prints it: the trailing numbers of each prefix as ranges."""
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
