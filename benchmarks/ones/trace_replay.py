"""Trainings of ONES' published trace in a simple world, under rivals and under two searches.

A job has W samples to do and computes X (n / g)^0.9 samples per second on n GPUs, g of them
requested; W and X of its type come from the published history. A start takes 10 s, a change of size
1 s. GPUs are a number: there are no nodes. Losses and accuracies of an epoch are those of the
history.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.ones.beta_progress import BetaProgress, EpochRecord
from slurm_elastic.policies.milp import anytime_search
from slurm_elastic.policies.milp.milp_solver import Clock, Columns
from slurm_elastic.policies.ones.block_order import EMPTY
from slurm_elastic.policies.ones.evolution import (
    EvolvingJobs,
    Floats,
    Ints,
    first_generation,
    next_generation,
    sizes_of,
)
from slurm_elastic.policies.ones.size_limits import EPOCHS, SizeLimit, room_of_largest

SCALING, START_S, CHANGE_S = 0.9, 10.0, 1.0
#: Most GPUs of a job where sizes are free, in multiples of those requested.
MOST = 4
GENERATION_S = 20.0
#: Throughputs of a size that are averaged.
_MEASURED = 5
#: Children of the anytime search at an event.
_CHILDREN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """One job of the trace; `epochs` are those of its type in the history."""

    submitted: float
    gpus: int
    samples: float
    rate: float
    epoch_size: float
    epochs: tuple[EpochRecord, ...]

    @property
    def seconds(self) -> float:
        """Run time at the requested size, without the start."""
        return self.samples / self.rate

    def speed(self, gpus: float) -> float:
        """Return samples per second."""
        return self.rate * float((gpus / self.gpus) ** SCALING)


def read(folder: Path) -> tuple[list[TraceJob], dict[str, tuple[EpochRecord, ...]]]:
    """Return the jobs of the trace, and the epochs of each finished training of the history."""
    trainings: dict[str, list[EpochRecord]] = {}
    names: list[tuple[str, str, str]] = []
    with (folder / "types.csv").open(encoding="utf-8") as lines:
        types = {(r["model"], r["task"], r["epoch_size"]): r for r in csv.DictReader(lines)}
        names = list(types)
    with (folder / "history.csv").open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["id"] == "0" and float(row["batch_size"]) > 32:
                continue  # of another job
            trainings.setdefault(row["id"], []).append(
                EpochRecord(
                    epoch_size=float(row["epoch_size"]),
                    epochs=float(row["epoch"]),
                    initial_loss=float(row["initial_loss"]),
                    loss=float(row["loss"]),
                    accuracy=float(row["acc"]),
                    progress=float(row["num_samples"]) / float(row["total_workload"]),
                )
            )
    history = {number: tuple(records) for number, records in trainings.items()}
    jobs = []
    with (folder / "trace.csv").open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            name = (row["model"], row["task"], row["epoch_size"])
            jobs.append(
                TraceJob(
                    submitted=float(row["time"]),
                    gpus=int(row["num_gpus"]),
                    samples=float(types[name]["W_samples"]),
                    rate=float(types[name]["X_samples_per_s"]),
                    epoch_size=float(row["epoch_size"]),
                    epochs=history[str(names.index(name))],
                )
            )
    return jobs, history


def rigid(
    jobs: Sequence[TraceJob], gpus: int, *, key: Callable[[TraceJob], float], strict: bool
) -> list[float]:
    """Return completion times at the requested sizes, without preemption.

    Args:
        jobs: in order of submission.
        gpus: of the cluster.
        key: order of the queue, the least first.
        strict: the first job without room stops the queue.
    """
    free, done = gpus, [0.0] * len(jobs)
    running: list[tuple[float, int]] = []
    waiting: list[int] = []
    arrived = 0
    while arrived < len(jobs) or running:
        arrival = jobs[arrived].submitted if arrived < len(jobs) else math.inf
        now = min([arrival, *(end for end, _ in running)])
        for end, job in [r for r in running if r[0] <= now]:
            running.remove((end, job))
            free += jobs[job].gpus
        while arrived < len(jobs) and jobs[arrived].submitted <= now:
            waiting.append(arrived)
            arrived += 1
        waiting.sort(key=lambda j: (key(jobs[j]), j))
        for job in waiting[:]:
            if jobs[job].gpus <= free:
                waiting.remove(job)
                free -= jobs[job].gpus
                end = now + START_S + jobs[job].seconds
                running.append((end, job))
                done[job] = end - jobs[job].submitted
            elif strict:
                break
    return done


def fluid(jobs: Sequence[TraceJob], gpus: int) -> list[float]:
    """Return completion times where GPUs are dealt anew each second, free of cost.

    One after another, in turn, to the jobs by their remaining time at the requested size.
    """
    left = [j.samples for j in jobs]
    done = [0.0] * len(jobs)
    now = 0.0
    while not all(done):
        active = [i for i, j in enumerate(jobs) if j.submitted <= now and not done[i]]
        active.sort(key=lambda i: left[i] / jobs[i].rate)
        sizes, free = dict.fromkeys(active, 0), gpus
        while free and (open_jobs := [i for i in active if sizes[i] < MOST * jobs[i].gpus]):
            for i in open_jobs[:free]:
                sizes[i] += 1
            free -= min(free, len(open_jobs))
        now += 1.0
        for i in active:
            left[i] -= jobs[i].speed(sizes[i]) if sizes[i] else 0.0
            if left[i] <= 0:
                done[i] = now - jobs[i].submitted
    return done


@dataclass
class _Running:
    """State of a job in a world with changing sizes."""

    job: TraceJob
    done: float = 0.0
    held: int = 0
    trains_from: float = 0.0
    ended: float | None = None
    started: bool = False
    ran_s: float = 0.0
    changes: int = 0
    scheduled_at: int = 0
    limit: SizeLimit = field(default_factory=lambda: SizeLimit(requested=1))
    measured: dict[int, list[float]] = field(default_factory=dict)

    @property
    def epochs(self) -> int:
        return int(self.done / self.job.epoch_size + 1e-9)

    def resize(self, gpus: int, now: float, *, moved: bool = False) -> None:
        """Change the size, or the GPUs, which costs the same."""
        if gpus == self.held and not (moved and gpus):
            return
        self.trains_from = now + (CHANGE_S if self.held and gpus else START_S)
        self.started |= gpus > 0
        self.changes += 1
        self.held = gpus

    def advance(self, begin: float, end: float) -> None:
        """Train from one time to another, or until the end of the work."""
        if not self.held or self.ended is not None:
            return
        speed, trains = self.job.speed(self.held), max(begin, self.trains_from)
        finish = trains + (self.job.samples - self.done) / speed
        before = self.epochs
        if finish <= end:
            self.ended, self.ran_s = finish, self.ran_s + finish - begin
            self.held = 0
            return
        self.ran_s += end - begin
        self.done += max(0.0, end - trains) * speed
        if self.epochs > before:
            of_size = self.measured.setdefault(self.held, [])
            of_size.append(speed)
            del of_size[:-_MEASURED]

    def throughput(self, gpus: Ints) -> Floats:
        """Return the throughput by number of GPUs: linear through what was measured and (0, 0)."""
        sizes = sorted(self.measured)
        x = np.array([0, *sizes], dtype=np.float64)
        y = np.array([0.0, *(mean(self.measured[n]) for n in sizes)])
        values = np.interp(gpus, x, y)
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
        return np.asarray(np.where(gpus > x[-1], y[-1] + slope * (gpus - x[-1]), values))

    def record(self) -> EpochRecord:
        """Return the last epoch, with the values of its type's history."""
        return self.job.epochs[min(self.epochs, len(self.job.epochs)) - 1]


