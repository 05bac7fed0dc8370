"""Order of samples in any world."""

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.integrations.batch_share import share
from slurm_elastic.integrations.elastic_sampler import ElasticSampler


@given(
    per_rank=st.integers(1, 8),
    world=st.sampled_from([1, 2, 3, 4, 6, 12]),
    other=st.sampled_from([1, 2, 3, 4, 6, 12]),
    samples=st.integers(24, 200),
    epoch=st.integers(0, 5),
    done=st.integers(0, 10),
)
def test_steps_are_the_same_after_a_change_of_the_world(
    per_rank, world, other, samples, epoch, done
):
    """24 samples per step: `done` steps in one world, the rest in another."""
    steps = samples // 24
    done = min(done, steps)
    alone = ElasticSampler(samples, share(24, per_rank=24, world=1), seed=3, rank=0)
    alone.set_epoch(epoch)
    order = list(alone)
    assert len(order) == len(set(order)) == len(alone) == steps * 24
    for ranks, first, last in ((world, 0, done), (other, done, steps)):
        planned = share(24, per_rank=per_rank, world=ranks)
        samplers = [ElasticSampler(samples, planned, seed=3, rank=r) for r in range(ranks)]
        for sampler in samplers:
            sampler.resume(epoch, first * 24)
        own = 24 // ranks
        parts = [list(sampler) for sampler in samplers]
        for step in range(first, last):
            at = (step - first) * own
            trained = [number for part in parts for number in part[at : at + own]]
            assert sorted(trained) == sorted(order[step * 24 : step * 24 + 24])


def test_only_the_epoch_that_was_cut_is_shortened():
    sampler = ElasticSampler(48, share(8, per_rank=8, world=1), rank=0)
    sampler.resume(2, 40)
    assert len(list(sampler)) == 8
    sampler.set_epoch(3)
    assert len(list(sampler)) == len(sampler) == 48


def test_epochs_have_orders_of_their_own_unless_it_does_not_shuffle():
    planned = share(8, per_rank=8, world=1)
    sampler = ElasticSampler(48, planned, rank=0)
    first = list(sampler)
    sampler.set_epoch(1)
    assert sorted(first) == sorted(sampler) != list(sampler)
    assert first != list(sampler)
    assert list(ElasticSampler(48, planned, rank=0, shuffle=False)) == list(range(48))


def test_fewer_samples_than_a_step_are_refused():
    with pytest.raises(ValueError, match="samples: 7 is invalid: expected at least the 8 of one"):
        ElasticSampler(7, share(8, per_rank=8, world=1))
