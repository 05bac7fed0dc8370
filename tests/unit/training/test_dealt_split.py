"""Micro-batches of a step, on any number of ranks."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.training.dealt_split import DealtSplit


@given(
    count=st.integers(1, 200),
    world_size=st.integers(1, 12),
    micro=st.none() | st.integers(1, 40),
)
def test_each_sample_counts_once_and_ranks_have_equally_many_passes(
    count: int, world_size: int, micro: int | None
) -> None:
    splits = [DealtSplit(rank=r, world_size=world_size, micro=micro) for r in range(world_size)]
    by_rank = [split.slices(count) for split in splits]
    counted = Counter(i for pieces in by_rank for p in pieces if p.counts for i in p.span)
    assert counted == Counter(range(count))
    assert len({len(pieces) for pieces in by_rank}) == 1
    assert all(p.span for pieces in by_rank for p in pieces)
    assert all(p.span[-1] < count for pieces in by_rank for p in pieces)
    weights = sum(splits[0].weight(p, count) for pieces in by_rank for p in pieces)
    assert math.isclose(weights, world_size)
    numbers = [p.number for pieces in by_rank for p in pieces if p.counts]
    assert numbers == sorted(set(numbers))


@given(count=st.integers(1, 200), micro=st.integers(1, 40))
def test_micro_batches_do_not_depend_on_the_number_of_ranks(count: int, micro: int) -> None:
    def spans(world_size: int) -> dict[int, range]:
        splits = (DealtSplit(rank=r, world_size=world_size, micro=micro) for r in range(world_size))
        return {p.number: p.span for s in splits for p in s.slices(count) if p.counts}

    assert all(spans(world_size) == spans(1) for world_size in range(2, 9))
