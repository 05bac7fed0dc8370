"""What ranks that share weights send from stage to stage: a slice each, of values that all have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from slurm_elastic.training.pipeline import PipelineEngine, StageLayout, cut, stage_links
from slurm_elastic.training.ranks.group_guard import GroupGuard
from slurm_elastic.training.ranks.subgroup import subgroup
from tests.support.trainings.pipeline_ranks import spawn

WIDTH, SAMPLES, RANKS = 7, 6, 6
#: Ranks of each stage, of six ranks in all: three stages, or two.
GROUPS = (2, 3)
Sent = dict[str, Any]


def parts(stages: int) -> list[torch.nn.Module]:
    """Return the stages, each with one layer."""
    torch.manual_seed(0)
    layers = [(f"layer{n}", torch.nn.Linear(WIDTH, WIDTH)) for n in range(stages)]
    return list(cut(layers, [1] * stages))


def batch() -> list[tuple[torch.Tensor, None]]:
    """Return micro-batches; three ranks cannot divide the elements of the last one equally."""
    inputs = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    return [(inputs[0], None), (inputs[1, :4], None)]


def squared(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().sum()


def sent(rank: int) -> list[tuple[Sent, Sent]]:
    """Return what each kind of stage sends and computes, with slices and with whole tensors."""
    return [(_sent(rank, size, whole=False), _sent(rank, size, whole=True)) for size in GROUPS]


def _sent(rank: int, group_size: int, *, whole: bool) -> Sent:
    """Return the elements of each activation and gradient that are sent, the loss, and gradients.

    The ranks of a stage all compute with whole weights.
    """
    world: Any = SimpleNamespace(rank=rank, device=torch.device("cpu"), guard=GroupGuard())
    starts = range(0, RANKS, group_size)
    group = subgroup(world, [range(start, start + group_size) for start in starts])
    stages, stage = len(starts), rank // group_size
    elements: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        if whole:
            patch.setattr(stage_links._Slices, "_slice_size", lambda *_: None)
        send = distributed.isend

        def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            elements.append(tensor.numel() if tensor.dtype is torch.float32 else 0)
            return send(tensor, *args, **options)

        patch.setattr(distributed, "isend", counted)
        module = parts(stages)[stage]
        engine = PipelineEngine(
            {stage: module}, StageLayout.of(*[1] * stages), loss=squared, tensor_group=group
        )
        loss = engine.step(batch(), sizes=[SAMPLES, 4])
        engine.close()
    gradients = [parameter.grad for parameter in module.parameters()]
    return {"elements": [n for n in elements if n], "loss": loss, "gradients": gradients}


def test_each_rank_sends_its_slice_and_the_result_is_that_of_whole_tensors(tmp_path: Path) -> None:
    results = spawn(tmp_path, RANKS, sent)
    sizes = [SAMPLES * WIDTH, 4 * WIDTH]
    for number, group_size in enumerate(GROUPS):
        stages = parts(RANKS // group_size)
        losses = [squared(torch.nn.Sequential(*stages)(inputs), None) for inputs, _ in batch()]
        loss = sum(losses) / 2
        loss.backward()
        for rank, result in enumerate(results):
            sliced, whole = result[number]
            stage = rank // group_size
            ends = 1 if stage in (0, len(stages) - 1) else 2
            assert sorted(whole["elements"]) == sorted(sizes * ends)
            # 28 elements make slices of 10, 10 and 8: the last one is filled up.
            slices = [-(-size // group_size) for size in sizes]
            assert sorted(sliced["elements"]) == sorted(slices * ends)
            assert sliced["loss"] == whole["loss"]
            assert abs(sliced["loss"] / loss.item() - 1) < 1e-6
            pairs = zip(sliced["gradients"], whole["gradients"], strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
            expected = [parameter.grad for parameter in stages[stage].parameters()]
            for gradient, other in zip(sliced["gradients"], expected, strict=True):
                assert torch.allclose(gradient, other, rtol=1e-5)
