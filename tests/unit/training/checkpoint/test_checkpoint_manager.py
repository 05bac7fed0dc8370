"""Times of saves, the proof of a run, and checkpoints that are refused."""

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
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.sampler import Cursor

FIRST, SECOND = Cursor(3, 0, 30), Cursor(4, 1, 0)


@pytest.fixture
def log_lines() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, log_lines: list[str]):
    def manager(**identity: int) -> CheckpointManager:
        model = torch.nn.Linear(2, 2)
        state = TrainingState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        return CheckpointManager(
            CheckpointDirectory(tmp_path, keep=2, log=log_lines.append),
            state,
            RankGroup(),
            every_s=100.0,
            identity={"samples": 40} | identity,
            log=log_lines.append,
        )

    return manager


@pytest.fixture
def restore_newest(tmp_path: Path):
    def restored(manager: CheckpointManager) -> Cursor | None:
        checkpoint = agree(CheckpointDirectory(tmp_path, keep=2, log=lambda _: None), RankGroup())
        return checkpoint and manager.restore(checkpoint)

    return restored


def test_the_first_checkpoint_proves_the_run_and_is_remembered(
    make, restore_newest, log_lines: list[str]
) -> None:
    manager = make()
    assert restore_newest(manager) is None
    assert manager.report_fields() == {"proven": False}
    assert manager.save(FIRST)
    facts = manager.report_fields()
    assert (facts["proven"], facts["checkpoint_step"]) == (True, 3)
    assert facts["checkpoint_age_s"] >= 0
    again = make()
    assert restore_newest(again) == FIRST
    assert again.report_fields()["proven"] is True
    assert again.report_fields()["checkpoint_step"] == 3
    assert log_lines == []


def test_the_duration_of_a_save_is_restored(make, restore_newest) -> None:
    manager = make()
    manager.save(FIRST)
    cost = manager.report_fields()["checkpoint_s"]
    manager.save(SECOND)
    again = make()
    assert restore_newest(again) == SECOND
    assert again.report_fields()["checkpoint_s"] == cost


def test_a_checkpoint_that_differs_when_read_back_does_not_prove_the_run(
    make, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TensorReader.__getitem__

    def modified(tensors: TensorReader, name: str) -> torch.Tensor:
        read = original(tensors, name)
        return torch.nextafter(read, torch.tensor(9.0)) if name == "model.bias" else read

    monkeypatch.setattr(TensorReader, "__getitem__", modified)
    manager = make()
    assert manager.save(FIRST)
    assert manager.report_fields()["proven"] is False
    assert log_lines == [
        (
            "checkpoint of step 3 differs when read back: model.bias; "
            "the job is not resized until one does not"
        )
    ]


def test_a_checkpoint_of_another_dataset_is_refused(make, restore_newest) -> None:
    make().save(FIRST)
    with pytest.raises(CheckpointError, match="samples 40 is invalid: expected 41"):
        restore_newest(make(samples=41))


def test_a_step_is_saved_once(make, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make()
    manager.save(FIRST)
    monkeypatch.setattr(CheckpointDirectory, "save", lambda *_: pytest.fail("saved again"))
    assert manager.save(FIRST)


def test_a_failed_save_is_logged_in_one_line(make, tmp_path: Path, log_lines: list[str]) -> None:
    manager = make()
    (tmp_path / ".tmp.step_00000003").write_text("not a directory, and not to be removed")
    assert not manager.save(FIRST)
    (line,) = log_lines
    assert line.startswith("checkpoint of step 3 failed: File exists")
    assert line.endswith("there is none yet, training continues")
    assert manager.report_fields() == {"proven": False}


def test_only_the_first_save_is_early(make, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(module.dcp_files, "prepare", lambda: None)
    manager = make()
    manager.begin()
    assert not manager.due()
    now += module.FIRST_SAVE_S
    assert manager.due()
    manager.save(FIRST)
    now += 99.0
    assert not manager.due()
    manager.hurry()  # for a proven run there is no hurry
    assert not manager.due()
    now += 1.0
    assert manager.due()
    unproven = make()
    unproven.begin()
    unproven.hurry()
    assert unproven.due()


@pytest.mark.parametrize(("save_s", "early_s"), [(0.1, module.FIRST_SAVE_S), (2.0, 40.0)])
def test_the_first_save_after_a_restart_is_early(
    make, restore_newest, monkeypatch: pytest.MonkeyPatch, save_s: float, early_s: float
) -> None:
    """Until then the change that restarted it is on trial."""
    make().save(FIRST)
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(module.dcp_files, "prepare", lambda: None)
    again = make()
    restore_newest(again)
    again._save_s = save_s
    again.begin()
    now += early_s - 0.1
    assert not again.due()
    now += 0.1
    assert again.due()
    again.save(SECOND)
    now += 99.0
    assert not again.due()
