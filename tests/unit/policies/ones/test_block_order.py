"""Order of blocks: sizes kept, blocks contiguous, few entries changed."""

import itertools

import numpy as np
import pytest

from slurm_elastic.policies.ones.block_order import EMPTY, reordered


def fewest_changes(sizes, present):
    """Return the least number of changed entries, by trying every order and every gap."""
    jobs = [j for j, n in enumerate(sizes) if n]
    free = len(present) - sum(sizes)
    best = len(present)
    for order in itertools.permutations(jobs):
        for gaps in itertools.combinations_with_replacement(range(len(jobs) + 1), free):
            row = []
            for at, job in enumerate(order):
                row += [EMPTY] * gaps.count(at) + [job] * sizes[job]
            row += [EMPTY] * gaps.count(len(jobs))
            best = min(best, int((np.array(row) != present).sum()))
    return best


def invented(rng, jobs, gpus):
    present = rng.integers(-1, jobs, size=gpus)
    sizes = rng.integers(0, 5, size=jobs)
    while sizes.sum() > gpus:
        sizes[rng.integers(jobs)] = 0
    return sizes, present


@pytest.mark.parametrize("seed", range(12))
def test_few_jobs_change_as_few_gpus_as_can_be(seed):
    rng = np.random.default_rng(seed)
    sizes, present = invented(rng, 4, 9)
    row = reordered(sizes[None, :], present)[0]
    assert (row != present).sum() == fewest_changes(sizes.tolist(), present)


@pytest.mark.parametrize("seed", range(12))
def test_sizes_are_kept_in_contiguous_blocks(seed):
    rng = np.random.default_rng(seed)
    cases = [invented(rng, 9, 24)[0] for _ in range(8)]
    _, present = invented(rng, 9, 24)
    for sizes, row in zip(cases, reordered(np.array(cases), present), strict=True):
        assert [int((row == j).sum()) for j in range(9)] == sizes.tolist()
        blocks = [j for j, _ in itertools.groupby(row.tolist()) if j != EMPTY]
        assert len(blocks) == len(set(blocks))


def test_a_schedule_that_is_in_blocks_stays():
    present = np.array([3, 3, EMPTY, 0, 0, 0, 6, EMPTY, 1, 2, 4, 5])
    sizes = np.array([[3, 1, 1, 2, 1, 1, 1]])
    assert reordered(sizes, present)[0].tolist() == present.tolist()
