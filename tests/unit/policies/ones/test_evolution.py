"""Operators of one generation: no GPU twice, no job above its room or limit, the same by a seed."""

import numpy as np
import pytest

from slurm_elastic.policies.ones import evolution
from slurm_elastic.policies.ones.block_order import EMPTY
from slurm_elastic.policies.ones.evolution import EvolvingJobs

GPUS = 16


def invented(seed, jobs=8):
    rng = np.random.default_rng(seed)
    known = rng.random(jobs) < 0.7
    room = rng.integers(1, 6, size=jobs)
    left = rng.uniform(10, 1000, size=jobs)
    counts = np.arange(GPUS + 1)
    return EvolvingJobs(
        known=known,
        least=np.ones(jobs, dtype=np.int64),
        room=np.where(known, room, 1),
        limit=np.where(known, 2 * room, 1),
        single_s=left,
        service=np.outer(np.where(known, left, 0.0), counts**0.2) * (counts > 0),
    )


@pytest.mark.parametrize("seed", range(8))
def test_generations_keep_to_room_and_limits(seed):
    jobs, rng = invented(seed), np.random.default_rng(seed)
    present = np.full(GPUS, EMPTY)
    rows = evolution.first_generation(jobs, GPUS, rng)
    for _ in range(4):
        rows = evolution.next_generation(rows, jobs, present, rng)
        assert rows.shape == (evolution.POPULATION, GPUS)
        sizes = evolution.sizes_of(rows, len(jobs))
        assert (sizes <= np.maximum(jobs.room, jobs.limit)).all()
        scores = evolution.scores(sizes, jobs)
        assert (np.diff(scores) >= 0).all()
        present = rows[0]


def test_refreshing_twice_changes_nothing_more():
    jobs, rng = invented(3), np.random.default_rng(3)
    rows = rng.integers(-1, len(jobs), size=(5, GPUS))
    once = evolution.refreshed(rows, jobs)
    assert (evolution.sizes_of(once, len(jobs)) <= jobs.room).all()
    assert (evolution.refreshed(once, jobs) == once).all()


def test_new_jobs_come_first_then_the_shortest_up_to_its_room_then_to_its_limit():
    jobs = EvolvingJobs(
        known=np.array([True, False, True]),
        least=np.array([1, 1, 1]),
        room=np.array([2, 1, 2]),
        limit=np.array([8, 1, 8]),
        single_s=np.array([50.0, 0.0, 10.0]),
        service=np.zeros((3, 9)),
    )
    nothing = np.zeros((1, 3), dtype=np.int64)
    assert evolution.filled(nothing, jobs, 4)[0].tolist() == [1, 1, 2]
    assert evolution.filled(nothing, jobs, 8)[0].tolist() == [2, 1, 5]


def test_equal_seeds_give_equal_generations():
    jobs, present = invented(5), np.full(GPUS, EMPTY)

    def generations():
        rng = np.random.default_rng(9)
        rows = evolution.first_generation(jobs, GPUS, rng)
        return evolution.next_generation(rows, jobs, present, rng)

    assert (generations() == generations()).all()
