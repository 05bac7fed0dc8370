"""Order of jobs on a row of GPUs, one block of neighbours each, that changes fewest entries.

ONES (SC'21) reorders every schedule so: `f[i][k]` is the least number of changed entries with k
jobs on the first i GPUs, and only the best order is kept of each state, so that a job can be in the
way of a better order. Up to five jobs are put in order exactly instead.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

#: An entry of a schedule without a job.
EMPTY = -1
#: Most jobs of a schedule that are put in order exactly: 2^jobs states for each GPU.
_EXACT = 5
_NEVER = 1 << 30


def reordered(sizes: Ints, present: Ints) -> Ints:
    """Return [K, G] schedules of blocks that change few entries of the present schedule.

    Args:
        sizes: [K, J] GPUs of each job in each schedule, together at most G.
        present: [G] the job on each GPU, or EMPTY.
    """
    # Schedules of a population are often alike, after some generations mostly all of them.
    different, index = sizes[:1], np.zeros(len(sizes), dtype=np.int64)
    if (sizes != different).any():
        different, index = np.unique(sizes, axis=0, return_inverse=True)
    blocks = np.empty((len(different), len(present)), dtype=np.int64)
    few = (different > 0).sum(axis=1) <= _EXACT
    now = tuple(present.tolist())
    for row in np.flatnonzero(few):
        blocks[row] = _exact(tuple(different[row].tolist()), now)
    if not few.all():
        blocks[~few] = _by_states(different[~few], present)
    return blocks[index.ravel()]


def _entry_costs(jobs: int, present: Ints) -> Ints:
    """Return [J, G + 1] numbers of GPUs before each position on which a job is not now."""
    changed = present != np.arange(jobs)[:, None]
    before = np.zeros((jobs, len(present) + 1), dtype=np.int64)
    before[:, 1:] = np.cumsum(changed, axis=1)
    return before


def _gap_costs(present: Ints) -> Ints:
    """Return [G + 1] numbers of GPUs before each position on which a job is now."""
    before = np.zeros(len(present) + 1, dtype=np.int64)
    before[1:] = np.cumsum(present != EMPTY)
    return before


@lru_cache(maxsize=64)  # the generations of a round mostly end in the same sizes
def _exact(sizes_of_jobs: tuple[int, ...], present_jobs: tuple[int, ...]) -> Ints:
    """Return the best schedule: least cost of every set of jobs on the first GPUs."""
    sizes, present = (np.array(row, dtype=np.int64) for row in (sizes_of_jobs, present_jobs))
    jobs = np.flatnonzero(sizes > 0)
    emptied = _gap_costs(present)
    sums = _entry_costs(len(sizes), present)
    costs = {}
    for job in jobs.tolist():
        costs[job] = np.full(len(present) + 1, _NEVER, dtype=np.int64)
        costs[job][sizes[job] :] = sums[job, sizes[job] :] - sums[job, : -sizes[job]]
    least = np.full((1 << len(jobs), len(present) + 1), _NEVER, dtype=np.int64)
    least[0] = emptied
    for members in range(1, len(least)):
        for at, job in enumerate(jobs.tolist()):
            if members >> at & 1:
                size, rest = int(sizes[job]), least[members ^ (1 << at)]
                ends = costs[job].copy()
                ends[size:] += rest[: len(rest) - size]
                np.minimum(least[members], ends, out=least[members])
        gaps = np.minimum.accumulate(least[members] - emptied) + emptied
        least[members] = np.minimum(gaps, _NEVER)
    schedule = np.full(len(present), EMPTY, dtype=np.int64)
    members, end = len(least) - 1, len(present)
    while members:
        here = least[members][end]
        for at, job in enumerate(jobs.tolist()):
            size = int(sizes[job])
            rest = members ^ (1 << at)
            fits = rest < members and size <= end
            if fits and here == costs[job][end] + least[rest][end - size]:
                schedule[end - size : end] = job
                members, end = rest, end - size
                break
        else:
            end -= 1
    return schedule


def _by_states(sizes: Ints, present: Ints) -> Ints:
    """Return schedules by the published dynamic programme, all at once."""
    count, jobs = sizes.shape
    gpus, most = len(present), int((sizes > 0).sum(axis=1).max(initial=0))
    sums, emptied = _entry_costs(jobs, present), _gap_costs(present)
    rows, columns = np.arange(count)[:, None], np.arange(jobs)[None, :]
    least = np.full((count, gpus + 1, most + 1), _NEVER, dtype=np.int64)
    used = np.zeros((count, gpus + 1, most + 1, jobs), dtype=np.bool_)
    chosen = np.full((count, gpus + 1, most + 1), EMPTY, dtype=np.int64)
    least[:, 0, 0] = 0
    for end in range(1, gpus + 1):
        least[:, end] = least[:, end - 1] + (emptied[end] - emptied[end - 1])
        used[:, end] = used[:, end - 1]
        begins = end - sizes
        fits = (sizes > 0) & (begins >= 0)
        begins = np.maximum(begins, 0)
        cost = sums[:, end][None, :] - sums[columns, begins]
        # [K, J, k]: least cost with job j as the last of k blocks, which ends here.
        cases = least[rows, begins] + cost[:, :, None]
        cases[used[rows, begins, :, columns] | ~fits[:, :, None]] = _NEVER
        job = cases[:, :, :-1].argmin(axis=1)
        value = np.take_along_axis(cases[:, :, :-1], job[:, None, :], axis=1)[:, 0]
        # Of equal orders one without a gap here.
        better = (value <= least[:, end, 1:]) & (value < _NEVER)
        least[:, end, 1:][better] = value[better]
        chosen[:, end, 1:][better] = job[better]
        row, blocks = np.nonzero(better)
        last = job[row, blocks]
        used[row, end, blocks + 1] = used[row, begins[row, last], blocks]
        used[row, end, blocks + 1, last] = True
    least = np.minimum(least, _NEVER)
    return np.array([_traced(sizes[k], present, least[k], chosen[k]) for k in range(count)])


def _traced(sizes: Ints, present: Ints, least: Ints, chosen: Ints) -> Ints:
    schedule = np.full(len(present), EMPTY, dtype=np.int64)
    end, blocks = len(present), int((sizes > 0).sum())
    if least[end, blocks] >= _NEVER:
        return _side_by_side(sizes, present)
    while blocks:
        job = int(chosen[end, blocks])
        if job == EMPTY:
            end -= 1
            continue
        schedule[end - sizes[job] : end] = job
        end, blocks = end - int(sizes[job]), blocks - 1
    return schedule


def _side_by_side(sizes: Ints, present: Ints) -> Ints:
    """Return a schedule without gaps, jobs in the order in which they stand now."""
    at = np.full(len(sizes), len(present))
    held = present != EMPTY
    np.minimum.at(at, present[held], np.flatnonzero(held))
    schedule = np.full(len(present), EMPTY, dtype=np.int64)
    order = np.argsort(at, kind="stable")
    filled = np.repeat(order, sizes[order])
    schedule[: len(filled)] = filled
    return schedule
