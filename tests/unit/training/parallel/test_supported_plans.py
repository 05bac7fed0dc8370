"""Trainings report which parts of execution plans they can carry out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from slurm_elastic.training.parallel import fsdp
from slurm_elastic.training.parallel.supported_plans import supported_options
from tests.support.trainings.training_runs import FakeLauncher, TrainingRuns

needs_fsdp = pytest.mark.skipif(bool(fsdp.unsupported()), reason=fsdp.unsupported())


class Scaled(nn.Module):
    """A layer with a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Held(nn.Module):
    """A model whose layers are in a container that is not called."""

    def __init__(self, *, shares: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
        self.last = nn.Linear(4, 4)
        if shares:
            self.last.weight = self.parts["first"].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.parts["second"](self.parts["first"](x)))


def pair(*between: nn.Module, width: int = 8) -> nn.Sequential:
    """Return two layers that groups of up to 8 ranks can divide."""
    return nn.Sequential(nn.Linear(4, width), *between, nn.Linear(width, 4))


def text(
    model: nn.Module,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    styles: Mapping[str, str] | None = None,
    undivided: str = "",
    **own: Any,
) -> str:
    layers = list(model.named_children()) if type(model) is nn.Sequential else []
    return str(
        supported_options(
            model,
            layers,
            optimizer(model.parameters()),
            recompute=False,
            restricted=False,
            undivided=undivided,
            styles=styles or {},
            **own,
        )
    )


@needs_fsdp
@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        (pair(nn.ReLU()), {}, "stages=2,tensor,shard,mesh,slices,sliced-stages,recomputable"),
        (nn.Linear(4, 4), {}, "shard"),
        (nn.Linear(512, 512), {}, "tensor,shard,mesh,slices"),
        (nn.MultiheadAttention(16, 8), {}, "tensor,shard,mesh,slices"),
        (nn.MultiheadAttention(16, 4), {}, "shard"),
        (pair(width=12), {}, "stages=2,shard,sliced-stages,recomputable"),
        (pair(nn.BatchNorm1d(8)), {}, "stages=3,shard,sliced-stages,recomputable"),
        (pair(), {"undivided": "a reason"}, "stages=2,shard,sliced-stages,recomputable"),
        (pair(), {"styles": {"?": "whole"}}, "stages=2,shard,sliced-stages,recomputable"),
        (
            *(pair(nn.ReLU()), {"styles": {"1": "whole"}}),
            "stages=2,tensor,shard,mesh,slices,sliced-stages,recomputable",
        ),
        (
            pair(),
            {"styles": {"0": "colwise", "1": "rowwise"}},
            "stages=2,shard,sliced-stages,recomputable",
        ),
        (pair(), {"styles": {"missing": "whole"}}, "stages=2,shard,sliced-stages,recomputable"),
        (pair(), {"optimizer": torch.optim.Rprop}, "stages=2,sliced-stages,recomputable"),
        (pair(Scaled()), {}, "stages=3,sliced-stages,recomputable"),
        (
            nn.Sequential(pair(), pair().double()),
            {},
            "stages=2,tensor,slices,sliced-stages,recomputable",
        ),
        (Held(shares=False), {}, "recomputable"),
        (Held(shares=True), {}, "shard,recomputable"),
    ],
)
def test_a_word_is_left_out_where_its_plans_would_fail(
    model: nn.Module, options: dict[str, Any], expected: str
) -> None:
    assert text(model, **options) == expected


def test_a_compiled_model_is_not_divided() -> None:
    compiled = nn.Module()
    compiled.add_module("_orig_mod", pair())  # as torch.compile names what it wraps
    assert text(compiled) == ""


def test_an_optimizer_of_several_parameters_at_once_does_not_share_layers() -> None:
    at_once = text(pair(), lambda parameters: torch.optim.SGD(parameters, foreach=True))
    assert "tensor" not in at_once


@needs_fsdp
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model": "segmentation"}, "shard,recomputable"),
        ({}, "stages=2,tensor,shard,mesh,slices,sliced-stages,recomputable"),
        ({"model": "transformer"}, "stages=7,tensor,shard,mesh,slices,sliced-stages,recomputable"),
        (
            {"model": "transformer", "recompute": True},
            "stages=7,tensor,shard,mesh,slices,sliced-stages,recompute,recomputable",
        ),
        ({"directive": "1-2,freeze=auto"}, "recomputable"),
        ({"directive": "1-2,freeze=auto", "recompute": True}, "recompute,recomputable"),
        ({"schedule": "pipedream"}, "recomputable"),
        ({"padding_kb": 1, "overlap": "sliced"}, "recomputable,own-shard=optimizer"),
        ({"model": "segmentation", "spatial": (1, 1, 1), "recompute": True}, None),
    ],
)
def test_a_training_reports_what_plans_may_ask_of_it(
    runs: TrainingRuns, launcher: FakeLauncher, options: dict[str, Any], expected: str | None
) -> None:
    runs.run(1, launcher=launcher, epochs=1, **options)
    assert {report.get("supported_options") for report in launcher.reports} == {expected}


@needs_fsdp
def test_ranks_under_a_plan_report_what_the_script_allows(
    runs: TrainingRuns, launcher: FakeLauncher
) -> None:
    launcher.set_orders(layout="1x1", plan="1x1+tensor=2+recompute")
    runs.run(2, launcher=launcher, epochs=1, model="transformer", directive="2", shard=True)
    report = launcher.wait_for("training")
    assert report["plan"] == "1x1+tensor=2+recompute"
    expected = "stages=7,tensor,shard,mesh,slices,sliced-stages,recomputable,own-shard=full"
    assert report["supported_options"] == expected
