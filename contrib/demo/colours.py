"""One colour per job, from a palette for colour-blind readers; grey for rigid jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_ELASTIC = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_RIGID = ("#d2d2d2", "#dedede", "#cacaca", "#e4e4e4", "#d8d8d8")


def colours(elastic: Iterable[str], rigid: Iterable[str]) -> Mapping[str, str]:
    """Return a colour for each job, by name."""
    by_name = {name: _ELASTIC[i % len(_ELASTIC)] for i, name in enumerate(elastic)}
    return by_name | {name: _RIGID[i % len(_RIGID)] for i, name in enumerate(rigid)}
