"""The sampler: one global order, split over any number of ranks."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.training.parallel.pipeline_parallel import MicroBatchSplit
from slurm_elastic.training.pipeline import StageLayout
from slurm_elastic.training.sampler import Cursor, EvenSplit, Sampler, StepShare


def whole(sampler: Sampler, cursor: Cursor, world: int) -> list[list[StepShare]]:
    """Return the shares of all ranks, by step."""
    parts = [
        sampler.shares(cursor, EvenSplit(rank=rank, world_size=world)) for rank in range(world)
    ]
    return [list(shares) for shares in zip(*parts, strict=True)]


def joined(step: list[StepShare]) -> list[int]:
    return [index for share in step for index in share.indices]


@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 70),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**40),
    runs=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    data=st.data(),
)
def test_any_sequence_of_rank_counts_trains_on_the_batches_of_one_rank(
    samples: int, batch: int, epochs: int, seed: int, runs: list[int], data: st.DataObject
) -> None:
    sampler = Sampler(samples=samples, global_batch=batch, epochs=epochs, seed=seed)
    alone = [joined(step) for step in whole(sampler, Cursor(), 1)]
    cursor, seen = Cursor(), []
    for world in runs:
        steps = whole(sampler, cursor, world)
        done = data.draw(st.integers(0, len(steps)))
        for step in steps[:done]:
            assert {share.before for share in step} == {cursor}
            assert {share.count for share in step} == {len(joined(step))}
            sizes = [len(share.indices) for share in step]
            assert max(sizes) - min(sizes) <= 1
            seen.append(joined(step))
            cursor = step[0].after
    seen += [joined(step) for step in whole(sampler, cursor, 1)]
    assert seen == alone
    assert Counter(i for step in seen for i in step) == dict.fromkeys(range(samples), epochs)


def test_order_depends_on_seed_and_epoch_only() -> None:
    sampler = Sampler(samples=50, global_batch=7, epochs=2, seed=1)
    other = Sampler(samples=50, global_batch=25, epochs=9, seed=1)
    assert sampler.order(1).tolist() == other.order(1).tolist()
    assert sampler.order(0).tolist() != sampler.order(1).tolist()
    assert sampler.fingerprint() == other.fingerprint()
    assert (
        sampler.fingerprint() != Sampler(samples=50, global_batch=7, epochs=2, seed=2).fingerprint()
    )


def test_order_is_the_same_in_every_torch() -> None:
    # Jobs may restart under another release; seen with 2.6 and 2.13.
    sampler = Sampler(samples=10, global_batch=1, epochs=1, seed=0)
    assert sampler.order(0).tolist() == [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]


def test_micro_batches_cover_the_share_of_the_rank() -> None:
    def spans(count: int, micro: int | None) -> list[list[int]]:
        return [list(p.span) for p in EvenSplit(rank=0, world_size=1, micro=micro).slices(count)]

    assert spans(7, 3) == [[0, 1, 2], [3, 4, 5], [6]]
    assert spans(7, None) == [list(range(7))]
    assert EvenSplit(rank=0, world_size=2).slices(1) == []


@given(
    replicas=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    count=st.integers(1, 60),
    micro=st.none() | st.integers(1, 9),
)
def test_first_and_last_stage_of_a_pipeline_load_every_sample(
    replicas: list[int], count: int, micro: int | None
) -> None:
    layout = StageLayout.of(*replicas)
    turns = [
        MicroBatchSplit(layout=layout, rank=rank, micro=micro) for rank in range(layout.world_size)
    ]
    losses = [i for t in turns for piece in t.slices(count) if piece.counts for i in piece.span]
    assert sorted(losses) == list(range(count))
    inputs = {i for r in layout.stages[0] for p in turns[r].slices(count) for i in p.span}
    assert inputs == set(range(count))
    sizes = [len(span) for span in turns[0].spans(count)]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert micro is None or max(sizes) <= micro


def test_a_changed_batch_continues_where_the_last_one_ended() -> None:
    sampler = Sampler(samples=20, global_batch=4, epochs=1, seed=0)
    alone = EvenSplit(rank=0, world_size=1)
    first = next(sampler.shares(Cursor(), alone))
    rest = list(sampler.shares(first.after, alone, batch=6))
    assert [share.count for share in rest] == [6, 6, 4]
    assert joined([first, *rest]) == sampler.order(0).tolist()


def test_progress_ends_at_one() -> None:
    sampler = Sampler(samples=10, global_batch=4, epochs=2, seed=0)
    last = whole(sampler, Cursor(), 1)[-1][0].after
    assert sampler.ended(last)
    assert sampler.progress(Cursor()) == 0
    assert sampler.progress(Cursor(2, 0, 8)) == pytest.approx(0.4)
    assert sampler.progress(last) == 1


@pytest.mark.parametrize("name", ["samples", "global_batch", "epochs"])
def test_numbers_below_one_are_refused(name: str) -> None:
    plan = {"samples": 1, "global_batch": 1, "epochs": 1, "seed": 0, name: 0}
    with pytest.raises(ValueError, match=f"{name}: 0 is invalid"):
        Sampler(**plan)
