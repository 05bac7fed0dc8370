"""What is gathered can be restored, into another layout of groups, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slurm_elastic.training.checkpoint import CheckpointError
from slurm_elastic.training.keeper import differences
from slurm_elastic.training.state import State, check


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    )


def steps(state: State, count: int) -> list[float]:
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


def make(optimizer: Callable[..., Any], **options: Any) -> State:
    model = network()
    made = optimizer(model.parameters(), **options)
    return State(model=model, optimizer=made, scheduler=torch.optim.lr_scheduler.StepLR(made, 3))


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
def test_training_goes_on_as_if_nothing_had_happened(
    optimizer: Callable[..., Any], options: dict[str, Any]
) -> None:
    first = make(optimizer, **options)
    steps(first, 4)
    flat = {name: tensor.clone() for name, tensor in first.gather().items()}
    second = make(optimizer, **(options | {"lr": 99.0}))
    second.restore(flat)
    assert differences(flat, second.gather()) == []
    assert steps(second, 4) == steps(first, 4)


def test_names_are_global_names() -> None:
    state = make(torch.optim.AdamW)
    steps(state, 1)
    names = set(state.gather())
    assert {"model.0.weight", "model.1.running_mean", "optim.exp_avg.3.bias"} < names
    assert {"optim.step.0.weight", "blob.optim", "blob.scheduler"} < names


def test_groups_may_be_cut_differently() -> None:
    first = make(torch.optim.AdamW, lr=0.02)
    steps(first, 2)
    model = network()
    second = State(
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


def test_the_users_own_state_joins() -> None:
    state = make(torch.optim.SGD)
    extra = State(model=state.model, optimizer=state.optimizer, extra={"counter": Counter()})
    flat = extra.gather()
    other = Counter()
    other.state = None
    State(model=state.model, optimizer=state.optimizer, extra={"counter": other}).restore(flat)
    assert other.state == {"seen": [1, 2], "mean": torch.tensor(0.5)}
    with pytest.raises(CheckpointError, match=r"the checkpoint has no extra\.meter"):
        State(model=state.model, optimizer=state.optimizer, extra={"meter": other}).restore(flat)


def test_what_cannot_come_back_is_refused_when_saved() -> None:
    state = make(torch.optim.SGD)
    odd = Counter()
    odd.state = {"when": Counter()}
    with pytest.raises(CheckpointError, match="extra 'odd' cannot be saved"):
        State(model=state.model, optimizer=state.optimizer, extra={"odd": odd}).gather()


def test_another_model_is_refused_by_name() -> None:
    flat = make(torch.optim.SGD).gather()
    other = torch.nn.Sequential(torch.nn.Linear(4, 9))
    state = State(model=other, optimizer=torch.optim.SGD(other.parameters()))
    with pytest.raises(CheckpointError, match=r"0\.bias is 8 there and 9 here"):
        state.restore(flat)
    more = network()
    more.add_module("4", torch.nn.Linear(2, 2))
    state = State(model=more, optimizer=torch.optim.SGD(more.parameters()))
    with pytest.raises(CheckpointError, match=r"only the model has 4\.bias"):
        state.restore(flat)


def test_a_parameter_without_a_name_is_refused() -> None:
    loose = torch.nn.Parameter(torch.zeros(3, 2))
    state = State(model=network(), optimizer=torch.optim.SGD([loose]))
    with pytest.raises(ValueError, match=r"parameter 0 of the optimizer's group 0 \(3x2\)"):
        check(state)


def test_differences_are_of_bits() -> None:
    nan = torch.tensor([float("nan")])
    assert differences({"a": nan}, {"a": nan.clone()}) == []
    zero = torch.tensor([0.0])
    assert differences({"a": zero}, {"a": -zero}) == ["a"]
    assert differences({"a": zero, "b": zero}, {"a": zero.double()}) == ["a", "b"]
    assert differences({"a": torch.zeros(2, 1)}, {"a": torch.zeros(1, 2)}) == ["a"]
