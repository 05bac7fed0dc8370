"""The layer profile, measured while a model trains."""

import doctest
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slurm_elastic.core.layers import Layer
from slurm_elastic.models.pipedream.partitioner import Level, partition
from slurm_elastic.models.pipedream.profile_reader import read
from slurm_elastic.training.measure import layer_profile
from slurm_elastic.training.measure.layer_profile import (
    LayerProfiler,
    MeasuredLayers,
    layers_of,
    merge,
)

CPU = torch.device("cpu")


def profiled(
    model: nn.Module,
    inputs: Callable[[], torch.Tensor],
    *,
    earlier: MeasuredLayers | None = None,
    passes: int = 1,
    steps: int = 3,
    size: int | None = None,
) -> LayerProfiler:
    """Train without profiling, then for `steps` steps with it, and two without."""
    profiler = LayerProfiler(layers_of(model), device=CPU, earlier=earlier, skipped=2, steps=steps)
    for _ in range(2 + steps + 2):
        profiler.begin()
        for _ in range(passes):
            profiler.samples = size
            model(inputs()).square().sum().backward()
    return profiler


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def uneven() -> nn.Sequential:
    """Return layers of which the second takes about 60 times as long as the others."""
    return nn.Sequential(nn.Linear(32, 512), nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 4))


def names(profiler: LayerProfiler) -> list[str]:
    return [layer.name for layer in profiler.measured.layers] if profiler.measured else []


def test_sizes_are_exact_and_the_largest_layer_takes_longest() -> None:
    model = uneven()
    profiler = profiled(model, lambda: torch.randn(64, 32), steps=15)
    measured = profiler.measured
    assert measured is not None
    assert measured.micro_batch == 64
    assert names(profiler) == ["0", "1", "2", "3"]
    assert [x.activation_bytes for x in measured.layers] == [
        64 * 4 * n for n in (512, 2048, 2048, 4)
    ]
    weights = [33 * 512 * 4, 513 * 2048 * 4, 0, 2049 * 4 * 4]
    assert [x.parameter_bytes for x in measured.layers] == weights
    assert max(measured.layers, key=lambda x: x.forward_s).name == "1"
    assert max(measured.layers, key=lambda x: x.backward_s).name == "1"
    assert all(x.forward_s > 0 and x.backward_s > 0 for x in measured.layers)


def test_hooks_are_removed_after_a_few_steps() -> None:
    model = uneven()
    profiler = LayerProfiler(layers_of(model), device=CPU, skipped=2, steps=3)
    seen = []
    for _ in range(8):
        profiler.begin()
        seen.append(hooks(model) > 0)
        model(torch.randn(4, 32)).sum().backward()
    assert seen == [False, False, True, True, True, False, False, False]
    assert profiler.done


def test_a_step_that_is_off_does_not_count() -> None:
    model = uneven()
    profiler = LayerProfiler(layers_of(model), device=CPU, skipped=0, steps=1)
    for _ in range(5):
        profiler.begin(on=False)
    assert hooks(model) == 0
    profiler.begin()
    assert hooks(model) > 0


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu_(self.inner(x))


def block_model() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 36, 16), Residual(16), nn.Linear(16, 4))


def test_measuring_does_not_change_gradients() -> None:
    models = block_model(), block_model()
    profiler = LayerProfiler(layers_of(models[0]), device=CPU, skipped=0, steps=4)
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        batch = torch.randn(5, 3, 8, 8, generator=generator)
        profiler.begin()
        assert hooks(models[0]) > hooks(models[1]) == 0
        for model in models:
            model(batch).square().sum().backward()
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    profiler.finish()
    assert len(names(profiler)) == 7
    assert profiler.measured is not None
    assert all(x.forward_s > 0 and x.backward_s > 0 for x in profiler.measured.layers)


def test_micro_batches_of_the_commonest_size_count() -> None:
    sizes = iter([8, 8, 4] * 10)
    measured = profiled(uneven(), lambda: torch.randn(next(sizes), 32), passes=3).measured
    assert measured is not None
    assert measured.micro_batch == 8
    assert measured.layers[-1].activation_bytes == 8 * 4 * 4
    # Where the first dimension is no sample's, the driver knows better.
    measured = profiled(uneven(), lambda: torch.randn(6, 32), size=3).measured
    assert measured is not None
    assert measured.micro_batch == 3


def test_evaluations_do_not_count() -> None:
    model = uneven()
    profiler = LayerProfiler(layers_of(model), device=CPU, skipped=0, steps=2)
    profiler.begin()
    with torch.no_grad():
        model(torch.randn(99, 32))
    model.eval()
    model(torch.randn(98, 32)).sum().backward()
    model.train()
    model(torch.randn(4, 32)).sum().backward()
    profiler.finish()
    assert profiler.measured is not None
    assert profiler.measured.micro_batch == 4


