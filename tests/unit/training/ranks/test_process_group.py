"""Gradients of any split of the batch add up to those of the whole batch."""

import threading
from pathlib import Path

import pytest
import torch

from slurm_elastic.training.exchange.gradient_reducer import CONTROL, Reducer
from slurm_elastic.training.ranks.process_group import RankGroup
from tests.support.trainings.rank_group import run_ranks

BATCH = 5


def network() -> torch.nn.ModuleDict:
    torch.manual_seed(1)
    return torch.nn.ModuleDict(
        {
            "used": torch.nn.Linear(3, 2),
            "wide": torch.nn.Linear(2, 1).double(),
            "sometimes": torch.nn.Linear(3, 2),
            "never": torch.nn.Linear(3, 2),
            "frozen": torch.nn.Linear(3, 2).requires_grad_(False),
        }
    )


def gradients(rank: int, size: int) -> tuple[dict[str, torch.Tensor | None], list[float]]:
    """Return gradients and control values after reducing; rank 2 of 3 has no samples."""
    model = network()
    world = RankGroup()
    world.connect()
    world.join()
    reducer = Reducer(model.parameters(), world)
    bounds = {1: [0, BATCH], 2: [0, 4, BATCH], 3: [0, 2, BATCH, BATCH]}[size]
    samples = torch.arange(float(BATCH * 3)).reshape(BATCH, 3)
    for _ in range(2):  # nothing of the first time may remain
        reducer.clear()
        total = torch.zeros(())
        for index in range(bounds[rank], bounds[rank + 1]):
            hidden = model["used"](samples[index]) + model["frozen"](samples[index])
            if index == 0:
                hidden = hidden + model["sometimes"](samples[index])
            loss = model["wide"](hidden.double()).sum().float()
            loss.backward()
            total += loss.detach()
        others = torch.full((CONTROL - 2,), 1.0)
        control = torch.cat([total[None], torch.tensor([float(rank == 1)]), others])
        summed = reducer.reduce(control, BATCH)
    # In size 1, as in a job, the values are those of this rank.
    found = {name: p.grad for name, p in model.named_parameters()}
    world.leave()
    return found, summed


def rank_main(rank: int, size: int, out: Path) -> None:
    torch.save(gradients(rank, size), out / f"{size}-{rank}.pt")


def test_gradients_of_uneven_shares_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    for size in (1, 2, 3):
        run_ranks(rank_main, size, tmp_path)
    alone, control = torch.load(tmp_path / "1-0.pt")
    assert len(control) == CONTROL
    assert alone["never.weight"] is None
    assert alone["frozen.weight"] is None
    for size in (2, 3):
        for rank in range(size):
            found, summed = torch.load(tmp_path / f"{size}-{rank}.pt")
            assert summed[1:] == [1.0] + [float(size)] * (CONTROL - 2)
            assert abs(summed[0] - control[0]) < 1e-4
            for name, gradient in alone.items():
                if gradient is None:
                    # AdamW would move a parameter with a gradient of zero.
                    assert found[name] is None, name
                else:
                    assert found[name].dtype == gradient.dtype
                    torch.testing.assert_close(found[name], gradient)


@pytest.mark.parametrize(("visible", "device"), [(4, "cuda:2"), (1, "cuda:0")])
def test_the_device_of_a_rank_with_all_gpus_visible_and_with_one(
    monkeypatch: pytest.MonkeyPatch, visible: int, device: str
) -> None:
    selected: list[int] = []
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    assert str(RankGroup().device) == device
    assert selected == [torch.device(device).index], "also the device of programs' own calls"


@pytest.mark.parametrize(("agent", "served"), [("True", False), ("False", True), (None, True)])
def test_rank_0_serves_the_store_unless_torchruns_agent_does(
    monkeypatch: pytest.MonkeyPatch, agent: str | None, served: bool
) -> None:
    opened: list[bool] = []

    def store(*_: object, is_master: bool, **__: object) -> None:
        opened.append(is_master)
        raise OSError

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    if agent:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    else:
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(torch.distributed, "TCPStore", store)
    world = RankGroup()
    world.connect()
    with pytest.raises(RuntimeError):
        world.join()
    assert opened == [served]


def test_the_thread_that_connects_uses_the_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all GPUs visible a new thread would use GPU 0, and take memory there."""
    selected: list[tuple[str, int]] = []

    def select(device: torch.device | int) -> None:
        index = device if isinstance(device, int) else device.index
        selected.append((threading.current_thread().name, index))

    def store(*_: object, **__: object) -> None:
        raise OSError

    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (variables | {"MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", select)
    monkeypatch.setattr(torch.distributed, "TCPStore", store)
    world = RankGroup()
    world.connect()
    with pytest.raises(RuntimeError):
        world.join()
    assert selected == [("MainThread", 3), ("rendezvous", 3)]
