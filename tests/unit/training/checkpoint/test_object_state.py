"""State of a script's own objects."""

from typing import Any

import pytest
import torch
from torch import nn

from slurm_elastic.training.checkpoint.checkpoint_coordinator import CheckpointError
from slurm_elastic.training.checkpoint.object_state import (
    LoopValues,
    ObjectState,
    UnsavableObjectError,
)


class Nested:
    """State with containers, keys that are no text, and a name that occurs twice."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def test_nested_states_are_restored_as_they_were() -> None:
    tensor = torch.arange(3.0)
    value = {
        "a": {"b": tensor},
        "a.b": tensor + 1,
        3: [tensor + 2, ("text", None, True)],
        "empty": {},
    }
    saved = ObjectState({"own": Nested(value)}, leads=True).gather()
    assert {"own.a.b", "own.3.0"} <= saved.keys()
    other = Nested(None)
    ObjectState({"own": other}, leads=True).restore(saved)
    assert torch.equal(other.value["a"]["b"], tensor)
    assert torch.equal(other.value["a.b"], tensor + 1)
    assert torch.equal(other.value[3][0], tensor + 2)
    assert other.value[3][1] == ("text", None, True)
    assert other.value["empty"] == {}


def test_the_scale_of_a_scaler_is_restored() -> None:
    first, second = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 4.0))
    saved = ObjectState({"scaler": first}, leads=True).gather()
    ObjectState({"scaler": second}, leads=True).restore(saved)
    assert second.get_scale() == 8.0


def test_two_optimizers_and_a_compiled_model_are_restored() -> None:
    def objects(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        adam = torch.optim.AdamW([model.weight], lr=seed + 1.0)
        sgd = torch.optim.SGD([model.bias], lr=0.1, momentum=0.9)
        model(torch.ones(1, 3)).sum().backward()
        adam.step()
        sgd.step()
        return {"model": model, "adam": adam, "sgd": sgd}

    first, second = objects(0), objects(1)
    saved = ObjectState(first, leads=True).gather()
    # A wrapper makes no difference.
    second["model"] = torch.compile(second["model"], backend="eager")
    ObjectState(second, leads=True).restore(saved)
    again = ObjectState(second, leads=True).gather()
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], saved[name]) for name in saved)
    assert second["adam"].param_groups[0]["lr"] == 1.0


def test_a_rank_that_does_not_lead_saves_no_replicas() -> None:
    assert ObjectState({"model": nn.Linear(3, 2)}, leads=False).gather() == {}


def test_a_state_that_fails_or_cannot_be_read_again_names_the_object() -> None:
    class Fails(Nested):
        def state_dict(self) -> Any:
            raise RuntimeError("consolidate first\nand more")

    with pytest.raises(CheckpointError, match=r"^ema: state_dict\(\) failed: consolidate first$"):
        ObjectState({"ema": Fails(1)}, leads=True).gather()
    with pytest.raises(CheckpointError, match="own cannot be saved: expected only tensors"):
        ObjectState({"own": Nested({"f": print})}, leads=True).gather()
    with pytest.raises(UnsavableObjectError, match="best: float is invalid"):
        ObjectState({"best": 1.0}, leads=True)  # type: ignore[dict-item]


def test_the_state_of_one_ranks_loader_is_refused() -> None:
    class StatefulDataLoader(Nested):
        """Named as torchdata's."""

    with pytest.raises(UnsavableObjectError, match=r"use loop.loader\(loader\)"):
        ObjectState({"loader": StatefulDataLoader(0)}, leads=True)


def test_an_object_that_refuses_its_state_is_named() -> None:
    saved = ObjectState({"sgd": torch.optim.SGD(nn.Linear(3, 2).parameters())}, leads=True).gather()
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(CheckpointError, match=r"^sgd: load_state_dict\(\) refused the checkpoint"):
        ObjectState({"sgd": other}, leads=True).restore(saved)


def test_numbers_of_numpy_are_saved_as_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    saved = ObjectState({"own": Nested({"best": numpy.mean([1.0, 2.0])})}, leads=True).gather()
    other = Nested(None)
    ObjectState({"own": other}, leads=True).restore(saved)
    assert other.value == {"best": 1.5}


def test_values_of_the_script_are_replaced() -> None:
    values: dict[str, Any] = {"best": 3.0}
    saved = ObjectState({"state": LoopValues(values)}, leads=True).gather()
    live: dict[str, Any] = {"other": 1}
    ObjectState({"state": LoopValues(live)}, leads=True).restore(saved)
    assert live == {"best": 3.0}
