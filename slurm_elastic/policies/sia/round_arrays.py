"""Arrays of one round: which job may run in which configuration, and with what goodput.

Rows are jobs, columns configurations (sia_configurations.py). A job's row is its
directive's sizes, no more than `growth` times the most GPUs it was measured on
(Sia, section 3.2: start small, at most double), and in any case what it holds now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.config.policy_settings import SiaSettings
from slurm_elastic.core.application import Application, JobClass
from slurm_elastic.core.directive import Directive
from slurm_elastic.policies.policy_protocol import Question
from slurm_elastic.policies.sia.goodput_rows import Candidate, Goodputs
from slurm_elastic.policies.sia.sia_configurations import (
    SiaConfigurations,
    configurations,
    node_counts,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: Most listed sizes that all become configurations.
_FEW_SIZES = 64
_NO_BOUND = 1 << 40


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RoundArrays:
    """Arrays of J jobs by C configurations.

    Attributes:
        valid: [J, C] whether the job may run in the configuration.
        goodput: [J, C] in the job's own unit, > 0 where valid.
        held: [J] column of the present allocation; -1: none, or one no longer allowed.
        least: [J, T] smallest GPUs on each type, 0: cannot run there.
        cap: [J] most replicas until it is measured on more.
    """

    candidates: tuple[Candidate, ...]
    configurations: SiaConfigurations
    valid: Bools
    goodput: Floats
    held: Ints
    least: Ints
    cap: Ints


def candidates(question: Question) -> tuple[Candidate, ...]:
    """Return the jobs of a question that have a directive."""
    return tuple(
        Candidate(job, record, directive, question.models[job.job_id])
        for job, record, directive in question.elastic()
    )


def table(question: Question, config: SiaSettings, goodputs: Goodputs) -> RoundArrays:
    """Return the arrays of one round."""
    jobs = candidates(question)
    counts = node_counts(question.snapshot.nodes)
    for job in jobs:
        if job.held is not None:
            counts.setdefault(job.held.gpu_type, ((len(job.held.shares), 0),))
    counts = dict(sorted(counts.items()))
    types = tuple(counts)
    ranges = np.array([_ranges(j.directive, types) for j in jobs], dtype=np.int64)
    least, most, unit = np.moveaxis(ranges.reshape(len(jobs), 3, len(types)), 1, 0)
    _bind_application(jobs, types, most)
    columns = configurations(
        counts,
        {(types[t], int(unit[j, t])) for j, t in zip(*np.nonzero(unit > 1), strict=True)},
        whole_nodes=config.whole_nodes,
        # Rounded up, so that the set, and with it the kept rows, stays when a job ends.
        most_gpus=1 << int(most.max(initial=1) - 1).bit_length(),
    )
    cap = np.array([_cap(j, config.growth) for j in jobs], dtype=np.int64)
    top = np.where(least > 0, np.minimum(most, np.maximum(least, cap[:, None] * unit)), 0)
    _pass_gaps(jobs, types, (most, unit), cap, top)
    valid = _valid(columns, least, top, unit) & _listed(jobs, columns)
    goodput = goodputs.rows(jobs, columns)
    held_at, extra = _extra(jobs, columns, valid, (least, top))
    base = len(columns)
    columns = columns.extended(extra)
    valid, held = _add(jobs, columns, valid, held_at, extra)
    added = np.zeros((len(jobs), len(columns) - base))
    for i, c in zip(*np.nonzero(valid[:, base:]), strict=True):
        added[i, c] = goodputs.of_column(jobs[i], columns, base + int(c))
    goodput = np.concatenate([goodput, added], axis=1)
    rows = np.flatnonzero(held >= 0)
    smallest = np.where(valid & (goodput > 0), goodput, np.inf).min(axis=1, initial=np.inf)
    smallest[~np.isfinite(smallest)] = 1.0
    lost = rows[goodput[rows, held[rows]] <= 0]
    goodput[lost, held[lost]] = smallest[lost]
    valid &= goodput > 0
    return RoundArrays(
        candidates=jobs,
        configurations=columns,
        valid=valid,
        goodput=goodput,
        held=held,
        least=least,
        cap=cap,
    )


@lru_cache(maxsize=65536)
def _ranges(directive: Directive, types: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return least, most and unit on each type; 0, 0 where it may not run."""
    sizes = [directive.sizes(t) for t in types]
    return (
        tuple(s[0] if s else 0 for s in sizes),
        tuple(s[-1] if s else 0 for s in sizes),
        tuple(directive.unit_for(t) for t in types),
    )


def _bind_application(jobs: Sequence[Candidate], types: tuple[str, ...], most: Ints) -> None:
    """Bound sizes, in place, by an application's known types and by its largest batch."""
    bounds: dict[int, list[int]] = {}  # by identity: to compare applications takes longer
    rows, known = [], []
    for i, job in enumerate(jobs):
        if job.learned is None or not job.learned.application.types:
            continue
        application = job.learned.application
        if id(application) not in bounds:
            bounds[id(application)] = [_application_bound(application, name) for name in types]
        rows.append(i)
        known.append(bounds[id(application)])
    if rows:
        most[rows] = np.minimum(most[rows], np.array(known, dtype=np.int64))


def _application_bound(application: Application, gpu_type: str) -> int:
    """Return the most GPUs of a type that an application can use."""
    profile = application.on(gpu_type)
    if profile is None:
        return 0
    if application.job_class is not JobClass.ADAPTIVE:
        return _NO_BOUND
    replicas = application.max_batch // (profile.least * application.micro_batches)
    return max(1, replicas) * profile.unit


