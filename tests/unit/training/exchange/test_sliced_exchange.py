"""Ranks with sliced optimizer state train as with the flat exchange; each owns its share."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from slurm_elastic.training.exchange.sliced_exchange import owners, owners_of
from tests.support.trainings.rank_group import run_ranks
from tests.support.trainings.sliced_ranks import STEPS, cases, compare_schedules

Outcomes = list[dict[str, Any]]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sliced_ranks_train_as_with_the_flat_exchange(tmp_path: Path, size: int) -> None:
    """Compare in one group, as ranks take longer to start than to train.

    Two ranks also exchange a gradient that is completed twice in one pass: it is summed as it is at
    last.
    """
    run_ranks(compare_schedules, size, tmp_path)
    outcomes = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(size)]
    assert_equal_trainings(outcomes)
    assert_several_buckets_travel_in_both_passes(outcomes)
    assert_same_noise(outcomes[0]["noise"])
    assert_equal_shares_of_the_state(outcomes)


def assert_equal_trainings(outcomes: Outcomes) -> None:
    for number, case in enumerate(cases(len(outcomes))):
        # Two ranks: one addition, the same in any order, unless a norm adds up slices.
        exact = len(outcomes) == 2 and not case.clipped
        for compared in (outcome["cases"][number] for outcome in outcomes):
            assert compared["gradients"] <= (0.0 if exact else 1e-6), case
            weights = compared["weights"]
            assert max(weights.values()) <= (0.0 if exact else 1e-6), (case, weights)
            sliced, flat = compared["losses"]
            assert sliced == (flat if exact else pytest.approx(flat, abs=1e-6)), case
            assert compared["clipped"] == [True] * STEPS
            assert {"never.weight", "never.bias"} <= compared["unused"]
            assert compared["extra_bytes"] == 0, "only what trains is sent"


def assert_several_buckets_travel_in_both_passes(outcomes: Outcomes) -> None:
    for outcome in outcomes:
        for compared in outcome["cases"]:
            assert max(compared["sent_early"]) >= 2, "gradients"
            assert max(compared["awaited"]) >= 2, "weights"


def assert_same_noise(noise: dict[str, tuple[dict[str, float], list[str]]]) -> None:
    flat, schedules = noise["none"]
    assert schedules == [""]
    assert min(flat["grad_sqr"], flat["grad_var"]) > 0
    assert noise["buckets"][0] == pytest.approx(flat, rel=1e-5)
    assert any(name.startswith("buckets") for name in noise["buckets"][1])
    assert noise["sliced"][0] == pytest.approx(flat, rel=1e-5)


def assert_equal_shares_of_the_state(outcomes: Outcomes) -> None:
    parts = [own for own, _ in (outcome["state"] for outcome in outcomes)]
    assert {whole for _, whole in (outcome["state"] for outcome in outcomes)} == {sum(parts)}
    assert max(parts) <= (1 / len(outcomes) + 0.05) * sum(parts)


def layer(*shapes: tuple[int, ...]) -> nn.Module:
    """Return a layer with parameters of these shapes, which take no memory."""
    module = nn.Module()
    for number, shape in enumerate(shapes):
        parameter = nn.Parameter(torch.empty(1).expand(shape))
        module.register_parameter(f"p{number}", parameter)
    return module


def linear(inputs: int, outputs: int) -> nn.Module:
    return layer((outputs, inputs), (outputs,))


def transformer(words: int, width: int, blocks: int) -> nn.Module:
    block = [linear(width, n * width) for n in (3, 1, 4)] + [linear(4 * width, width)]
    block += [layer((width,), (width,))] * 2
    embeddings = [layer((words, width)), layer((1024, width))]
    return nn.Sequential(*embeddings, *(copy.deepcopy(part) for part in block * blocks))


def residual_layers() -> nn.Module:
    """Return layers with the weights of ResNet-18."""
    layers = [layer((64, 3, 7, 7))]
    for inputs, outputs in ((64, 64), (64, 128), (128, 256), (256, 512)):
        if inputs != outputs:
            layers += [layer((outputs, inputs, 1, 1)), layer((outputs,), (outputs,))]
        for channels in (inputs, outputs, outputs, outputs):
            layers += [layer((outputs, channels, 3, 3)), layer((outputs,), (outputs,))]
    return nn.Sequential(*layers, linear(512, 1000))


def largest_share(model: nn.Module, ranks: int) -> float:
    owned = Counter[int]()
    for parameter, rank in zip(model.parameters(), owners_of(model, ranks), strict=True):
        owned[rank] += parameter.numel()
    return max(owned.values()) / sum(owned.values())


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_no_rank_owns_more_than_its_share_and_five_percent(ranks: int) -> None:
    equal = nn.Sequential(*(linear(512, 512) for _ in range(12)))
    models = [equal, transformer(10_000, 512, 6), residual_layers()]
    assert all(largest_share(model, ranks) <= 1 / ranks + 0.05 for model in models)


def test_a_dominant_parameter_stays_with_one_rank() -> None:
    # The values that docs/training-memory.md states.
    words = nn.Sequential(layer((50_000, 256)), *(linear(256, 256) for _ in range(12)))
    gpt = transformer(50_257, 768, 12)
    assert [round(largest_share(gpt, ranks), 2) for ranks in (2, 3, 4)] == [0.5, 0.34, 0.31]
    assert [round(largest_share(words, ranks), 2) for ranks in (2, 3, 4)] == [0.94] * 3


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=40), ranks=st.integers(1, 6))
def test_no_rank_owns_more_than_its_share_and_the_largest_parameter(
    sizes: list[int], ranks: int
) -> None:
    parameters = [nn.Parameter(torch.empty(size)) for size in sizes]
    owned = Counter[int]()
    for size, rank in zip(sizes, owners(parameters, ranks), strict=True):
        owned[rank] += size
    assert sum(owned.values()) == sum(sizes)
    assert max(owned.values()) <= sum(sizes) / ranks + max(sizes)


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=40), ranks=st.integers(1, 6))
def test_small_parameters_go_to_the_rank_of_the_largest_of_their_module(
    sizes: list[int], ranks: int
) -> None:
    parameters = [nn.Parameter(torch.empty(size)) for size in sizes]
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
