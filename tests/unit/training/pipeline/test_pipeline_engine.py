"""A pipeline that drains between updates gives the result of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_elastic.training.pipeline import LayoutError, PipelineEngine, StageLayout, cut
from tests.support.trainings.pipeline_ranks import CLASSES, WIDTH, data, engine, layers, loss, spawn

STEPS = 3
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}
LAYOUTS = {
    1: [StageLayout.of(1), StageLayout(((0,), (0,), (0,)))],
    2: [StageLayout.of(1, 1), StageLayout.of(2), StageLayout.grid(replicas=1, stages=2, chunks=2)],
    3: [StageLayout.of(1, 1, 1), StageLayout.of(2, 1), StageLayout.of(1, 2), StageLayout.of(3)],
    4: [
        StageLayout.of(2, 2),
        StageLayout.grid(replicas=2, stages=2, chunks=2),
        StageLayout.of(1, 2, 1),
    ],
}
#: Fewer micro-batches than replicas, not a multiple of them, and more than the pipeline is deep.
COUNTS = [1, 5, 8]
Found = dict[str, Any]


def reference(count: int) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Return losses and gradients of the whole model in a plain loop."""
    model = cut(layers(), [7])[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = sum(loss(model(x), y) for x, y in data(count, seed=step)) / count
        total.backward()
        losses.append(total.item())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    return losses, gradients


def train(layout: StageLayout, rank: int, schedule: str, count: int) -> Found:
    run = engine(layout, rank, schedule=schedule, micro_batches=count)
    optimizer = torch.optim.SGD(run.parameters(), lr=0.2, momentum=0.9)
    losses, gradients = [], []
    for step in range(STEPS):
        # Only what the interface promises to read is there.
        first, last = 0 in run.stages, layout.last in run.stages
        batch = [(x if first else None, y if last else None) for x, y in data(count, seed=step)]
        losses.append(run.step(batch))
        gradients.append({n: p.grad.clone() for n, p in run.named_parameters().items()})
        optimizer.step()
    run.close()
    return {"losses": losses, "gradients": gradients}


def all_of_them(rank: int, size: int) -> list[Found]:
    return [
        train(layout, rank, schedule, count)
        for layout in LAYOUTS[size]
        for schedule in ("gpipe", "1f1b")
        for count in COUNTS
    ]


@pytest.mark.parametrize("size", LAYOUTS)
def test_any_layout_gives_the_result_of_one_rank(size: int, tmp_path: Path) -> None:
    found = [all_of_them(0, 1)] if size == 1 else spawn(tmp_path, size, all_of_them, size)
    expected = [reference(count) for _ in LAYOUTS[size] for _ in range(2) for count in COUNTS]
    for run, (losses, gradients) in enumerate(expected):
        seen = set()
        for rank in range(size):
            torch.testing.assert_close(found[rank][run]["losses"], losses, **TOLERANCE)
            for step, whole in enumerate(gradients):
                for name, gradient in found[rank][run]["gradients"][step].items():
                    seen.add(name)
                    torch.testing.assert_close(gradient, whole[name], **TOLERANCE)
        assert seen == set(gradients[0])


class Fork(torch.nn.Module):
    """Layer that returns two tensors with a gradient and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(value), torch.arange(len(value)), value * self.linear.bias


class Between(torch.nn.Module):
    """Layer that passes one tensor on and does not use another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        left, index, right = value
        return self.linear(left).tanh(), index, right.clone(), left * 2


class Join(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(2, 2)
        self.linear = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, value: tuple[torch.Tensor, ...]) -> torch.Tensor:
        left, index, right, _ = value
        return self.linear(left + right) * (1 + index[:, None])


def forked() -> list[torch.nn.Module]:
    torch.manual_seed(2)
    parts = [("fork", Fork()), ("between", Between()), ("join", Join())]
    return list(cut(parts, [1, 1, 1]))


def several_tensors(rank: int) -> Found:
    """Use different sizes within a batch and between batches; the divisor counts samples."""
    run = engine(StageLayout.of(1, 1, 1), rank, forked(), micro_batches=4)
    total = []
    for step in range(2):
        sizes = [2, 3, 2, 5 + step]
        batch = [data(1, seed=i, rows=rows)[0] for i, rows in enumerate(sizes)]
        total.append(run.step(batch, sizes=sizes, divisor=sum(sizes)))
    return {"losses": total, "gradients": [p.grad for p in run.parameters()]}


def test_stages_exchange_tuples_of_any_types(tmp_path: Path) -> None:
    found = spawn(tmp_path, 3, several_tensors)
    model = torch.nn.Sequential(*forked())
    for step in range(2):
        sizes = [2, 3, 2, 5 + step]
        model.zero_grad()
        batch = [data(1, seed=i, rows=rows)[0] for i, rows in enumerate(sizes)]
        total = sum(loss(model(x), y) for x, y in batch) / sum(sizes)
        total.backward()
        for rank in range(3):
            torch.testing.assert_close(found[rank]["losses"][step], total.item(), **TOLERANCE)
    gradients = [gradient for rank in found for gradient in rank["gradients"]]
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        # Parameters that nothing uses keep none: AdamW would move them.
        assert (gradient is None) == (parameter.grad is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, parameter.grad, **TOLERANCE)


class Odd(torch.nn.Module):
    def forward(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"value": value}


class Head(torch.nn.Module):
    """Layer that shares the embedding's matrix."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value @ self.weight.t()


def tied_layers(*, one_object: bool) -> list[tuple[str, torch.nn.Module]]:
    torch.manual_seed(3)
    embedding = torch.nn.Embedding(CLASSES, 8)
    weight = embedding.weight
    if not one_object:
        weight = torch.nn.Parameter(torch.zeros(CLASSES, 8))
    return [
        ("embed", embedding),
        ("mid", torch.nn.Linear(8, 8)),
        ("act", torch.nn.Tanh()),
        ("head", Head(weight)),
    ]


TIE = ("embed.weight", "head.weight")
TIED_LAYOUTS = [StageLayout.of(1, 1, 1), StageLayout.of(1, 2), StageLayout.of(2, 1)]


def tied_batch(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(y, y.roll(1)) for _, y in data(4, seed=step)]


def train_tied(layout: StageLayout, rank: int, *, one_object: bool) -> tuple[list[float], Any]:
    lengths = {1: [4], 2: [1, 3], 3: [1, 2, 1]}[len(layout.stages)]
    parts = cut(tied_layers(one_object=one_object), lengths)
    run = engine(layout, rank, list(parts), micro_batches=4, ties=[TIE])
    optimizer = torch.optim.AdamW(run.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        losses.append(run.step(tied_batch(step)))
        # In effect in some steps.
        losses.append(run.clip_gradients(0.5))
        optimizer.step()
    return losses, {n: p.detach() for n, p in run.named_parameters().items() if n in TIE}


def tied(rank: int) -> list[tuple[list[float], Any]]:
    return [train_tied(layout, rank, one_object=False) for layout in TIED_LAYOUTS]


def test_tied_weights_stay_equal(tmp_path: Path) -> None:
    expected, alone = train_tied(StageLayout.of(1), 0, one_object=True)
    weight = alone["embed.weight"]
    model = cut(tied_layers(one_object=True), [4])[0]
    (sum(loss(model(x), y) for x, y in tied_batch(0)) / 4).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    assert expected[1] == pytest.approx(norm, rel=1e-6)
    assert norm > 0.5
    # Copies on one rank: SGD and AdamW treat both alike.
    copies, weights = train_tied(StageLayout(((0,), (0,))), 0, one_object=False)
    torch.testing.assert_close(copies, expected, **TOLERANCE)
    assert torch.equal(*weights.values())
    found = spawn(tmp_path, 3, tied)
    for index in range(len(TIED_LAYOUTS)):
        ends = []
        for rank in range(3):
            losses, weights = found[rank][index]
            torch.testing.assert_close(losses, expected, **TOLERANCE)
            ends += weights.values()
        assert len(ends) >= 2
        for end in ends:
            assert torch.equal(end, ends[0])
            torch.testing.assert_close(end, weight, rtol=1e-5, atol=1e-5)


FROZEN_LAYOUTS = [StageLayout.of(1, 1, 1), StageLayout.of(2, 1)]


def frozen_prefix(rank: int) -> list[Found]:
    found = []
    for layout in FROZEN_LAYOUTS:
        parts = cut(layers(), [2, 2, 3] if len(layout.stages) == 3 else [4, 3])
        for part in parts[:-1]:
            part.requires_grad_(False)
        run = engine(layout, rank, list(parts), micro_batches=4)
        total = run.step(data(4))
        gradients = [p.grad for p in run.parameters()]
        run = engine(layout, rank, list(parts), schedule="pipedream")
        moved = [p for p in run.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(moved or [torch.nn.Parameter(torch.zeros(1))], lr=0.2)
        losses = run.run(data(40), optimizer.step)
        found.append({"loss": total, "gradients": gradients, "losses": losses})
    return found


def test_a_frozen_prefix_gets_no_gradients(tmp_path: Path) -> None:
    found = spawn(tmp_path, 3, frozen_prefix)
    whole = engine(StageLayout.of(1), 0, micro_batches=4)
    total = whole.step(data(4))
    model = cut(layers(), [7])[0]
    # With only the last stage training, PipeDream is plain training.
    optimizer = torch.optim.SGD(model[4:].parameters(), lr=0.2)
    losses = []
    for x, y in data(40):
        optimizer.zero_grad()
        part = loss(model(x), y)
        part.backward()
        optimizer.step()
        losses.append(part.item())
    for index in range(len(FROZEN_LAYOUTS)):
        seen = [rank[index] for rank in found]
        assert seen[0]["loss"] == pytest.approx(total, rel=1e-6)
        assert set(seen[0]["gradients"] + seen[1]["gradients"]) == {None}
        assert seen[1]["losses"] == losses
        expected = whole.parameters()[-2:]
        for gradient, parameter in zip(seen[2]["gradients"][-2:], expected, strict=True):
            torch.testing.assert_close(gradient, parameter.grad, **TOLERANCE)


def test_invalid_arguments_are_refused() -> None:
    one = StageLayout.of(1)
    with pytest.raises(LayoutError, match=r"layout 1-1 is invalid: expected one for 1 rank\(s\)"):
        engine(StageLayout.of(1, 1), 0)
    with pytest.raises(LayoutError, match="'2f2b' is invalid: expected one of gpipe, 1f1b, pipe"):
        engine(one, 0, schedule="2f2b")
    with pytest.raises(LayoutError, match=r"rank 0: stage_modules: stages \[1\] is invalid"):
        PipelineEngine({1: cut(layers(), [7])[0]}, one, loss=loss)
    with pytest.raises(LayoutError, match="micro_batches: 0 is invalid"):
        engine(one, 0, micro_batches=0)
    same_names = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, CLASSES)]
    with pytest.raises(LayoutError, match=r"parameter name 'weight' is invalid.* stage 0 has it"):
        engine(StageLayout(((0,), (0,))), 0, same_names)
    with pytest.raises(LayoutError, match="batch: 2 micro-batches is invalid: expected 3"):
        engine(one, 0, micro_batches=3).step(data(2))
    with pytest.raises(LayoutError, match="sizes: 2 values is invalid: expected 3"):
        engine(one, 0, micro_batches=3).step(data(3), sizes=[1, 1])
    with pytest.raises(LayoutError, match=r"'head.weight' is invalid.* no stage has it"):
        engine(one, 0, ties=[("front.weight", "head.weight")])
    with pytest.raises(LayoutError, match=r"front.weight \(.*\) and mid1.weight \(.*\) are inval"):
        engine(one, 0, ties=[("front.weight", "mid1.weight")])
    with pytest.raises(LayoutError, match="vertical_sync: True is invalid"):
        engine(one, 0, vertical_sync=True)
    with pytest.raises(LayoutError, match=r"ties: mid1.weight and mid2.weight is invalid"):
        engine(one, 0, schedule="pipedream", ties=[("mid1.weight", "mid2.weight")])
    with pytest.raises(LayoutError, match="use run"):
        engine(one, 0, schedule="pipedream").step(data(1))
    with pytest.raises(LayoutError, match="no gradient of the whole model"):
        engine(one, 0, schedule="pipedream").clip_gradients(1.0)
    with pytest.raises(LayoutError, match=r"of shape \[3\] is invalid: expected one number"):
        engine(one, 0, loss=lambda out, y: out.sum(dim=1)).step(data(1))
    with pytest.raises(LayoutError, match=r"output of a stage: dict is invalid"):
        engine(StageLayout(((0,), (0,))), 0, [Odd(), torch.nn.Identity()]).step(data(1))
    with pytest.raises(LayoutError, match="use step"):
        engine(one, 0).run(data(1), print)
    with pytest.raises(LayoutError, match="that add up to 7 layers"):
        cut(layers(), [3, 3])


def test_a_layer_that_rejects_its_input_is_named() -> None:
    wrong = [("front", torch.nn.Linear(WIDTH, 5)), ("back", torch.nn.Linear(16, CLASSES))]
    run = engine(StageLayout.of(1), 0, list(cut(wrong, [2])))
    with pytest.raises(
        LayoutError, match=r"^layer back does not accept the output of layer front: mat"
    ):
        run.step(data(1))
