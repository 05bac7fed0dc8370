"""Matching: the largest sum of speeds, and no pair that hurts."""

import itertools

import numpy as np
import pytest

from slurm_elastic.placement.neighbours.pair_matching import PossiblePair, matched


def pair(first, second, own, other=None, **more):
    speeds = (own, own if other is None else other)
    return PossiblePair(first=first, second=second, speeds=speeds, surely=speeds, **more)


def best_sum(pairs):
    """Return the largest gain of any matching, by trying all sets of pairs."""
    best = 0.0
    for count in range(len(pairs) + 1):
        for chosen in itertools.combinations(pairs, count):
            jobs = [j for p in chosen for j in (p.first, p.second)]
            if len(jobs) == len(set(jobs)):
                best = max(best, sum(p.gain for p in chosen))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_no_other_matching_gains_more(seed):
    rng = np.random.default_rng(seed)
    pairs = [
        pair(i, j, *rng.uniform(0.9, 1.0, size=2)) for i, j in itertools.combinations(range(5), 2)
    ]
    chosen = set(matched(pairs))
    gain = sum(p.gain for p in pairs if (p.first, p.second) in chosen)
    assert gain == pytest.approx(best_sum(pairs), abs=1e-5)


def test_a_pair_that_may_hurt_one_of_them_does_not_share():
    unsure = PossiblePair(first=1, second=2, speeds=(0.97, 0.99), surely=(0.85, 0.95))
    assert matched([unsure]) == []
    assert matched([pair(1, 2, 0.95, 0.95, gates=(0.9, 1.0))]) == []
    assert matched([pair(1, 2, 0.95, memory=0.95)]) == []
    assert matched([pair(1, 2, 0.95, memory=0.9)]) == [(1, 2)]


def test_a_slow_job_weighs_more_than_a_fast_one_gains():
    pairs = [pair(1, 2, 1.0, 0.9), pair(1, 3, 0.94)]
    assert matched(pairs) == [(1, 3)]  # 1.88 in all, against 1.9
    certain = [pair(1, 2, 1.0, 0.9, caution=0.0), pair(1, 3, 0.94, caution=0.0)]
    assert matched(certain) == [(1, 2)]


def test_as_many_as_can_be_share_where_that_is_wanted():
    low = {"gates": (0.0, 0.0)}
    pairs = [pair(2, 3, 1.0, **low), pair(1, 2, 0.6, **low), pair(3, 4, 0.6, **low)]
    assert matched(pairs) == [(2, 3)]
    assert matched(pairs, all_share=True) == [(1, 2), (3, 4)]
