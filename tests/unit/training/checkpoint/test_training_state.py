"""A gathered state is restored bit for bit, also into other parameter groups."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slurm_elastic.training.checkpoint.checkpoint_directory import CheckpointError
from slurm_elastic.training.checkpoint.training_state import TrainingState, check
from tests.support.trainings.checkpoint_ranks import differences


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    )


def steps(state: TrainingState, count: int) -> list[float]:
    losses = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        loss = state.model(torch.randn(16, 4, generator=generator)).square().mean()
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        if state.scheduler is not None:
            state.scheduler.step()
        losses.append(loss.item())
    return losses


def make(optimizer: Callable[..., Any], **options: Any) -> TrainingState:
    model = network()
    made = optimizer(model.parameters(), **options)
    return TrainingState(
        model=model, optimizer=made, scheduler=torch.optim.lr_scheduler.StepLR(made, 3)
    )


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.NAdam, {"lr": 0.01}),
    ],
)
def test_a_restored_training_equals_an_uninterrupted_one(
    optimizer: Callable[..., Any], options: dict[str, Any]
) -> None:
    first = make(optimizer, **options)
    steps(first, 4)
    flat = {name: tensor.clone() for name, tensor in first.gather().items()}
    second = make(optimizer, **(options | {"lr": 99.0}))
    second.restore(flat)
    assert differences(flat, second.gather()) == []
    assert steps(second, 4) == steps(first, 4)


def test_tensors_have_the_names_of_the_whole_model() -> None:
    state = make(torch.optim.AdamW)
    steps(state, 1)
    names = set(state.gather())
    assert {"model.0.weight", "model.1.running_mean", "optim.exp_avg.3.bias"} < names
    assert {"optim.step.0.weight", "blob.optim", "blob.scheduler"} < names


def test_parameter_groups_may_differ_from_those_of_the_checkpoint() -> None:
    first = make(torch.optim.AdamW, lr=0.02)
    steps(first, 2)
    model = network()
    second = TrainingState(
        model=model,
        optimizer=torch.optim.AdamW(
            [{"params": [p]} for p in reversed(list(model.parameters()))], lr=7.0
        ),
    )
    second.restore(first.gather())
    assert {group["lr"] for group in second.optimizer.param_groups} == {0.02}
    for mine, other in zip(model.parameters(), first.model.parameters(), strict=True):
        theirs = first.optimizer.state[other]
        for key, value in second.optimizer.state[mine].items():
            assert torch.equal(value, theirs[key])


def test_moments_of_another_type_than_their_parameter_keep_it() -> None:
    state = make(torch.optim.AdamW)
    steps(state, 1)
    state.model.to(torch.bfloat16)
    flat = state.gather()
    assert flat["optim.exp_avg.0.weight"].dtype == torch.float32
    state.restore(flat)
    assert state.gather()["optim.exp_avg.0.weight"].dtype == torch.float32


class Counter:
    def __init__(self) -> None:
        self.state: Any = {"seen": [1, 2], "mean": torch.tensor(0.5)}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_the_users_own_state_is_saved_and_restored() -> None:
    state = make(torch.optim.SGD)
    extra = TrainingState(
        model=state.model, optimizer=state.optimizer, extra={"counter": Counter()}
    )
    flat = extra.gather()
    other = Counter()
    other.state = None
    TrainingState(model=state.model, optimizer=state.optimizer, extra={"counter": other}).restore(
        flat
    )
    assert other.state == {"seen": [1, 2], "mean": torch.tensor(0.5)}
    with pytest.raises(CheckpointError, match=r"the checkpoint has no extra\.meter"):
        TrainingState(model=state.model, optimizer=state.optimizer, extra={"meter": other}).restore(
            flat
        )


def test_a_state_that_could_not_be_restored_is_refused_when_saved() -> None:
    state = make(torch.optim.SGD)
    odd = Counter()
    odd.state = {"when": Counter()}
    with pytest.raises(CheckpointError, match="extra 'odd' cannot be saved"):
        TrainingState(model=state.model, optimizer=state.optimizer, extra={"odd": odd}).gather()


def test_a_checkpoint_of_another_model_is_refused_with_the_name_of_the_tensor() -> None:
    flat = make(torch.optim.SGD).gather()
    other = torch.nn.Sequential(torch.nn.Linear(4, 9))
    state = TrainingState(model=other, optimizer=torch.optim.SGD(other.parameters()))
    with pytest.raises(CheckpointError, match=r"0\.bias is 8 in the checkpoint and 9 in"):
        state.fits({name: tensor.shape for name, tensor in flat.items()})
    with pytest.raises(CheckpointError, match=r"only the checkpoint has 1\.bias"):
        state.restore(flat)
    more = network()
    more.add_module("4", torch.nn.Linear(2, 2))
    state = TrainingState(model=more, optimizer=torch.optim.SGD(more.parameters()))
    with pytest.raises(CheckpointError, match=r"only the model has 4\.bias"):
        state.restore(flat)


def test_a_parameter_without_a_name_is_refused() -> None:
    loose = torch.nn.Parameter(torch.zeros(3, 2))
    state = TrainingState(model=network(), optimizer=torch.optim.SGD([loose]))
    with pytest.raises(ValueError, match=r"optimizer: parameter 0 of group 0 \(3x2\) is invalid"):
        check(state)


def test_differences_compare_bits() -> None:
    nan = torch.tensor([float("nan")])
    assert differences({"a": nan}, {"a": nan.clone()}) == []
    zero = torch.tensor([0.0])
    assert differences({"a": zero}, {"a": -zero}) == ["a"]
    assert differences({"a": zero, "b": zero}, {"a": zero.double()}) == ["a", "b"]
    assert differences({"a": torch.zeros(2, 1)}, {"a": torch.zeros(1, 2)}) == ["a"]


def _cut() -> list[TrainingState]:
    """Return a network in two parts with two parameter groups each, some of them empty."""
    whole = network()
    shapes = {k: tuple(v.shape) for k, v in whole.state_dict().items()}
    parts = []
    for part, names in enumerate((("0",), ("1", "3"))):
        model = torch.nn.Sequential()
        for name in names:
            model.add_module(name, whole.get_submodule(name))
        groups = [
            [p for n, p in model.named_parameters() if n.endswith("weight")],
            [p for n, p in model.named_parameters() if n == "3.bias"],
            [p for n, p in model.named_parameters() if n in ("0.bias", "1.bias")],
        ]
        made = torch.optim.SGD(
            [{"params": g, "lr": rate} for g, rate in zip(groups, (0.3, 0.2, 0.1), strict=True)],
            momentum=0.9,
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
        parts.append(
            TrainingState(
                model=model, optimizer=made, scheduler=scheduler, full_shapes=shapes, part=part
            )
        )
    return parts


def _move(state: TrainingState) -> None:
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    state.scheduler.step()


def test_each_part_saves_and_restores_its_own_tensors() -> None:
    parts = _cut()
    for part in parts:
        _move(part)
    flats = [part.gather() for part in parts]
    assert "blob.scheduler" in flats[0]
    assert {n for n in flats[1] if n.startswith("blob.")} == {"blob.optim.1"}
    flat = {k: v.clone() for part in flats for k, v in part.items()}
    for old, new in zip(parts, _cut(), strict=True):
        _move(new)
        _move(new)
        new.fits({name: tensor.shape for name, tensor in flat.items()})
        needed = {name: flat[name] for name in new.needs(flat)}
        assert not any("0.weight" in n for n in needed) or new.part == 0
        new.restore(needed)
        assert differences(old.gather(), new.gather()) == []
        # Groups that are empty here go on with the schedule, too.
        assert [g["lr"] for g in new.optimizer.param_groups] == [0.15, 0.1, 0.05]


def test_a_missing_tensor_is_named_before_anything_is_loaded() -> None:
    front, back = _cut()
    shapes = {name: tuple(t.shape) for part in (front, back) for name, t in part.gather().items()}
    front.fits(shapes)
    front.fits(dict.fromkeys(shapes))  # an old checkpoint, without shapes
    with pytest.raises(CheckpointError, match=r"only the model has 3\.bias"):
        front.fits({k: v for k, v in shapes.items() if k != "model.3.bias"})
    with pytest.raises(CheckpointError, match=r"only the checkpoint has 4\.bias"):
        front.fits(shapes | {"model.4.bias": (2,)})
    with pytest.raises(CheckpointError, match=r"3\.weight is 2x9 in the checkpoint and 2x8"):
        front.fits(shapes | {"model.3.weight": (2, 9)})


def test_tied_parameters_have_one_name_in_the_optimizer_state() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
    model[2].weight = model[0].weight
    aliases = {"2.weight": "0.weight"}
    whole = TrainingState(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), aliases=aliases
    )
    model(torch.ones(1, 3)).sum().backward()
    whole.optimizer.step()
    flat = whole.gather()
    assert {"model.0.weight", "model.2.weight", "optim.exp_avg.0.weight"} < flat.keys()
    assert "optim.exp_avg.2.weight" not in flat
    head = torch.nn.Sequential()
    head.add_module("2", torch.nn.Linear(3, 3))
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    part = TrainingState(
        model=head,
        optimizer=torch.optim.AdamW(head.parameters()),
        aliases=aliases,
        full_shapes=shapes,
        part=1,
    )
    assert "optim.exp_avg.0.weight" in part.needs(flat)
    part.restore(flat)
    mine = part.optimizer.state[head.get_parameter("2.weight")]
    assert torch.equal(mine["exp_avg"], flat["optim.exp_avg.0.weight"])
    assert differences({k: flat[k] for k in part.gather() if k in flat}, part.gather()) == [
        "blob.optim.1"
    ]