@dataclass(frozen=True, slots=True)
class ElasticOutcome:
    """Average completion, run time and number of size changes of a replay."""

    completion_s: float
    execution_s: float
    changes: int


def published(
    jobs: Sequence[TraceJob],
    gpus: int,
    predictor: BetaProgress,
    *,
    seed: int = 0,
    interval_s: float = GENERATION_S,
) -> ElasticOutcome:
    """Replay the jobs under the published operators, a generation every `interval_s`."""
    rng = np.random.default_rng(seed)
    states = [_Running(j, limit=SizeLimit(requested=j.gpus)) for j in jobs]
    rows: Ints | None = None
    present = np.full(gpus, EMPTY, dtype=np.int64)
    kept: list[int] = []
    now = 0.0
    while any(s.ended is None for s in states):
        active = [i for i, s in enumerate(states) if s.job.submitted <= now and s.ended is None]
        ended = [i for i, s in enumerate(states) if s.ended is not None]
        present[np.isin(present, ended)] = EMPTY
        if active:
            _raise_limits(states, active, gpus)
            evolving = _evolving(states, active, gpus, predictor, rng)
            local = {job: at for at, job in enumerate(active)}
            to_local = np.array([*(local.get(j, EMPTY) for j in range(len(states))), EMPTY])
            shown = to_local[present]
            if rows is None:
                rows = first_generation(evolving, gpus, rng)
            else:
                rows = to_local[np.array([*kept, EMPTY])[rows]]
            rows = next_generation(rows, evolving, shown, rng)
            kept = active
            effect = _put_into_effect(states, active, rows[0], present, now)
            if not np.array_equal(effect, present):
                for i in active:
                    if states[i].held:
                        states[i].scheduled_at = states[i].epochs
            present = effect
        for state in states:
            state.advance(now, now + interval_s)
        now += interval_s
    return _outcome(states)


def _raise_limits(states: Sequence[_Running], active: Sequence[int], gpus: int) -> None:
    """Raise the limits of jobs by the epochs that they have done."""
    for i in active:
        state = states[i]
        if state.held:
            # As published, the epochs since the last change are counted from the first one.
            state.limit = state.limit.after_epochs(state.held, state.epochs, gpus)


