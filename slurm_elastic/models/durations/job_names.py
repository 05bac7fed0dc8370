"""Similarity of job names: equal but for numbers, or by Ratcliff and Obershelp's measure.

Names are written by users: the number of comparisons has a bound, and names are short
(`finished_job.MOST_NAME`).
"""

from __future__ import annotations

import difflib
import heapq
import re
from collections.abc import Iterable

#: Least ratio of similar names, and number of the most similar ones that count, as published for
#: Helios (SC'21).
CUTOFF, MOST_SIMILAR = 0.6, 2
#: Names for which the ratio is computed, which takes up to milliseconds for each.
_MOST_COMPARED = 20

_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def family(name: str) -> str:
    """Return a name with each number replaced.

    >>> family("resnet_lr0.1_seed3") == family("resnet_lr1e-3_seed12")
    True
    """
    return _NUMBER.sub("#", name)


def similar(name: str, names: Iterable[str]) -> list[str]:
    """Return the two names most similar to one, the best first.

    The ratio is that of `difflib.SequenceMatcher`, as in `difflib.get_close_matches`. Of more than
    twenty names only those with the largest upper bounds of it are compared.

    >>> similar("resnet-train-a", ["bert", "resnet-train-b", "resnet-eval-a"])
    ['resnet-train-b', 'resnet-eval-a']
    """
    matcher = difflib.SequenceMatcher()
    matcher.set_seq2(name)
    bounds = []
    for other in names:
        matcher.set_seq1(other)
        if matcher.real_quick_ratio() >= CUTOFF and (bound := matcher.quick_ratio()) >= CUTOFF:
            bounds.append((bound, other))
    compared = bounds if len(bounds) <= _MOST_COMPARED else heapq.nlargest(_MOST_COMPARED, bounds)
    return difflib.get_close_matches(
        name, [other for _, other in compared], n=MOST_SIMILAR, cutoff=CUTOFF
    )
