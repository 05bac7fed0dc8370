"""Freezing within a job: parameters that do not change, training that continues, checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slurm_elastic.training import Freezing, TrainingJob, init
from slurm_elastic.training.checkpoint.checkpoint_directory import CheckpointDirectory
from slurm_elastic.training.freezing.criteria import Plasticity
from slurm_elastic.training.freezing.front_layers import FrontLayers
from tests.support.trainings.fixed_criterion import FixedCriterion

SAMPLES, BATCH, EPOCHS = 120, 12, 5
STEPS = EPOCHS * SAMPLES // BATCH


def surely(layers: int, **options: Any) -> Freezing:
    """Return settings that freeze the layers after the bootstrap period, 10 of 50 steps."""
    certain = {"criterion": FixedCriterion(layers), "max_penalty": 1.0, "every": 1, "passes": 1}
    return Freezing(**(certain | {"begin": 0.0, "settled": 1e9, "alpha": 1.0} | options))


def network() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        nn.Tanh(),
        nn.Linear(16, 12),
        nn.BatchNorm1d(12),
        nn.Tanh(),
        nn.Linear(12, 4),
    )


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def slow(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def make(out: Path, **options: Any) -> TrainingJob:
    generator = torch.Generator().manual_seed(5)
    points = torch.randn(SAMPLES, 6, generator=generator)
    labels = (points @ torch.randn(6, 4, generator=generator)).argmax(dim=1)
    model = options.pop("model", None) or network()
    return init(
        model,
        nn.CrossEntropyLoss(),
        options.pop("optimizer", adamw),
        torch.utils.data.TensorDataset(points, labels),
        **(
            {"global_batch": BATCH, "epochs": EPOCHS, "checkpoint_dir": out, "seed": 3}
            | {"micro_batch": 5}
            | options
        ),
    )


def run(
    job: TrainingJob, each: Callable[[TrainingJob, int], None] | None = None
) -> tuple[list[float], list[int]]:
    """Return losses, and the number of frozen layers after each step."""
    losses, frozen = [], []
    for batch in job:
        losses.append(job.step(batch))
        frozen.append(job.frozen)
        if each is not None:
            each(job, batch.step)
    job.finish()
    return losses, frozen


def state(job: TrainingJob) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in job.model.state_dict().items()}


@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_freezing_equals_requires_grad_set_by_hand(tmp_path: Path, optimizer) -> None:
    at_freeze: dict[str, torch.Tensor] = {}

    def keep(job: TrainingJob, _step: int) -> None:
        if job.frozen and not at_freeze:
            at_freeze.update(state(job))

    job = make(tmp_path / "auto", optimizer=optimizer, freeze=surely(1))
    losses, frozen = run(job, keep)
    first = frozen.index(1) + 1
    assert 10 <= first <= STEPS // 2
    assert frozen == [0] * (first - 1) + [1] * (STEPS - first + 1)

    def by_hand(job: TrainingJob, step: int) -> None:
        if step == first:
            for module in job.model[:2]:
                module.eval()
                for parameter in module.parameters():
                    parameter.requires_grad_(False)
                    parameter.grad = None

    other = make(tmp_path / "hand", optimizer=optimizer)
    expected, _ = run(other, by_hand)
    assert losses == expected
    for name, value in job.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
        # Neither momentum nor weight decay, nor a batch, moves what is frozen.
        if name.startswith(("0.", "1.")):
            assert torch.equal(value, at_freeze[name]), name
        elif "num_batches" not in name:
            assert not torch.equal(value, at_freeze[name]), name
    for a, b in zip(job.model.parameters(), other.model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)


def test_freezing_does_not_change_losses_before_the_first_freeze(tmp_path: Path) -> None:
    plain = make(tmp_path / "plain")
    losses, _ = run(plain)
    watched = make(tmp_path / "watched", freeze=Freezing(every=2, begin=1.0, settled=1e9))
    again, frozen = run(watched)
    assert (losses, set(frozen)) == (again, {0})
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, watched.model.state_dict()[name]), name


def test_frozen_batch_norms_keep_their_statistics(tmp_path: Path) -> None:
    def validate(job: TrainingJob, step: int) -> None:
        job.model.eval()
        job.model.train()
        if step == 40:
            job.freeze(0)

    modes: list[bool] = []
    means: list[torch.Tensor] = []

    def look(norm: nn.Module, *_: Any) -> None:
        modes.append(norm.training)
        means.append(norm.running_mean.clone())

    job = make(tmp_path, freeze=surely(1))
    job.model[1].register_forward_hook(look)
    _, frozen = run(job, validate)
    per_step = len(modes) // STEPS
    for step in range(2, STEPS + 1):
        assert modes[(step - 1) * per_step] == (frozen[step - 2] == 0), step
        moved = not torch.equal(means[(step - 1) * per_step], means[(step - 2) * per_step])
        assert moved == (frozen[step - 2] == 0 or frozen[step - 3] == 0), step
    assert frozen[39:42] == [1, 0, 0]
    assert job.model[1].training


def test_the_script_may_freeze_fewer_layers(tmp_path: Path) -> None:
    choices = {20: 0, 30: 1, 40: 7, 45: None}

    def choose(job: TrainingJob, step: int) -> None:
        if step in choices:
            job.freeze(choices[step])

    job = make(tmp_path, freeze=surely(2))
    _, frozen = run(job, choose)
    assert [frozen[step - 1] for step in (20, 21, 31, 41, 46)] == [2, 0, 1, 2, 2]
    assert len(job.penalties) == 3
    with pytest.raises(ValueError, match="-1 layers is invalid"):
        job.freeze(-1)


def test_the_last_layer_always_trains(tmp_path: Path) -> None:
    _, frozen = run(make(tmp_path, freeze=surely(9)))
    assert max(frozen) == 2


def test_a_model_of_one_layer_trains(tmp_path: Path) -> None:
    _, frozen = run(make(tmp_path, model=nn.Linear(6, 4), freeze=surely(1)))
    assert set(frozen) == {0}


def test_the_penalty_limits_the_prefix(tmp_path: Path) -> None:
    _, frozen = run(make(tmp_path / "none", freeze=surely(2, max_penalty=0.0)))
    assert set(frozen) == {0}
    model = nn.Sequential(*[m for m in network() if not isinstance(m, nn.BatchNorm1d)])
    # A layer that the output hardly depends on has hardly any gradient.
    with torch.no_grad():
        model[2].weight.mul_(1e-2)
    how = surely(2, max_penalty=0.01)
    job = make(tmp_path / "some", model=model, optimizer=slow, freeze=how)
    _, frozen = run(job)
    assert max(frozen) == 1
    assert 0 <= job.penalties[1] <= 0.01


def test_a_worse_validation_loss_thaws_all_layers_until_it_recovers(tmp_path: Path, capfd) -> None:
    how = surely(2)
    values = {20: 1.0, 25: 2.0, 40: 0.1}

    def validate(job: TrainingJob, step: int) -> None:
        if step in values:
            job.validated(values[step])

    _, frozen = run(make(tmp_path, freeze=how), validate)
    assert frozen[24] == 2
    assert frozen[25:40] == [0] * 15
    assert frozen[-1] == 2
    assert how.criterion.thaws == 1
    stderr = capfd.readouterr().err
    assert "all layers train again: the validation loss is 1.5, it was 1" in stderr
    assert "2 of 3 layers frozen, up to 3 (penalty " in stderr


def test_a_learning_rate_that_rises_or_falls_far_thaws_all_layers(tmp_path: Path, capfd) -> None:
    rates = {20: 0.02, 40: 0.001}

    def change(job: TrainingJob, step: int) -> None:
        for group in job.optimizer.param_groups:
            group["lr"] = rates.get(step, group["lr"])

    how = surely(1)
    _, frozen = run(make(tmp_path, freeze=how), change)
    # Found in the step that takes the new rate, applied after the all-reduce of the next one.
    assert [frozen[step - 1] for step in (21, 22, 40, 41, 42)] == [1, 0, 1, 1, 0]
    assert how.criterion.thaws == 2
    stderr = capfd.readouterr().err
    assert "all layers train again: the learning rate rose from 0.01 to 0.02" in stderr
    assert "the learning rate fell from 0.02 to 0.001 since the freeze" in stderr


def until(step: int, freeze: Any, out: Path, **options: Any) -> None:
    """Train up to a step, then stop without a save, as a kill does."""
    job = make(out, freeze=freeze, checkpoint_every_s=0.0, **options)
    for batch in job:
        job.step(batch)
        if batch.step == step + 1:  # the save of the step before has been done
            break
    job._signals.restore()


def test_a_resume_keeps_the_prefix(tmp_path: Path, capfd) -> None:
    whole, _ = run(make(tmp_path / "whole", freeze=surely(2)))
    until(30, surely(2), tmp_path / "cut")
    job = make(tmp_path / "cut", freeze=surely(2))
    assert (job.resumed_from, job.frozen, len(job.penalties)) == (30, 2, 3)
    assert not job.model[0].weight.requires_grad
    losses, _ = run(job)
    assert losses == whole[30:]
    assert "2 of 3 layers frozen, up to 3 (penalty" in capfd.readouterr().err


def test_a_resume_before_the_freeze_keeps_the_measurements(tmp_path: Path) -> None:
    def how() -> Freezing:
        return surely(2, criterion=Plasticity(window=3, share=3.0))

    _, frozen = run(make(tmp_path / "whole", freeze=how()))
    assert max(frozen) > 0
    first = frozen.index(1)
    until(first - 3, how(), tmp_path / "cut")
    job = make(tmp_path / "cut", freeze=how())
    _, again = run(job)
    # The reference is not saved: one reading is missing, the others are as they were.
    assert first <= first - 3 + again.index(1) <= first + 2


def test_a_resume_without_freezing_trains_all_layers(tmp_path: Path) -> None:
    until(30, surely(2), tmp_path)
    job = make(tmp_path)
    assert job.frozen == 0
    assert all(p.requires_grad for p in job.model.parameters())
    run(job)


def test_a_resume_with_a_doubled_batch_thaws_all_layers(tmp_path: Path, capfd) -> None:
    until(30, surely(2), tmp_path)
    job = make(tmp_path, freeze=surely(2), global_batch=2 * BATCH)
    assert job.frozen == 0
    assert "the batch was 12, now it is 24: all layers train again" in capfd.readouterr().err
    run(job)


def test_the_manifest_contains_the_frozen_prefix(tmp_path: Path) -> None:
    run(make(tmp_path, freeze=surely(2)))
    newest = CheckpointDirectory(tmp_path, keep=1, log=lambda _: None).newest()
    assert newest is not None
    kept = json.loads(json.dumps(newest.kept["freezing"]))
    assert kept["layers"] == ["0", "3", "6"]
    assert (kept["frozen"], kept["certified"], kept["global_batch"]) == (2, 2, BATCH)


def test_layers_include_following_modules_and_shared_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.position = nn.Parameter(torch.zeros(3))
            self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
            self.norm = nn.LayerNorm(3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    model.blocks[1].bias.requires_grad_(False)
    prefix = FrontLayers(model)
    assert prefix.names == ("blocks.0", "blocks.1", "head")
    prefix.set(2)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        "position",
        "embed.weight",
    ]
    prefix.set(0)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["blocks.1.bias"]
    with pytest.raises(ValueError, match="frozen layers: 3 is invalid: expected 0 to 2"):
        prefix.set(3)


def test_the_layers_of_a_wrapped_model_are_those_of_the_inner_model() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

    assert FrontLayers(Around()).names == ("inner.0", "inner.3", "inner.6")
