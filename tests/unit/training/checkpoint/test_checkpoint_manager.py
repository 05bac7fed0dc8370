"""When a run is saved, what proves it, and what it refuses to begin with."""

import time
from pathlib import Path

import pytest
import torch

from slurm_elastic.training.checkpoint import checkpoint_manager as module
from slurm_elastic.training.checkpoint.checkpoint_directory import (
    CheckpointDirectory,
    CheckpointError,
)
from slurm_elastic.training.checkpoint.checkpoint_manager import CheckpointManager, agree
from slurm_elastic.training.checkpoint.dcp_files import TensorReader
from slurm_elastic.training.checkpoint.training_state import TrainingState
from slurm_elastic.training.parallel.process_group import World
from slurm_elastic.training.sampler import Cursor

FIRST, SECOND = Cursor(3, 0, 30), Cursor(4, 1, 0)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, said: list[str]):
    def keeper(**identity: int) -> CheckpointManager:
        model = torch.nn.Linear(2, 2)
        state = TrainingState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        return CheckpointManager(
            CheckpointDirectory(tmp_path, keep=2, say=said.append),
            state,
            World(),
            every_s=100.0,
            identity={"samples": 40} | identity,
            say=said.append,
        )

    return keeper


@pytest.fixture
def take_up(tmp_path: Path):
    def restored(keeper: CheckpointManager) -> Cursor | None:
        found = agree(CheckpointDirectory(tmp_path, keep=2, say=lambda _: None), World())
        return found and keeper.restore(found)

    return restored


def test_the_first_checkpoint_proves_the_run_and_is_remembered(
    make, take_up, said: list[str]
) -> None:
    keeper = make()
    assert take_up(keeper) is None
    assert keeper.facts() == {"proven": False}
    assert keeper.save(FIRST)
    facts = keeper.facts()
    assert (facts["proven"], facts["checkpoint_step"]) == (True, 3)
    assert facts["checkpoint_age_s"] >= 0
    again = make()
    assert take_up(again) == FIRST
    assert again.facts()["proven"] is True
    assert again.facts()["checkpoint_step"] == 3
    assert said == []


def test_what_a_save_costs_is_remembered(make, take_up) -> None:
    keeper = make()
    keeper.save(FIRST)
    cost = keeper.facts()["checkpoint_s"]
    keeper.save(SECOND)
    again = make()
    assert take_up(again) == SECOND
    assert again.facts()["checkpoint_s"] == cost


def test_what_reads_back_differently_proves_nothing(
    make, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = TensorReader.__getitem__

    def lie(tensors: TensorReader, name: str) -> torch.Tensor:
        read = honest(tensors, name)
        return torch.nextafter(read, torch.tensor(9.0)) if name == "model.bias" else read

    monkeypatch.setattr(TensorReader, "__getitem__", lie)
    keeper = make()
    assert keeper.save(FIRST)
    assert keeper.facts()["proven"] is False
    assert said == ["step 3 reads back differently: model.bias"]


def test_other_data_is_refused(make, take_up) -> None:
    make().save(FIRST)
    with pytest.raises(CheckpointError, match="its samples is 40, now it is 41"):
        take_up(make(samples=41))


def test_a_step_is_saved_once(make, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = make()
    keeper.save(FIRST)
    monkeypatch.setattr(CheckpointDirectory, "save", lambda *_: pytest.fail("saved again"))
    assert keeper.save(FIRST)


def test_a_save_that_fails_says_so_in_one_line(make, tmp_path: Path, said: list[str]) -> None:
    keeper = make()
    (tmp_path / ".tmp.step_00000003").write_text("not a directory, and not to be removed")
    assert not keeper.save(FIRST)
    (line,) = said
    assert line.startswith("no checkpoint at step 3: File exists")
    assert line.endswith("none yet, training goes on")
    assert keeper.facts() == {"proven": False}


def test_the_first_save_is_early_and_the_others_are_not(
    make, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(module.dcp_files, "prepare", lambda: None)
    keeper = make()
    keeper.begin()
    assert not keeper.due()
    now += module.FIRST_SAVE_S
    assert keeper.due()
    keeper.save(FIRST)
    now += 99.0
    assert not keeper.due()
    keeper.hurry()  # for a proven run there is no hurry
    assert not keeper.due()
    now += 1.0
    assert keeper.due()
    unproven = make()
    unproven.begin()
    unproven.hurry()
    assert unproven.due()
