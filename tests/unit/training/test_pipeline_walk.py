"""One training run walks over layouts; what it carries along is keyed by global names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pipeline_ranks import data, engine, layers, loss, spawn
from worlds import OPTIMIZERS

from slurm_elastic.training.pipeline import Layout, cut

WALK = [
    Layout.of(1),
    Layout.grid(replicas=2, stages=2),
    Layout.of(1, 1, 1),
    Layout.of(3),
    Layout.grid(replicas=1, stages=2, chunks=2),
    Layout.of(4),
    Layout.of(2, 1),
    Layout.of(1),
]
STEPS, MICRO_BATCHES = 2, 6
State = dict[str, dict[str, torch.Tensor]]


def batch(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return data(MICRO_BATCHES, seed=step)


def load(named: dict[str, torch.nn.Parameter], optimizer: Any, state: State) -> None:
    for name, parameter in named.items():
        kept = {key: value.clone() for key, value in state[name].items()}
        parameter.data.copy_(kept.pop("value"))
        optimizer.state[parameter] = kept


def kept(named: dict[str, torch.nn.Parameter], optimizer: Any) -> State:
    return {n: {"value": p.detach()} | optimizer.state[p] for n, p in named.items()}


def leg(rank: int, layout: Layout, begin: int, states: dict[str, State]) -> dict[str, Any]:
    found = {}
    for kind, make in OPTIMIZERS.items():
        run = engine(layout, rank, micro_batches=MICRO_BATCHES)
        optimizer = make(run.parameters())
        named = run.named_parameters()
        if states:
            load(named, optimizer, states[kind])
        losses = []
        for step in range(begin, begin + STEPS):
            losses.append(run.step(batch(step)))
            optimizer.step()
        found[kind] = (losses, kept(named, optimizer))
        run.close()
    return found


def plain(kind: str) -> tuple[list[float], State]:
    model = cut(layers(), [7])[0]
    optimizer = OPTIMIZERS[kind](model.parameters())
    losses = []
    for step in range(STEPS * len(WALK)):
        optimizer.zero_grad()
        total = sum(loss(model(x), y) for x, y in batch(step)) / MICRO_BATCHES
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses, kept(dict(model.named_parameters()), optimizer)


def test_a_walk_over_layouts_is_one_training_run(tmp_path: Path) -> None:
    states: dict[str, State] = {}
    losses: dict[str, list[float]] = {kind: [] for kind in OPTIMIZERS}
    for index, layout in enumerate(WALK):
        arguments = (layout, STEPS * index, states)
        found = spawn(tmp_path / str(index), layout.world, leg, *arguments)
        for kind in OPTIMIZERS:
            assert all(rank[kind][0] == found[0][kind][0] for rank in found)
            losses[kind] += found[0][kind][0]
        states = {
            kind: {n: s for rank in found for n, s in rank[kind][1].items()} for kind in OPTIMIZERS
        }
    for kind in OPTIMIZERS:
        expected, state = plain(kind)
        torch.testing.assert_close(losses[kind], expected, rtol=1e-5, atol=0.0)
        assert set(states[kind]) == set(state)
        for name, values in state.items():
            for key, value in values.items():
                off = (states[kind][name][key] - value).norm() / value.norm()
                assert off <= 1e-5, (kind, name, key, off)
