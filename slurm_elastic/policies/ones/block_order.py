"""Order of jobs along a list of GPUs, with adjacent GPUs for each, that moves the fewest GPUs.

ONES (SC'21) reorders every schedule so: `f[i][k]` is the least number of GPUs that are taken from
another job, with k jobs on the first i GPUs. Only the best order of each state is kept, so the
result may be worse than the best order. Ties go to the order in which the blocks end earlier, then
to the order of the jobs. Up to five jobs are ordered exactly where that takes fewer GPUs.
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


def reordered(sizes: Ints, present: Ints, orders: Ints) -> Ints:
    """Return [K, G] schedules of blocks that take few GPUs from jobs of the present schedule.

    Args:
        sizes: [K, J] GPUs of each job in each schedule, together at most G.
        present: [G] the job on each GPU, or EMPTY.
        orders: [K, J] all jobs, in the order in which they are tried.
    """
    # Schedules of a population are often alike, after some generations mostly all of them.
    keys = np.concatenate([sizes, np.where(np.take_along_axis(sizes, orders, 1), orders, EMPTY)], 1)
    _, first, index = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    sizes, orders = sizes[first], orders[first]
    blocks = _by_states(sizes, present, orders)
    now = tuple(present.tolist())
    for row in np.flatnonzero((sizes > 0).sum(axis=1) <= _EXACT):
        exact = _exact(tuple(sizes[row].tolist()), now)
        if taken(exact, present) < taken(blocks[row], present):
            blocks[row] = exact
    return blocks[index.ravel()]


def taken(schedule: Ints, present: Ints) -> int:
    """Return the number of GPUs that a schedule gives to another job than now."""
    return int(((schedule != EMPTY) & (present != EMPTY) & (schedule != present)).sum())


def _taken_before(jobs: int, present: Ints) -> Ints:
    """Return [J, G + 1] numbers of GPUs before each position on which another job is now."""
    other = (present != np.arange(jobs)[:, None]) & (present != EMPTY)
    before = np.zeros((jobs, len(present) + 1), dtype=np.int64)
    before[:, 1:] = np.cumsum(other, axis=1)
    return before


@lru_cache(maxsize=64)  # the generations of a round mostly end in the same sizes
def _exact(sizes_of_jobs: tuple[int, ...], present_jobs: tuple[int, ...]) -> Ints:
    """Return the best schedule: least cost of every set of jobs on the first GPUs."""
    sizes, present = (np.array(row, dtype=np.int64) for row in (sizes_of_jobs, present_jobs))
    jobs = np.flatnonzero(sizes > 0)
    sums = _taken_before(len(sizes), present)
    costs = {}
    for job in jobs.tolist():
        costs[job] = np.full(len(present) + 1, _NEVER, dtype=np.int64)
        costs[job][sizes[job] :] = sums[job, sizes[job] :] - sums[job, : -sizes[job]]
    least = np.full((1 << len(jobs), len(present) + 1), _NEVER, dtype=np.int64)
    least[0] = 0
    for members in range(1, len(least)):
        for at, job in enumerate(jobs.tolist()):
            if members >> at & 1:
                size, rest = int(sizes[job]), least[members ^ (1 << at)]
                ends = costs[job].copy()
                ends[size:] += rest[: len(rest) - size]
                np.minimum(least[members], ends, out=least[members])
        least[members] = np.minimum.accumulate(least[members])
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


def _by_states(sizes: Ints, present: Ints, orders: Ints) -> Ints:
    """Return schedules by the published dynamic programme, all at once."""
    count, jobs = sizes.shape
    gpus, most = len(present), int((sizes > 0).sum(axis=1).max(initial=0))
    # From here on jobs have the places that they have in the order of their schedule.
    sizes = np.take_along_axis(sizes, orders, axis=1)
    sums = _taken_before(jobs, present)[orders]
    rows, columns = np.arange(count)[:, None], np.arange(jobs)[None, :]
    least = np.full((count, gpus + 1, most + 1), _NEVER, dtype=np.int64)
    used = np.zeros((count, gpus + 1, most + 1, jobs), dtype=np.bool_)
    chosen = np.full((count, gpus + 1, most + 1), EMPTY, dtype=np.int64)
    least[:, 0, 0] = 0
    for end in range(1, gpus + 1):
        least[:, end] = least[:, end - 1]
        used[:, end] = used[:, end - 1]
        begins = end - sizes
        fits = (sizes > 0) & (begins >= 0)
        begins = np.maximum(begins, 0)
        cost = sums[:, :, end] - sums[rows, columns, begins]
        # [K, J, k]: least cost with job j as the last of k blocks, which ends here.
        cases = least[rows, begins] + cost[:, :, None]
        cases[used[rows, begins, :, columns] | ~fits[:, :, None]] = _NEVER
        job = cases[:, :, :-1].argmin(axis=1)
        value = np.take_along_axis(cases[:, :, :-1], job[:, None, :], axis=1)[:, 0]
        better = value < least[:, end, 1:]
        least[:, end, 1:][better] = value[better]
        chosen[:, end, 1:][better] = job[better]
        row, blocks = np.nonzero(better)
        last = job[row, blocks]
        used[row, end, blocks + 1] = used[row, begins[row, last], blocks]
        used[row, end, blocks + 1, last] = True
    return np.array(
        [_traced(sizes[k], present, least[k], chosen[k], orders[k]) for k in range(count)]
    )


def _traced(sizes: Ints, present: Ints, least: Ints, chosen: Ints, order: Ints) -> Ints:
    schedule = np.full(len(present), EMPTY, dtype=np.int64)
    end, blocks = len(present), int((sizes > 0).sum())
    if least[end, blocks] >= _NEVER:
        return _side_by_side(sizes, present, order)
    while blocks:
        job = int(chosen[end, blocks])
        if job == EMPTY:
            end -= 1
            continue
        schedule[end - sizes[job] : end] = order[job]
        end, blocks = end - int(sizes[job]), blocks - 1
    return schedule


def _side_by_side(sizes: Ints, present: Ints, order: Ints) -> Ints:
    """Return a schedule without gaps, jobs in the order in which they stand now."""
    at = np.full(len(sizes), len(present))
    held = present != EMPTY
    np.minimum.at(at, present[held], np.flatnonzero(held))
    schedule = np.full(len(present), EMPTY, dtype=np.int64)
    places = np.argsort(at[order], kind="stable")
    filled = np.repeat(order[places], sizes[places])
    schedule[: len(filled)] = filled
    return schedule
