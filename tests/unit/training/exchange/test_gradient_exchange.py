"""Gradients sent during the backward pass equal those of the flat exchange."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from slurm_elastic.training.exchange import gradient_exchange
from slurm_elastic.training.exchange.exchange_schedule import SCHEDULES
from slurm_elastic.training.exchange.gradient_exchange import GradientExchange
from slurm_elastic.training.exchange.gradient_reducer import CONTROL, Reducer
from slurm_elastic.training.ranks.process_group import RankGroup
from tests.support.trainings.rank_group import run_ranks
from tests.support.trainings.small_buckets import SmallBuckets

#: Samples of each rank in the passes of one step; the last rank of four has none at all.
PASSES = ([2], [1, 3, 2], [1, 1, 1], [])
STEPS = 14


class Net(torch.nn.Module):
    """Layers that are tied, of another type, unused, or used by some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.never = torch.nn.Linear(3, 3)
        self.front = torch.nn.Linear(6, 6)
        self.sometimes = torch.nn.Linear(6, 6)
        self.tied = torch.nn.Linear(6, 6)
        self.tied.weight = self.front.weight
        self.wide = torch.nn.Linear(6, 5).double()
        self.twice: torch.nn.Module | None = None

    def forward(self, x: torch.Tensor, *, extra: bool) -> torch.Tensor:
        hidden = self.tied(self.front(x).tanh()).tanh()
        if extra:
            hidden = hidden + self.sometimes(x)
        return self.wide(hidden.double()).float().square().sum()


class Recomputed(torch.nn.Module):
    """Layers in two segments that are recomputed; their gradients are completed once in each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.last = torch.nn.Linear(6, 6)
        self.shared = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))

    def forward(self, x: torch.Tensor, *, extra: bool) -> torch.Tensor:
        del extra
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda y: self.shared(y).tanh(), x, use_reentrant=True)
        return self.last(x).square().sum()


def steps(rank: int, kind: type[Any], overlap: str) -> dict[str, Any]:
    """Train both ways on equal samples; return the differences of the gradients and more."""
    SmallBuckets().prepare(rank)
    world = RankGroup()
    world.connect()
    world.join()
    model = kind()
    reference = copy.deepcopy(model)
    lines: list[str] = []
    exchange = GradientExchange(model.parameters(), world, overlap=overlap, log=lines.append)
    flat = Reducer(reference.parameters(), world)
    generator = torch.Generator().manual_seed(rank)
    outcome: dict[str, Any] = {"differences": [], "used": set(), "names": [], "lines": lines}
    for step in range(STEPS):
        if step == STEPS - 3 and kind is Net:  # the front freezes, as by `freeze=auto`
            flat.clear()
            for net in (model, reference):
                net.front.requires_grad_(requires_grad=False)
            exchange.rebuild()
            flat = Reducer(reference.parameters(), world)
        exchange.begin()
        flat.clear()
        sizes = PASSES[rank] if step % 2 else PASSES[rank][:1]
        for number, size in enumerate(sizes):
            samples = torch.randn(size, 6, generator=generator)
            extra = rank == 0 and step % 3 == 0
            if number == len(sizes) - 1:
                exchange.begin_last_pass()
            model(samples.clone(), extra=extra).backward()
            reference(samples.clone(), extra=extra).backward()
        outcome["exposed"] = exchange.exposed or outcome.get("exposed")
        outcome["names"].append(SCHEDULES[exchange.number].name)
        local = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        for one, other in zip(local, [p.grad for p in reference.parameters()], strict=True):
            assert (one is None) == (other is None), "noise is measured in local gradients"
            assert one is None or torch.equal(one, other)
        control = torch.zeros(CONTROL)
        control[0], control[-1] = rank, exchange.requested
        sums = exchange.reduce(control, 7)
        assert flat.reduce(control, 7)[0] == sums[0]
        exchange.agree(sums[-1])
        for (name, p), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (other.grad is None), name
            if p.grad is not None:
                assert p.grad.dtype == other.grad.dtype
                outcome["used"].add(name)
                scale = float(other.grad.abs().max()) or 1.0
                outcome["differences"].append(float((p.grad - other.grad).abs().max()) / scale)
    world.leave()
    return outcome


def rank_main(rank: int, size: int, out: Path, arguments: tuple[Any, ...]) -> None:
    del size
    torch.save(steps(rank, *arguments), out / f"{rank}.pt")


def outcomes(out: Path, size: int, *arguments: Any) -> list[dict[str, Any]]:
    """Run the steps on this number of ranks."""
    run_ranks(rank_main, size, out, arguments)
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients_of_buckets_equal_those_of_the_flat_exchange(tmp_path: Path, size: int) -> None:
    found = outcomes(tmp_path, size, Net, "auto")
    for outcome in found:
        # Two ranks: one addition, the same in any order.
        assert max(outcome["differences"]) <= (0.0 if size == 2 else 1e-6)
        assert outcome["names"] == found[0]["names"], "all ranks change before the same step"
        assert len(set(outcome["names"])) > 2
        assert "sometimes.weight" in outcome["used"]
        assert "never.weight" not in outcome["used"]
    assert found[0]["exposed"] is not None
    assert found[1]["exposed"] is None


def test_a_gradient_completed_twice_in_one_pass_ends_the_exchange_in_buckets(
    tmp_path: Path,
) -> None:
    found = outcomes(tmp_path, 2, Recomputed, "buckets")
    for outcome in found:
        assert max(outcome["differences"]) == 0.0
        assert SCHEDULES[2].name in outcome["names"]
        assert outcome["names"][-1] == "flat"
    assert "completed twice" in found[0]["lines"][-1]


def test_a_single_rank_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    exchange = GradientExchange(Net().parameters(), RankGroup(), overlap="auto")
    assert (exchange.bytes, exchange.name, exchange.requested) == (0, "", 0.0)
    assert gradient_exchange.SCHEDULES is SCHEDULES