class Script(nn.Module):
    """A usual module, with functions between the layers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Conv2d(1, 2, 3)
        self.blocks = nn.ModuleList([nn.Linear(18, 18), nn.Linear(18, 18)])
        self.last = nn.Linear(18, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(self.first(x)).flatten(1)
        if self.how == "twice":
            x = self.blocks[0](x)
        before = x
        for block in self.blocks if self.how != "backwards" else reversed(self.blocks):
            x = torch.tanh(block(x))
        if self.how == "skip":
            x = x + before
        return self.last(x.detach() if self.how == "cut" else x)


def test_children_called_in_their_order_are_a_chain() -> None:
    profiler = profiled(Script("chain"), lambda: torch.randn(3, 1, 5, 5))
    assert names(profiler) == ["first", "blocks.0", "blocks.1", "last"]
    wrapped = nn.Sequential()
    wrapped.add_module("net", Script("chain"))
    profiler = profiled(wrapped, lambda: torch.randn(3, 1, 5, 5))
    assert names(profiler) == ["net.first", "net.blocks.0", "net.blocks.1", "net.last"]


@pytest.mark.parametrize("how", ["twice", "backwards", "skip", "cut"])
def test_a_model_that_is_no_chain_has_no_profile(how: str) -> None:
    model = Script(how)
    profiler = profiled(model, lambda: torch.randn(3, 1, 5, 5))
    assert profiler.measured is None
    assert profiler.done
    assert hooks(model) == 0


def test_a_single_layer_has_no_profile() -> None:
    model = nn.Linear(3, 3)
    assert profiled(model, lambda: torch.randn(2, 3)).measured is None


class Pair(nn.Module):
    """Layer that takes and returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, pair: Any) -> Any:
        x, y = pair if isinstance(pair, tuple) else (pair, pair)
        return self.inner(x), y + x


class Join(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0] * pair[1]


def test_layers_may_pass_several_tensors() -> None:
    measured = profiled(nn.Sequential(Pair(), Pair(), Join()), lambda: torch.randn(2, 4)).measured
    assert measured is not None
    assert [x.activation_bytes for x in measured.layers] == [64, 64, 32]
    assert all(x.backward_s > 0 for x in measured.layers)


def test_frozen_layers_keep_their_earlier_backward_times() -> None:
    model = uneven()
    whole = profiled(model, lambda: torch.randn(8, 32)).measured
    assert whole is not None
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    now = profiled(model, lambda: torch.randn(16, 32), earlier=whole).measured
    assert now is not None
    assert [x.backward_s for x in now.layers[:2]] == [2 * x.backward_s for x in whole.layers[:2]]
    assert now.layers[0].activation_bytes == 16 * 512 * 4
    fresh = profiled(model, lambda: torch.randn(8, 32)).measured
    assert fresh is not None
    assert [x.backward_s > 0 for x in fresh.layers] == [False, False, False, True]


def test_profiles_of_stages_are_merged() -> None:
    """Run passes in the order of 1F1B: forward 0, forward 1, backward 0, backward 1."""
    whole = layers_of(uneven())
    stages = [whole[:2], whole[2:]]
    profilers = [LayerProfiler(s, device=CPU, skipped=0, steps=2) for s in stages]
    for _ in range(2):
        for profiler in profilers:
            profiler.begin()
        kept = []
        for _ in range(2):
            x = torch.randn(8, 32)
            for _, module in stages[0]:
                x = module(x)
            between = x.detach().requires_grad_()
            y = between
            for _, module in stages[1]:
                y = module(y)
            kept.append((x, between, y))
        for x, between, y in kept:
            y.sum().backward()
            torch.autograd.backward(x, between.grad)
    for profiler in profilers:
        profiler.finish()
    parts = [p.measured for p in profilers if p.measured is not None]
    assert [[x.name for x in part.layers] for part in parts] == [["0", "1"], ["2", "3"]]
    assert all(x.backward_s > 0 for part in parts for x in part.layers)
    together = merge(reversed(parts), ["0", "1", "2", "3"])
    assert together is not None
    assert together.layers == parts[0].layers + parts[1].layers
    assert merge(parts[:1], ["0", "1", "2", "3"]) is None
    assert merge([], []) is None


def test_merged_profiles_have_the_largest_micro_batch() -> None:
    def part(size: int, seconds: float) -> MeasuredLayers:
        return MeasuredLayers(size, (Layer("a", seconds, 2 * seconds, 10 * size, 100),))

    assert merge([part(4, 1.0), part(8, 3.0), part(8, 4.0)], ["a"]) == part(8, 3.0)


def test_the_partitioner_reads_the_layer_profile_of_a_checkpoint(tmp_path: Path) -> None:
    measured = profiled(uneven(), lambda: torch.randn(16, 32)).measured
    assert measured is not None
    text = json.dumps(measured.state())
    assert MeasuredLayers.restored(json.loads(text)) == measured
    file = tmp_path / "profile.json"
    file.write_text(text)
    assert read(file) == measured.at(16)
    assert partition(read(file), [Level(2, 1e9)]).stages


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        {"layers": [], "micro_batch": 4},
        {"layers": [{"name": "a"}], "micro_batch": 4},
        {"layers": 3, "micro_batch": 4},
    ],
)
def test_an_invalid_state_is_no_profile(bad: Any) -> None:
    assert MeasuredLayers.restored(bad) is None


def test_negative_times_are_no_profile() -> None:
    state = MeasuredLayers(2, (Layer("a", 1.0, 1.0, 1, 1),)).state()
    state["layers"][0]["forward_s"] = -1.0
    assert MeasuredLayers.restored(state) is None
    state = MeasuredLayers(2, (Layer("a", 1.0, 1.0, 1, 1),)).state() | {"micro_batch": 0}
    assert MeasuredLayers.restored(state) is None


def test_examples_in_the_docstring_hold() -> None:
    assert doctest.testmod(layer_profile).failed == 0


def test_a_stage_with_stashed_weights_is_measured_too() -> None:
    model = uneven()
    profiler = LayerProfiler(layers_of(model), device=CPU, skipped=0, steps=2)
    for _ in range(2):
        profiler.begin()
        weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        given = torch.randn(4, 32, requires_grad=True)
        output = torch.func.functional_call(model, weights, (given,))
        torch.autograd.grad(output, [*weights.values(), given], torch.ones_like(output))
    profiler.finish()
    assert profiler.measured is not None
    assert all(x.forward_s > 0 and x.backward_s > 0 for x in profiler.measured.layers)
