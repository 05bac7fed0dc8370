"""Order of blocks: sizes kept, blocks contiguous, few GPUs taken from other jobs."""

import itertools

import numpy as np
import pytest

from slurm_elastic.policies.ones.block_order import EMPTY, reordered, taken


def ordered(sizes, present):
    """Return the schedules of sizes whose jobs are tried by number."""
    return reordered(sizes, present, np.tile(np.arange(sizes.shape[1]), (len(sizes), 1)))


def fewest_taken(sizes, present):
    """Return the least number of GPUs taken from others, by trying every order and every gap."""
    jobs = [j for j, n in enumerate(sizes) if n]
    free = len(present) - sum(sizes)
    best = len(present)
    for order in itertools.permutations(jobs):
        for gaps in itertools.combinations_with_replacement(range(len(jobs) + 1), free):
            row = []
            for at, job in enumerate(order):
                row += [EMPTY] * gaps.count(at) + [job] * sizes[job]
            row += [EMPTY] * gaps.count(len(jobs))
            best = min(best, taken(np.array(row), present))
    return best


def invented(rng, jobs, gpus):
    present = rng.integers(-1, jobs, size=gpus)
    sizes = rng.integers(0, 5, size=jobs)
    while sizes.sum() > gpus:
        sizes[rng.integers(jobs)] = 0
    return sizes, present


@pytest.mark.parametrize("seed", range(12))
def test_few_jobs_take_as_few_gpus_from_others_as_can_be(seed):
    rng = np.random.default_rng(seed)
    sizes, present = invented(rng, 4, 9)
    row = ordered(sizes[None, :], present)[0]
    assert taken(row, present) == fewest_taken(sizes.tolist(), present)


@pytest.mark.parametrize("seed", range(12))
def test_sizes_are_kept_in_contiguous_blocks(seed):
    rng = np.random.default_rng(seed)
    cases = [invented(rng, 9, 24)[0] for _ in range(8)]
    _, present = invented(rng, 9, 24)
    for sizes, row in zip(cases, ordered(np.array(cases), present), strict=True):
        assert [int((row == j).sum()) for j in range(9)] == sizes.tolist()
        blocks = [j for j, _ in itertools.groupby(row.tolist()) if j != EMPTY]
        assert len(blocks) == len(set(blocks))


def test_a_schedule_that_is_in_blocks_stays():
    present = np.array([3, 3, 0, 0, 0, 6, 1, 2, 4, 5, EMPTY, EMPTY])
    sizes = np.array([[3, 1, 1, 2, 1, 1, 1]])
    assert ordered(sizes, present)[0].tolist() == present.tolist()


def test_a_job_that_grows_into_free_gpus_leaves_the_others():
    present = np.array([0, 1, 2, EMPTY, EMPTY, EMPTY])
    row = ordered(np.array([[2, 1, 1]]), present)[0]
    assert row.tolist() == [EMPTY, 1, 2, 0, 0, EMPTY]


def test_of_equal_orders_the_one_that_is_tried_first_counts():
    sizes, present = np.array([[1, 2, 1]]), np.full(5, EMPTY)
    row = reordered(sizes, present, np.array([[2, 0, 1]]))[0]
    assert row.tolist() == [2, 0, 1, 1, EMPTY]
