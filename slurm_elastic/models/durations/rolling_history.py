"""Rolling estimates of run times, from earlier jobs of the same name, user and shape.

`RollingHistory.published_s` is the estimate of Helios' QSSF (SC'21): the mean of the user's jobs of
the same name, else of similar names, else of the user, else of all. `estimate` is ours: a
distribution, in which jobs that are more alike count more and older ones less.

>>> history = RollingHistory()
>>> request = JobRequest(user="alice", name="resnet", gpus=4)
>>> for seconds in (3500.0, 3600.0, 3700.0):
...     history.add(FinishedJob(request=request, seconds=seconds, ended=0.0))
>>> history.published_s(request)
3600.0
>>> 3500 <= history.estimate(request).median <= 3700
True

All is bounded, as names are written by users: names of a user, users, and jobs of a series. The
oldest are removed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from slurm_elastic.core.prediction.duration_estimate import DurationEstimate
from slurm_elastic.models.durations import job_names
from slurm_elastic.models.durations.finished_job import FinishedJob, JobRequest

_K = TypeVar("_K")
_V = TypeVar("_V")

#: Run times kept of a series.
_KEPT = 48
#: Names of a user, users, and groups with shapes.
_MOST_NAMES, _MOST_USERS, _MOST_SHAPES = 500, 20_000, 5_000
#: Weight of the run time before, beside the one after it.
_FADING = 0.93
#: A kind of n jobs gets n / (n + PRIOR) of the weight that more similar kinds have left. With less
#: the medians are as good, but fewer jobs end within their 90 % quantile.
_PRIOR = {"same-name": 2.0, "similar-name": 4.0, "user": 8.0, "shape": 30.0, "all": 0.0}


class _Series:
    """Run times of jobs of one kind: their number, their sum, and the latest ones."""

    __slots__ = ("count", "latest", "total")

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0
        self.latest: deque[float] = deque(maxlen=_KEPT)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.latest.append(seconds)


@dataclass(slots=True)
class _User:
    """History of one user; `names` and `families` by number of GPUs, 0: any."""

    all: dict[int, _Series] = field(default_factory=dict)
    names: OrderedDict[str, dict[int, _Series]] = field(default_factory=OrderedDict)
    families: OrderedDict[str, dict[int, _Series]] = field(default_factory=OrderedDict)


class RollingHistory:
    """Run times of all jobs that have ended, by user, name and shape."""

    def __init__(self) -> None:
        self._users: OrderedDict[str, _User] = OrderedDict()
        #: Users that have jobs of a name.
        self._owners: dict[str, dict[str, None]] = {}
        self._shapes: OrderedDict[tuple[str, int], _Series] = OrderedDict()
        self._all = _Series()

    @property
    def jobs(self) -> int:
        """Number of jobs added."""
        return self._all.count

    def add(self, job: FinishedJob) -> None:
        """Add a job that has ended."""
        request, seconds = job.request, max(1.0, job.seconds)
        name = request.short_name
        user = _entry(self._users, request.user, _User())
        if len(self._users) > _MOST_USERS:
            dropped_user, dropped = self._users.popitem(last=False)
            for dropped_name in dropped.names:
                self._disown(dropped_name, dropped_user)
        kinds = (
            user.all,
            _entry(user.names, name, {}),
            _entry(user.families, job_names.family(name), {}),
        )
        for by_gpus in kinds:
            for gpus in (0, request.gpus):
                by_gpus.setdefault(gpus, _Series()).add(seconds)
        owners = self._owners.pop(name, {})
        owners[request.user] = None
        self._owners[name] = owners
        if len(user.names) > _MOST_NAMES:
            self._disown(user.names.popitem(last=False)[0], request.user)
        if len(user.families) > _MOST_NAMES:
            user.families.popitem(last=False)
        _entry(self._shapes, (request.group, request.gpus), _Series()).add(seconds)
        if len(self._shapes) > _MOST_SHAPES:
            self._shapes.popitem(last=False)
        self._all.add(seconds)

    def add_all(self, jobs: Iterable[FinishedJob]) -> None:
        """Add jobs in the order of their ends."""
        for job in sorted(jobs, key=lambda j: j.ended):
            self.add(job)

    def published_s(self, request: JobRequest) -> float | None:
        """Return the published estimate in seconds; None without any job."""
        if not self._all.count:
            return None
        user = self._users.get(request.user)
        name = request.short_name
        for series in self._named(request, [name]):
            return series.total / series.count
        latest_names = islice(reversed(self._owners), _MOST_NAMES)
        names = job_names.similar(name, latest_names)
        if matching := list(self._named(request, names)):
            return sum(s.total for s in matching) / sum(s.count for s in matching)
        series = user.all[0] if user else self._all
        return series.total / series.count

    def estimate(self, request: JobRequest) -> DurationEstimate | None:
        """Return the distribution of a job's run time; None without any job."""
        if not self._all.count:
            return None
        seconds: list[float] = []
        weights: list[float] = []
        left, basis, jobs = 1.0, "", 0
        for kind, series in self._kinds(request):
            share = left * series.count / (series.count + _PRIOR[kind])
            fading = [_FADING**age for age in range(len(series.latest) - 1, -1, -1)]
            scale = share / sum(fading)
            seconds.extend(series.latest)
            weights.extend(scale * weight for weight in fading)
            left -= share
            if not basis:
                basis, jobs = kind, series.count
        return DurationEstimate.of_sample(seconds, weights, basis=basis, jobs=jobs)

    def _kinds(self, request: JobRequest) -> Iterator[tuple[str, _Series]]:
        """Yield the kinds of jobs to which it belongs, the most similar first."""
        user = self._users.get(request.user)
        name = request.short_name
        if user:
            by_gpus = user.names.get(name, {})
            yield from (("same-name", by_gpus[g]) for g in (request.gpus, 0) if g in by_gpus)
            by_gpus = user.families.get(job_names.family(name), {})
            yield from (("similar-name", by_gpus[g]) for g in (request.gpus, 0) if g in by_gpus)
            if not by_gpus:
                for other in job_names.similar(name, user.names):
                    yield "similar-name", user.names[other][0]
            yield from (("user", user.all[g]) for g in (request.gpus, 0) if g in user.all)
        elif name in self._owners and not request.own_names:
            for owner in list(self._owners[name])[-job_names.MOST_SIMILAR :]:
                yield "similar-name", self._users[owner].names[name][0]
        shape = self._shapes.get((request.group, request.gpus))
        if shape is not None:
            yield "shape", shape
        yield "all", self._all

    def _named(self, request: JobRequest, names: list[str]) -> Iterator[_Series]:
        """Yield the series of these names: the user's if there are any, else those of all users."""
        user = self._users.get(request.user)
        own = [user.names[name] for name in names if name in user.names] if user else []
        if own:
            of_size = [by_gpus[request.gpus] for by_gpus in own if request.gpus in by_gpus]
            yield from of_size or [by_gpus[0] for by_gpus in own]
            return
        for name in names:
            series = [self._users[owner].names[name][0] for owner in self._owners.get(name, ())]
            if series:
                yield _sum(series)

    def _disown(self, name: str, user: str) -> None:
        owners = self._owners.get(name, {})
        owners.pop(user, None)
        if not owners:
            self._owners.pop(name, None)


def _entry(entries: OrderedDict[_K, _V], key: _K, new: _V) -> _V:
    """Return the entry of a key, added if it is new; it counts as used last."""
    entry = entries.setdefault(key, new)
    entries.move_to_end(key)
    return entry


def _sum(series: Iterable[_Series]) -> _Series:
    total = _Series()
    for part in series:
        total.count += part.count
        total.total += part.total
        total.latest.extend(part.latest)
    return total
