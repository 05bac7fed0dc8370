"""PipeDream: each minibatch's gradient belongs to one version of the weights, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_elastic.training.pipeline import StageLayout, cut, weight_stashing
from tests.support.trainings.pipeline_ranks import LENGTHS, data, engine, layers, loss, spawn

COUNT = 13
STRAIGHT = [StageLayout.of(1, 1), StageLayout.of(1, 1, 1)]
REPLICATED = [StageLayout.of(2, 1), StageLayout.of(1, 2), StageLayout.of(1, 2, 1)]
Found = dict[str, Any]
#: Samples of each minibatch; the last one is smaller.
SIZES = [3] * (COUNT - 1) + [2]


def minibatches(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [data(1, seed=100 * seed + m, rows=rows)[0] for m, rows in enumerate(SIZES)]


def run(rank: int, layout: StageLayout, vertical: bool, stash: bool, rounds: int = 1) -> Found:
    """Return losses, and for each update of this rank the gradients and the weights after it."""
    if not stash:
        # The control: passes go through the parameters themselves, which updates change.
        weight_stashing.StashedStage._snapshot = shared  # type: ignore[method-assign]
    engine_ = engine(layout, rank, schedule="pipedream", vertical_sync=vertical)
    optimizer = torch.optim.SGD(engine_.parameters(), lr=0.2, momentum=0.9)
    named = engine_.named_parameters()
    weights = [{n: p.detach().clone() for n, p in named.items()}]
    gradients: list[Found] = []
    kept: list[int] = []
    stage = engine_._stages[engine_.stages[0]]
    assert isinstance(stage, weight_stashing.StashedStage)

    def update() -> None:
        kept.append(len(stage.versions))
        gradients.append({n: p.grad.clone() for n, p in named.items()})
        optimizer.step()
        weights.append({n: p.detach().clone() for n, p in named.items()})

    losses = [engine_.run(minibatches(r), update, sizes=SIZES) for r in range(rounds)]
    return {"losses": losses, "gradients": gradients, "weights": weights, "kept": max(kept)}


def shared(stage: weight_stashing.StashedStage) -> dict[str, torch.Tensor]:
    return {n: p.data.requires_grad_() for n, p in stage.module.named_parameters()}


def version(layout: StageLayout, stage: int, micro: int, *, vertical: bool) -> int:
    """Return the version of the weights that a minibatch uses, computed directly from the paper.

    A straight pipeline of n stages is n - 1 - s updates behind on stage s (SOSP'19, 3.3); with
    replicas the same holds for rounds, with ceil(workers from s on / replicas) in flight.
    """
    replicas = [len(ranks) for ranks in layout.stages]
    behind = [-(-sum(replicas[s:]) // r) - 1 for s, r in enumerate(replicas)]
    if vertical:
        first = max(0, micro // replicas[0] - behind[0])
        return first * replicas[0] // replicas[stage]
    return max(0, micro // replicas[stage] - behind[stage])


def monolithic(
    layout: StageLayout, found: list[Found], micro: int, *, vertical: bool, round_: int = 0
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of one minibatch of the whole model at the versions it used."""
    model = cut(layers(), [7])[0]
    state = {}
    for stage, ranks in enumerate(layout.stages):
        base = round_ * -(-COUNT // len(ranks))
        at = base + version(layout, stage, micro, vertical=vertical)
        state |= found[ranks[0]]["weights"][at]
    model.load_state_dict(state)
    x, y = minibatches(round_)[micro]
    total = loss(model(x), y)
    total.backward()
    return total.item(), {n: p.grad for n, p in model.named_parameters()}


def check(layout: StageLayout, found: list[Found], *, vertical: bool, rounds: int = 1) -> bool:
    """Return whether all losses and gradients equal those of the whole model, bit for bit."""
    same = True
    for round_ in range(rounds):
        whole = [
            monolithic(layout, found, m, vertical=vertical, round_=round_) for m in range(COUNT)
        ]
        for rank in range(layout.world_size):
            (stage,) = layout.held_by(rank)
            replicas = len(layout.stages[stage])
            updates = -(-COUNT // replicas)
            same &= found[rank]["losses"][round_] == [total for total, _ in whole]
            assert len(found[rank]["gradients"]) == rounds * updates
            for update in range(updates):
                seen = found[rank]["gradients"][round_ * updates + update]
                members = range(update * replicas, min((update + 1) * replicas, COUNT))
                for name, gradient in seen.items():
                    mean = sum(whole[m][1][name] for m in members) / len(members)
                    same &= torch.equal(gradient, mean)
    return same


@pytest.mark.parametrize("vertical", [False, True], ids=["stashing", "vertical-sync"])
@pytest.mark.parametrize("layout", [*STRAIGHT, *REPLICATED], ids=str)
def test_gradients_belong_to_the_weights_of_the_forward_pass(
    layout: StageLayout, vertical: bool, tmp_path: Path
) -> None:
    found = spawn(tmp_path, layout.world_size, run, layout, vertical, True, 2)
    assert check(layout, found, vertical=vertical, rounds=2)
    # The other rule gives something else, and so do weights of no rule.
    assert not check(layout, found, vertical=not vertical, rounds=2)
    for stage, ranks in enumerate(layout.stages):
        for rank in ranks:
            for name, weight in found[ranks[0]]["weights"][-1].items():
                assert torch.equal(weight, found[rank]["weights"][-1][name]), (stage, name)
    if not vertical:
        # As many versions as minibatches in flight, as in the paper.
        replicas = [len(ranks) for ranks in layout.stages]
        for stage, ranks in enumerate(layout.stages):
            most = -(-sum(replicas[stage:]) // replicas[stage])
            assert {found[rank]["kept"] for rank in ranks} == {most}


@pytest.mark.parametrize("layout", STRAIGHT, ids=str)
def test_without_stashing_gradients_belong_to_no_weights(
    layout: StageLayout, tmp_path: Path
) -> None:
    found = spawn(tmp_path, layout.world_size, run, layout, False, False)
    assert not check(layout, found, vertical=False)
    worst = 0.0
    for micro in range(COUNT):
        _, whole = monolithic(layout, found, micro, vertical=False)
        for rank in range(layout.world_size):
            for name, gradient in found[rank]["gradients"][micro].items():
                worst = max(worst, float((gradient - whole[name]).abs().max()))
    assert worst > 1e-4


def test_a_single_stage_equals_plain_training() -> None:
    found = run(0, StageLayout.of(1), False, True)
    model = cut(layers(), LENGTHS[1])[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for (x, y), total in zip(minibatches(0), found["losses"][0], strict=True):
        optimizer.zero_grad()
        expected = loss(model(x), y)
        expected.backward()
        optimizer.step()
        assert expected.item() == total
    assert found["kept"] == 1
