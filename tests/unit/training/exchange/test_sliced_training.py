"""Replicas with sliced optimizer state train as one rank does."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from slurm_elastic.training.exchange.gradient_reducer import CONTROL, Reducer
from slurm_elastic.training.exchange.sliced_exchange import SlicedExchange, owners, owners_of
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.ranks.subgroup import Subgroup
from tests.support.trainings.rank_group import run_ranks
from tests.support.trainings.training_runs import EPOCHS, SAMPLES, STEPS, TrainingRuns


@pytest.mark.parametrize(("model", "optimizer"), [("tied", "adamw"), ("plain", "sgd")])
def test_sliced_ranks_train_as_one_rank_and_exchange_checkpoints_with_replicas(
    tmp_path: Path, model: str, optimizer: str
) -> None:
    options = {"optimizer": optimizer, "model": model, "clip_norm": 0.5}
    alone = TrainingRuns(tmp_path / "alone")
    alone.run(1, **options)
    sliced = TrainingRuns(tmp_path / "sliced")
    options |= {"micro_batch": 3}
    for size, until, overlap in ((2, 5, "sliced"), (3, 10, "sliced"), (2, STEPS, "none")):
        sliced.run_until(until, size, overlap=overlap, **options)
    assert sliced.sizes() == [2, 3, 2]
    assert sliced.losses() == pytest.approx(alone.losses(), abs=1e-6)
    assert sliced.samples() == [Counter(range(SAMPLES))] * EPOCHS


def exchange_recomputed(rank: int, size: int) -> None:
    """Exchange gradients that two recomputed segments complete, one after the other."""
    world = RankGroup()
    world.connect()
    world.join()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
    reference = copy.deepcopy(model)
    # Each parameter leaves as soon as it is complete.
    exchange = SlicedExchange(model, Subgroup(world, range(size), None), bucket_bytes=1)
    flat = Reducer(reference.parameters(), world)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        samples = torch.randn(5, 6, generator=generator)
        exchange.clear()
        flat.clear()
        exchange.begin_last_pass()
        for net in (model, reference):
            hidden = samples.clone().requires_grad_()
            for _ in range(2):
                hidden = checkpoint(net, hidden, use_reentrant=True).tanh()
            hidden.square().sum().backward()
        control = torch.full((CONTROL,), float(rank))
        assert exchange.reduce(control, 5 * size) == flat.reduce(control, 5 * size)
        for one, other, owner in zip(
            model.parameters(), reference.parameters(), owners_of(model, size), strict=True
        ):
            assert (one.grad is not None) == (owner == rank)
            assert one.grad is None or torch.equal(one.grad, other.grad)
    world.leave()


def test_a_gradient_completed_twice_in_one_pass_is_summed_as_it_is_at_last() -> None:
    run_ranks(exchange_recomputed, 2)


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=40), ranks=st.integers(1, 6))
def test_no_rank_owns_more_than_its_share_and_the_largest_parameter(
    sizes: list[int], ranks: int
) -> None:
    parameters = [torch.nn.Parameter(torch.empty(size)) for size in sizes]
    owned = Counter[int]()
    for size, rank in zip(sizes, owners(parameters, ranks), strict=True):
        owned[rank] += size
    assert sum(owned.values()) == sum(sizes)
    assert max(owned.values()) <= sum(sizes) / ranks + max(sizes)


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=40), ranks=st.integers(1, 6))
def test_small_parameters_go_to_the_rank_of_the_largest_of_their_module(
    sizes: list[int], ranks: int
) -> None:
    parameters = [torch.nn.Parameter(torch.empty(size)) for size in sizes]
    modules = [range(i, min(i + 3, len(sizes))) for i in range(0, len(sizes), 3)]
    owner = owners(parameters, ranks, modules=modules)
    owned = Counter[int]()
    for members in modules:
        largest = max(members, key=lambda i: sizes[i])
        for i in members:
            owned[owner[i]] += sizes[i]
            if 16 * sizes[i] <= sizes[largest]:
                assert owner[i] == owner[largest]
    assert max(owned.values()) <= sum(sizes) / ranks + 1.125 * max(sizes)