def _room(states: Sequence[_Running], active: Sequence[int], gpus: int) -> Ints:
    """Return the room of each active job, that of the largest one lowered if it has run long."""
    counted = [i for i in active if states[i].held and states[i].epochs >= EPOCHS]
    lowered = room_of_largest(
        {i: states[i].held for i in counted},
        {i: states[i].ran_s for i in counted},
        [s.ran_s for i, s in enumerate(states) if i not in counted and s.started],
        gpus,
    )
    room = {i: states[i].limit.room(states[i].held, states[i].epochs) for i in active}
    if lowered:
        room[lowered[0]] = lowered[1]
    return np.array([room[i] for i in active], dtype=np.int64)


def _evolving(
    states: Sequence[_Running],
    active: Sequence[int],
    gpus: int,
    predictor: BetaProgress,
    rng: np.random.Generator,
) -> EvolvingJobs:
    known = np.array([states[i].epochs >= EPOCHS and bool(states[i].measured) for i in active])
    single = np.zeros(len(active))
    service = np.zeros((len(active), gpus + 1))
    counts = np.arange(1, gpus + 1)
    for at in np.flatnonzero(known).tolist():
        state = states[active[at]]
        progress = float(predictor.drawn([state.record()], rng)[0])
        remaining = state.done * (1 / progress - 1)
        speeds = np.maximum(state.throughput(counts), 1e-9)
        single[at] = remaining / speeds[0]
        service[at, 1:] = counts * remaining / speeds
    return EvolvingJobs(
        known=known,
        least=np.ones(len(active), dtype=np.int64),
        room=_room(states, active, gpus),
        limit=np.array([states[i].limit.limit for i in active], dtype=np.int64),
        single_s=single,
        service=service,
    )


def _put_into_effect(
    states: Sequence[_Running], active: Sequence[int], best: Ints, present: Ints, now: float
) -> Ints:
    """Start jobs on free GPUs; change the others if all of them have ended an epoch.

    As published, an epoch since the schedule was last changed, for whatever job.
    """
    target = np.array([*active, EMPTY])[best]
    sizes = dict(zip(active, sizes_of(best[None, :], len(active))[0].tolist(), strict=True))
    changed = [
        i for i in active if states[i].held and not np.array_equal(target == i, present == i)
    ]
    if all(states[i].epochs - states[i].scheduled_at >= 1 for i in changed):
        for i in active:
            if states[i].started and not states[i].held and not sizes[i]:
                states[i].limit = states[i].limit.stopped()
            states[i].resize(sizes[i], now, moved=i in changed)
        return target
    present = present.copy()
    for i in active:
        own = target == i
        if not states[i].held and sizes[i] and (present[own] == EMPTY).all():
            present[own] = i
            states[i].resize(sizes[i], now)
    return present


def searched(jobs: Sequence[TraceJob], gpus: int, *, seed: int = 0) -> ElasticOutcome:
    """Replay the jobs under the anytime search, at each arrival and end.

    The profit of a size is the speed there over the work that is left, less the time of the change:
    the rate at which jobs end. A job starts on at most the GPUs that it asked for.
    """
    states = [_Running(j) for j in jobs]
    now = 0.0
    while any(s.ended is None for s in states):
        active = [s for s in states if s.job.submitted <= now and s.ended is None]
        if active:
            _search(active, gpus, now, seed)
        arrivals = [s.job.submitted for s in states if s.job.submitted > now]
        ends = [
            max(now, s.trains_from) + (s.job.samples - s.done) / s.job.speed(s.held)
            for s in active
            if s.held
        ]
        following = min([*arrivals, *ends])
        for state in states:
            state.advance(now, following)
        now = following
    return _outcome(states)


def _search(active: Sequence[_Running], gpus: int, now: float, seed: int) -> None:
    row, size, profit = [], [], []
    for at, state in enumerate(active):
        job = state.job
        most = MOST * job.gpus if state.started else job.gpus
        left = job.samples - state.done
        for n in range(1, min(most, gpus) + 1):
            seconds = left / job.speed(n)
            if n != state.held:
                seconds += CHANGE_S if state.held else START_S
            row.append(at)
            size.append(n)
            profit.append(1.0 / seconds)
    columns = Columns(
        row=np.array(row),
        config=np.array(size),
        kind=np.zeros(len(row), dtype=np.int64),
        gpus=np.array(size),
        profit=np.array(profit),
        job=np.arange(len(active)),
        room=np.array([float(gpus)]),
    )
    held = np.array([s.held for s in active])
    present = np.flatnonzero(columns.gpus == held[columns.row])
    picked = anytime_search.improved(
        columns, [present], clock=Clock(60.0), seed=seed, children=_CHILDREN
    )
    sizes = np.zeros(len(active), dtype=np.int64)
    sizes[columns.row[picked]] = columns.gpus[picked]
    for state, n in zip(active, sizes.tolist(), strict=True):
        state.resize(n, now)


def _outcome(states: Sequence[_Running]) -> ElasticOutcome:
    completions = [s.ended - s.job.submitted for s in states if s.ended is not None]
    return ElasticOutcome(
        mean(completions), mean(s.ran_s for s in states), sum(s.changes for s in states)
    )
