"""Measurements of an application's newest jobs, by job, from which its pool is made.

The pool (application_pool.py) takes the deviation of each job out of its times. It is kept
until a job is added, or, as times only change, for a minute: with each new pool the models of all
jobs of the application are fitted anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slurm_elastic.core.application import Observation
from slurm_elastic.models.application_pool import ApplicationPool, pooled

#: Jobs in a pool, those submitted last; and configurations of each, those measured first.
_MOST_JOBS, _MOST_POINTS = 20, 32
#: Seconds for which a pool of the same jobs is kept.
_KEEP_S = 60.0

_NoisePair = tuple[float, float]


@dataclass(slots=True)
class ApplicationJob:
    """Measurements of one job.

    Attributes:
        points: its own; times whose micro-steps were only estimated are left out by the caller.
        first_noise: (squared norm, variance) of the gradient when its training began; None: not
            measured.
    """

    points: tuple[Observation, ...]
    first_noise: _NoisePair | None = None


@dataclass(slots=True)
class ApplicationJobs:
    """Measurements of the newest jobs of an application, the oldest first.

    Attributes:
        jobs: by `Job.key`; "" for measurements of no single job, such as a profile run's.
        pool_version: rises with every new pool.
    """

    jobs: dict[str, ApplicationJob] = field(default_factory=dict)
    pool_version: int = 0
    _pool: ApplicationPool | None = None
    _pooled_at: float = 0.0
    _pooled_jobs: tuple[str, ...] = ()
    _changed: bool = True

    def keep(
        self, key: str, points: Iterable[Observation], first_noise: _NoisePair | None = None
    ) -> None:
        """Keep a job's measurements in place of its earlier ones.

        Those of a job that is older than all kept ones are not added, so that running jobs do not
        take turns.
        """
        kept = tuple(points)[:_MOST_POINTS]
        if not kept and first_noise is None:
            return
        job = ApplicationJob(kept, first_noise)
        if self.jobs.get(key) == job:
            return
        is_new = key not in self.jobs
        self.jobs[key] = job
        self._changed = True
        if is_new:
            newest = sorted(self.jobs, key=_age)[-_MOST_JOBS:]
            self.jobs = {name: self.jobs[name] for name in newest}

    def pool(self, now: float) -> ApplicationPool:
        """Return the pool of these jobs; the same object until it has changed enough.

        Args:
            now: epoch s.
        """
        keys = tuple(self.jobs)
        is_old = not 0 <= now - self._pooled_at < _KEEP_S
        if self._pool is None or (self._changed and (is_old or keys != self._pooled_jobs)):
            pool = pooled(job.points for job in self.jobs.values())
            if pool != self._pool:
                self._pool = pool
                self.pool_version += 1
            self._pooled_at, self._pooled_jobs, self._changed = now, keys, False
        assert self._pool is not None
        return self._pool

    @property
    def first_noise(self) -> _NoisePair | None:
        """Noise at the beginning of a job's training: that of the job with the median scale."""
        pairs = [job.first_noise for job in self.jobs.values() if job.first_noise is not None]
        ordered = sorted(pairs, key=lambda pair: (pair[1] / pair[0] if pair[0] else math.inf, pair))
        return ordered[(len(ordered) - 1) // 2] if ordered else None

    def to_body(self) -> list[dict[str, Any]]:
        """Return JSON for the ledger."""
        return [
            {
                "job": key,
                "points": [_cell(o) for o in job.points],
                "first_noise": job.first_noise,
            }
            for key, job in self.jobs.items()
        ]

    @classmethod
    def from_body(cls, body: Any) -> ApplicationJobs:
        """Return it from the ledger's JSON; invalid parts are left out."""
        jobs = cls()
        for row in body if isinstance(body, list) else ():
            if not isinstance(row, dict) or not isinstance(row.get("job"), str):
                continue
            cells = row.get("points")
            points = [_observation(cell) for cell in cells] if isinstance(cells, list) else []
            known = [point for point in points if point is not None]
            jobs.keep(row["job"], known, _noise_pair(row.get("first_noise")))
        return jobs


def _age(key: str) -> tuple[int, int]:
    """Return a number that is larger for jobs submitted later, and the job's id."""
    job_id, _, submitted = key.partition("@")
    if not (job_id.isdecimal() and submitted.isdecimal()):
        return 0, 0
    return int(submitted), int(job_id)


def _cell(o: Observation) -> list[Any]:
    cell = [o.gpu_type, o.nodes, o.gpus, o.micro_batch, o.step_s, o.micro_step_s]
    stated = o.exchange or o.exchange_s is not None
    return [*cell, o.exchange, o.exchange_s] if stated else cell  # as older releases wrote it


def _observation(cell: Any) -> Observation | None:
    if not isinstance(cell, list) or len(cell) not in (6, 8):
        return None
    gpu_type, *counts, step_s, micro_step_s = cell[:6]
    exchange, exchange_s = cell[6:] or ("", None)
    if not isinstance(gpu_type, str) or not all(type(c) is int and 0 < c < 2**31 for c in counts):
        return None
    times = _floats([step_s, micro_step_s])
    if times is None or not 0 < times[1] <= times[0] < math.inf or not isinstance(exchange, str):
        return None
    alone = _floats([] if exchange_s is None else [exchange_s])
    if alone is None or not all(0 < seconds < math.inf for seconds in alone):
        return None
    point = Observation(gpu_type, *counts, *times)
    return replace(point, exchange=exchange, exchange_s=alone[0] if alone else None)


def _noise_pair(value: Any) -> _NoisePair | None:
    pair = _floats(value if isinstance(value, list) else ())
    if pair is None or len(pair) != 2 or not (min(pair) >= 0 and 0 < sum(pair) < math.inf):
        return None
    return pair[0], pair[1]


def _floats(values: Sequence[Any]) -> tuple[float, ...] | None:
    if not all(type(v) in (int, float) for v in values):
        return None
    return tuple(float(v) for v in values)
