"""What a job is to be beside what it is asked to do: layout, batch, frozen layers.

Such orders stand until others take their place. They are told with every other order, and
from an attempt on: what is decided for the GPUs that a job is about to get must not reach it
while it still has the old ones.

>>> standing = DesiredSettings()
>>> standing.put(7, run=0, seq=1, batch=256), standing.put(7, run=1, seq=2, batch=512)
(True, True)
>>> standing.on(Orders(), 7, run=0).batch, standing.on(Orders(seq=9), 7, run=3).batch
(256, 512)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from slurm_elastic.core.report import Orders


class DesiredSettings:
    """By job and field of `Orders`: values, and the attempts that they begin with.

    Not thread-safe: its owner holds a lock.
    """

    def __init__(self) -> None:
        self._values: dict[int, dict[str, dict[int, tuple[int, Any]]]] = {}

    def put(self, job_id: int, *, run: int, seq: int, **values: Any) -> bool:
        """From this attempt on a job is to be so; whether that is news.

        Args:
            job_id: the job.
            run: restart count of the attempt.
            seq: of the orders that tell it, if it is news.
            values: by field of `Orders`; None and "" leave it to the job.
        """
        fields = self._values.setdefault(job_id, {})
        news = False
        for name, value in values.items():
            runs = fields.setdefault(name, {})
            if _same(_at(runs, run), value) and all(r <= run for r in runs):
                continue
            # What was meant for later attempts is void.
            fields[name] = {r: told for r, told in runs.items() if r < run} | {run: (seq, value)}
            news = True
        return news

    def on(self, orders: Orders, job_id: int, *, run: int) -> Orders:
        """These orders with what stands for the attempt; their `seq` rises with either."""
        fields = self._values.get(job_id)
        if not fields:
            return orders
        found = {name: told for name, runs in fields.items() if (told := _told(runs, run))}
        seq = max([orders.seq, *(seq for seq, _ in found.values())])
        values = {name: value for name, (_, value) in found.items()}
        return dataclasses.replace(orders, seq=seq, **values)

    def forget(self, alive: Collection[int]) -> None:
        """Drop what was said to jobs that are gone."""
        self._values = {k: v for k, v in self._values.items() if k in alive}


def _told(runs: dict[int, tuple[int, Any]], run: int) -> tuple[int, Any] | None:
    """What the latest attempt up to this one was told, and with which number."""
    known = [r for r in runs if r <= run]
    return runs[max(known)] if known else None


def _at(runs: dict[int, tuple[int, Any]], run: int) -> Any:
    told = _told(runs, run)
    return told[1] if told else None


def _same(one: Any, other: Any) -> bool:
    return one == other or {one, other} == {None, ""}