def _cap(job: Candidate, growth: float) -> int:
    """Return the most replicas of a job: `growth` times those it was measured on."""
    if job.rigid:
        return 1 << 20
    return max(1, int(growth * job.measured()))


def _pass_gaps(
    jobs: Sequence[Candidate],
    types: tuple[str, ...],
    bounds: tuple[Ints, Ints],
    cap: Ints,
    top: Ints,
) -> None:
    """Raise the bound on growth, in place, to the next size of jobs whose sizes have gaps."""
    most, unit = bounds
    for i, job in enumerate(jobs):
        if job.directive.regular:
            continue
        replicas = job.measured()
        for t, name in enumerate(types):
            if top[i, t]:
                width = int(unit[i, t])
                size = job.directive.within(name, int(cap[i]) * width, above=replicas * width)
                top[i, t] = min(most[i, t], size)


def _listed(jobs: Sequence[Candidate], columns: SiaConfigurations) -> Bools:
    """Return [J, C] whether the sizes of a job, if they have gaps, contain the configuration's."""
    listed = np.ones((len(jobs), len(columns)), dtype=bool)
    for i, job in enumerate(jobs):
        if job.directive.regular:
            continue
        for t, name in enumerate(columns.types):
            of_type = columns.kind == t
            sizes = np.array(job.directive.sizes(name), dtype=np.int64)
            listed[i, of_type] = np.isin(columns.gpus[of_type], sizes)
    return listed


def _valid(columns: SiaConfigurations, least: Ints, top: Ints, unit: Ints) -> Bools:
    kind, gpus = columns.kind, columns.gpus
    own = unit[:, kind]
    within = (gpus >= least[:, kind]) & (gpus <= top[:, kind]) & (gpus % own == 0)
    return np.asarray(within & ((columns.unit == 1) | (columns.unit == own)))


def _extra(
    jobs: Sequence[Candidate], columns: SiaConfigurations, valid: Bools, bounds: tuple[Ints, Ints]
) -> tuple[dict[int, tuple[int, int, int]], dict[tuple[int, int, int], list[int]]]:
    """Return the shapes held, by row, and shapes outside the set with the rows that need them."""
    least, top = bounds
    where = {name: t for t, name in enumerate(columns.types)}
    held: dict[int, tuple[int, int, int]] = {}
    extra: dict[tuple[int, int, int], list[int]] = {}
    inside = set(columns.shapes())
    for i, job in enumerate(jobs):
        if job.held is not None and job.directive.allows(job.held.gpus, job.held.gpu_type):
            shape = (where[job.held.gpu_type], len(job.held.shares), job.held.gpus)
            held[i] = shape
            if shape not in inside:
                extra.setdefault(shape, []).append(i)
    for i, shape in _listed_shapes(jobs, columns, valid, top):
        extra.setdefault(shape, []).append(i)
    # Each job has its smallest size: else it could wait for ever where larger ones do not fit.
    has_least = np.zeros_like(least, dtype=bool)
    for t in range(len(columns.types)):
        is_least = columns.gpus[None, columns.kind == t] == least[:, t, None]
        has_least[:, t] = (valid[:, columns.kind == t] & is_least).any(axis=1)
    for i, t in zip(*np.nonzero(~has_least & (least > 0) & (top >= least)), strict=True):
        gpus = int(least[i, t])
        per_node = columns.per_node[t]
        if per_node:
            shape = (int(t), -(-gpus // per_node), gpus)
            extra.setdefault(shape, []).append(int(i))
    return held, extra


def _listed_shapes(
    jobs: Sequence[Candidate], columns: SiaConfigurations, valid: Bools, top: Ints
) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Iterate over (row, shape) of sizes that no valid column has.

    These are all listed sizes, if they are few; of jobs with other gaps the bound on growth, if
    no smaller column lets them grow.
    """
    for i, job in enumerate(jobs):
        directive = job.directive
        if directive.regular:
            continue
        for t, name in enumerate(columns.types):
            if not columns.per_node[t] or not top[i, t]:
                continue
            inside = set(columns.gpus[valid[i] & (columns.kind == t)].tolist())
            sizes: Sequence[int] = directive.sizes(name)
            if not 0 < len(directive.listed) <= _FEW_SIZES:
                measured = job.measured() * directive.unit_for(name)
                sizes = () if max(inside, default=0) > measured else (int(top[i, t]),)
            for gpus in sizes:
                legal = gpus <= top[i, t] and directive.allows(gpus, name)
                if legal and gpus not in inside:
                    yield i, (t, -(-gpus // columns.per_node[t]), gpus)


def _add(
    jobs: Sequence[Candidate],
    columns: SiaConfigurations,
    valid: Bools,
    held_at: Mapping[int, tuple[int, int, int]],
    extra: Mapping[tuple[int, int, int], Sequence[int]],
) -> tuple[Bools, Ints]:
    """Return the validity with the added columns, and the column that each job holds."""
    added = np.zeros((len(jobs), len(columns) - valid.shape[1]), dtype=bool)
    valid = np.concatenate([valid, added], axis=1)
    column_of = {shape: c for c, shape in enumerate(columns.shapes())}
    for shape, rows in extra.items():
        valid[rows, column_of[shape]] = True
    held = np.full(len(jobs), -1, dtype=np.int64)
    holders = np.array(list(held_at), dtype=np.int64)
    at = np.array([column_of[shape] for shape in held_at.values()], dtype=np.int64)
    held[holders] = at
    # What it holds stands for its size, though on other nodes than a new allocation would have.
    other_type = columns.kind != columns.kind[at, None]
    valid[holders] &= other_type | (columns.gpus != columns.gpus[at, None])
    valid[holders, at] = True
    return valid, held
