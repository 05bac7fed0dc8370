"""What ranks that share weights send from stage to stage: a slice each, of values that all have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

from slurm_elastic.training.pipeline import PipelineEngine, StageLayout, cut
from slurm_elastic.training.ranks.group_guard import GroupGuard
from slurm_elastic.training.ranks.subgroup import subgroup
from tests.support.trainings.pipeline_ranks import spawn

WIDTH, SAMPLES = 6, 5


def _sent(rank: int) -> tuple[list[int], float, list[float]]:
    """Return the elements of each activation and gradient that are sent, the loss, and gradients.

    Two stages of two ranks each, which both compute with whole weights.
    """
    torch.manual_seed(0)
    layers = [(name, torch.nn.Linear(WIDTH, WIDTH)) for name in ("first", "second")]
    world: Any = SimpleNamespace(rank=rank, device=torch.device("cpu"), guard=GroupGuard())
    group = subgroup(world, [(0, 1), (2, 3)])
    stage = rank // 2
    module = cut(layers, [1, 1])[stage]
    sizes: list[int] = []
    send = distributed.isend

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(tensor.numel() if tensor.dtype is torch.float32 else 0)
        return send(tensor, *args, **options)

    distributed.isend = counted
    engine = PipelineEngine(
        {stage: module},
        StageLayout.of(1, 1),
        loss=lambda output, _: output.square().sum(),
        tensor_group=group,
    )
    inputs = torch.randn(2, SAMPLES, WIDTH)
    loss = engine.step([(inputs[0], None), (inputs[1, :3], None)], sizes=[5, 3])
    gradient = module[0].weight.grad.flatten().tolist()
    engine.close()
    return [size for size in sizes if size], loss, gradient


def test_each_rank_sends_its_slice(tmp_path: Path) -> None:
    results = spawn(tmp_path, 4, _sent)
    elements = [SAMPLES * WIDTH // 2, 3 * WIDTH // 2]
    assert [sizes for sizes, *_ in results] == [elements] * 4
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    inputs = torch.randn(2, SAMPLES, WIDTH)
    loss = (whole(inputs[0]).square().sum() + whole(inputs[1, :3]).square().sum()) / 2
    loss.backward()
    for rank, (_, own_loss, gradient) in enumerate(results):
        assert abs(own_loss / loss.item() - 1) < 1e-6
        expected = whole[rank // 2].weight.grad.flatten()
        assert torch.allclose(torch.tensor(gradient), expected, rtol=1e-5)
