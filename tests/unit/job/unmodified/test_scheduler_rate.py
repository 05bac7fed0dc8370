"""Learning rates in saved schedulers, which are read without being unpickled."""

import contextlib
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from slurm_elastic.job.unmodified.scheduler_rate import _rate, read_rate


def save(folder: Path, value: Any, name: str = "scheduler.bin") -> Path:
    """Write a value as torch.save does."""
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value, protocol=2))
    return folder / name


@pytest.mark.parametrize("name", ["scheduler.bin", "scheduler.pt"])
def test_schedulers_of_torch(tmp_path: Path, name: str) -> None:
    model = torch.nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 3e-4}, {"params": [model.bias], "lr": 1e-3}]
    optimizer = torch.optim.SGD(groups)
    warmup = lr_scheduler.LinearLR(optimizer, total_iters=2)
    schedulers = (
        lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10),
        lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.StepLR(optimizer, 3)], [2]),
        lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10),
    )
    for scheduler in schedulers:
        for _ in range(4):
            optimizer.step()
            scheduler.step()
        torch.save(scheduler.state_dict(), tmp_path / name)
        assert read_rate(str(tmp_path)) == scheduler.get_last_lr()[0]


@pytest.mark.parametrize("value", [{}, {"_last_lr": []}, [1.0], None, "_last_lr"])
def test_states_without_a_rate(tmp_path: Path, value: Any) -> None:
    save(tmp_path, value)
    assert read_rate(str(tmp_path)) is None


def test_nothing_is_executed(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    save(tmp_path, {"x": Hostile(), "_last_lr": [0.5]})
    assert read_rate(str(tmp_path)) == 0.5
    assert not (tmp_path / "executed").exists()


def test_files_that_are_something_else(tmp_path: Path) -> None:
    assert read_rate(str(tmp_path)) is None
    path = tmp_path / "scheduler.bin"
    os.mkfifo(path)
    assert read_rate(str(tmp_path)) is None
    path.unlink()
    path.mkdir()
    assert read_rate(str(tmp_path)) is None
    path.rmdir()
    for data in (b"", b"PK", save(tmp_path, {"_last_lr": [0.5]}).read_bytes()[:-5]):
        path.write_bytes(data)
        assert read_rate(str(tmp_path)) is None
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other", b"")
    assert read_rate(str(tmp_path)) is None
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(100 << 20))
    assert read_rate(str(tmp_path)) is None, "it would be 100 MB"


@given(data=st.binary(max_size=200))
def test_any_bytes_are_no_pickle_or_one(data: bytes) -> None:
    with contextlib.suppress(ValueError, LookupError):
        _rate(data)
