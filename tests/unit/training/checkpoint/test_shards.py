"""Checkpoints of FSDP2: written by several ranks, read by any number, sharded or not."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_elastic.training.checkpoint.checkpoint_directory import CheckpointDirectory
from slurm_elastic.training.checkpoint.checkpoint_manager import CheckpointManager
from slurm_elastic.training.checkpoint.training_state import TrainingState
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.sampler import Cursor
from tests.support.trainings.checkpoint_ranks import differences, restore_newest
from tests.support.trainings.training_runs import PROCESSES, unused_port

RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
pytestmark = pytest.mark.skipif(RELEASE < (2, 7), reason="torch 2.6 has no FSDP2 for CPUs")
STEPS = 2


def network() -> torch.nn.Module:
    """Return a network of sizes that no number of ranks divides."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Tanh(), torch.nn.Linear(5, 2)
    )


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    for seed in range(first, first + STEPS):
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def make(mesh: Any) -> TrainingState:
    model = network()
    if mesh is not None:
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - slow

        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return TrainingState(model=model, optimizer=optimizer)


def attempt(rank: int, size: int, port: int, root: Path, replicas: int, first: int) -> None:
    """Restore, train and save on one rank."""
    log = os.open(root / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    world = RankGroup()
    world.connect()
    world.join()
    mesh = None
    if size > 1:
        shape, names = ((size,), ("s",)) if replicas == 1 else ((2, size // 2), ("r", "s"))
        mesh = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)
    made = make(mesh)
    made = TrainingState(model=made.model, optimizer=made.optimizer, part=rank)

    def say(line: str) -> None:
        with (root / "log_lines").open("a") as file:
            file.write(f"{line}\n")

    manager = CheckpointManager(
        CheckpointDirectory(root / "c", keep=9, log=say),
        made,
        world,
        every_s=100.0,
        identity={},
        log=say,
        # One replica of each shard is enough.
        writers=range(size // replicas),
        background=True,
        patience_s=60.0,
    )
    cursor = restore_newest(manager)
    assert (cursor.step if cursor else 0) == first
    manager.begin()
    train(made.model, made.optimizer, first)
    assert manager.save(Cursor(first + STEPS, 0, 0), wait=False)
    if rank < size // replicas:
        assert manager.proven
    train(made.model, made.optimizer, first + STEPS)
    manager.settle()
    world.leave()
    os._exit(0)


def test_checkpoints_pass_between_sharded_and_whole_models(tmp_path: Path) -> None:
    alone = make(None)
    done = 0
    for size, replicas in ((1, 1), (3, 1), (4, 2), (1, 1)):
        port = unused_port()
        ranks = [
            PROCESSES.Process(target=attempt, args=(r, size, port, tmp_path, replicas, done))
            for r in range(size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        assert [p.exitcode for p in ranks] == [0] * size, (tmp_path / "log").read_text()
        assert not (tmp_path / "log_lines").exists(), (tmp_path / "log_lines").read_text()
        train(alone.model, alone.optimizer, done)
        done += STEPS
        checkpoint = CheckpointDirectory(tmp_path / "c", keep=9, log=print).newest()
        assert checkpoint is not None
        assert checkpoint.step == done
        read = checkpoint.read()
        for name, value in alone.gather().items():
            if not name.startswith("blob."):
                assert torch.allclose(read[name], value, rtol=1e-5, atol=1e-7), (size, name)


def test_a_single_rank_saves_every_name(tmp_path: Path) -> None:
    one = make(None)
    train(one.model, one.optimizer, 0)
    saved = CheckpointDirectory(tmp_path, keep=1, log=print).save(1, one.gather(), {})
    assert differences(one.gather(), saved.read()) == []
