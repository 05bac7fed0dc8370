"""Gradients of any split of the batch add up to those of the whole batch."""

import os
from pathlib import Path

import torch

from slurm_elastic.training.parallel.process_group import CONTROL, RankGroup, Reducer
from tests.support.training_runs import PROCESSES, unused_port

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


def rank_main(rank: int, size: int, port: int, out: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    torch.save(gradients(rank, size), out / f"{size}-{rank}.pt")


def test_gradients_of_uneven_shares_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    running = []
    for size in (1, 2, 3):
        port = unused_port()
        for rank in range(size):
            arguments = (rank, size, port, tmp_path)
            running.append(PROCESSES.Process(target=rank_main, args=arguments))
            running[-1].start()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0] * 6
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
