"""Checkpoints of FSDP2: written by several ranks, read by any number, sharded or not."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_elastic.training.checkpoint import shards
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
    """Return a network whose sizes most numbers of ranks do not divide."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 5),
        torch.nn.LayerNorm(5),
        torch.nn.Tanh(),
        torch.nn.Linear(5, 6),
        torch.nn.Tanh(),
        torch.nn.Linear(6, 2),
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

        if "t" in mesh.mesh_dim_names:
            mesh = _tensor_parallel(model, mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return TrainingState(model=model, optimizer=optimizer)


def _tensor_parallel(model: torch.nn.Module, mesh: Any) -> Any:
    """Divide layers as torch does; return the mesh of the replicas."""
    from torch.distributed.tensor.parallel import (  # noqa: PLC0415 - slow
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    parallelize_module(model, mesh["t"], {"3": ColwiseParallel(), "5": RowwiseParallel()})
    return mesh["s"]


def attempt(
    rank: int, size: int, port: int, root: Path, replicas: int, tensor: int, first: int
) -> None:
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
        if tensor > 1:
            shape, names = (size // tensor, tensor), ("s", "t")
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


def test_checkpoints_pass_between_whole_sharded_and_tensor_parallel_models(tmp_path: Path) -> None:
    alone = make(None)
    done = 0
    # Three and two rows of each tensor-parallel rank, over two and three replicas.
    for size, replicas, tensor in (
        (1, 1, 1), (3, 1, 1), (4, 2, 1), (4, 1, 2), (6, 1, 2), (3, 1, 1), (6, 1, 3), (1, 1, 1),
    ):  # fmt: skip
        port = unused_port()
        ranks = [
            PROCESSES.Process(
                target=attempt, args=(r, size, port, tmp_path, replicas, tensor, done)
            )
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


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Yield a mesh of 2 replicas and 2 tensor-parallel ranks, of which this process is rank 2."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - slow

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("s", "t"))
    torch.distributed.destroy_process_group()


def on_mesh(mesh: Any, rows: int, placements: Any, here: int) -> torch.Tensor:
    """Return a DTensor with these rows, some of them here."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - slow

    local = torch.zeros(here, 3)
    shape, stride = torch.Size((rows, 3)), (3, 1)
    return DTensor.from_local(local, mesh, placements, shape=shape, stride=stride)


def test_a_strided_shard_is_a_part_of_the_part_of_a_tensor_parallel_rank(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - slow
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: PLC0415 - slow

    strided = _StridedShard(0, split_factor=2)
    # The second replica has the rest of the first tensor-parallel rank's five rows.
    first, part = shards.local_part(on_mesh(mesh, 10, (strided, Shard(0)), 2))
    assert (first, tuple(part.shape)) == ((3, 0), (2, 3))
    first, _ = shards.local_part(on_mesh(mesh, 8, (Shard(0), Shard(0)), 2))
    assert first == (4, 0)
    first, _ = shards.local_part(on_mesh(mesh, 8, (Shard(0), Replicate()), 4))
    assert first == (4, 0)
    for rows, placements in ((9, (strided, Shard(0))), (8, (strided, Replicate()))):
        with pytest.raises(shards.ShardError, match="expected one that cuts equal parts"):
            shards.local_part(on_mesh(mesh, rows, placements, 2))
