"""Numbers of a training in files of torch.save, which are read without being unpickled."""

import argparse
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from slurm_elastic.job.unmodified.saved_numbers import (
    SavedNumbers,
    read_directory,
    read_numbers,
)


def read_rate(checkpoint: str) -> float | None:
    """Return the learning rate in a directory."""
    return read_directory(checkpoint).rate


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


def trained(steps: int) -> dict[str, Any]:
    """Return the saved state of a script after some steps of optimizer and scheduler."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 7e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        scheduler.step()
    states = {"optimizer": optimizer.state_dict(), "lr_scheduler": scheduler.state_dict()}
    return {"model": model.state_dict(), **states}


def normalised(batches: int) -> dict[str, Any]:
    """Return the state of a model with batch normalisation that has trained on some batches."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for _ in range(batches):
        model(torch.ones(2, 2))
    return model.state_dict()


#: As published scripts write them: torchvision's references, pytorch/examples, nanoGPT, Lightning,
#: mmengine, detectron2, fairseq, a script that saves weights only.
SAVED: dict[str, tuple[dict[str, Any], SavedNumbers]] = {
    "scheduler of steps": (
        {**trained(20), "epoch": 1, "args": argparse.Namespace(epoch=90, lr=0.3, epochs=9)},
        SavedNumbers(20, 1, pytest.approx(8e-3), 20),
    ),
    "scheduler of epochs": (
        {"epoch": 20, "arch": "resnet", "best_acc1": torch.tensor(3.0), **trained(20)},
        SavedNumbers(None, 20, pytest.approx(8e-3), 20),
    ),
    "number of iterations": (
        {"model_args": {"iter_num": 3}, "iter_num": 500, "config": {"learning_rate": 0.1}},
        SavedNumbers(500),
    ),
    "epoch and step": (
        {"epoch": 3, "global_step": 400, "lr_schedulers": [{"last_epoch": 4, "_last_lr": [0.5]}]},
        SavedNumbers(400, 3, 0.5),
    ),
    "in a dictionary of its own": ({"meta": {"epoch": 3, "iter": 70_000}}, SavedNumbers(70_000, 3)),
    "iteration": ({"iteration": 300, "model": {}}, SavedNumbers(300)),
    "iteration within an epoch": ({"iteration": 300, "epoch": 2}, SavedNumbers(None, 2)),
    "step within an epoch": ({"epoch": 2, "step": 3, "iter": 4}, SavedNumbers(None, 2)),
    "numpy": (
        {"optimizer": {"param_groups": [{"lr": np.float64(0.125)}]}, "epoch": np.int64(3)},
        SavedNumbers(rate=0.125),
    ),
    "weights": (trained(0)["model"], SavedNumbers()),
    "weights of these names": ({"epoch": torch.ones(2), "global_step": -1}, SavedNumbers()),
    "true and false": ({"epoch": True, "global_step": 2**70}, SavedNumbers()),
    "steps of groups": (
        {"epoch": 3, "optimizer": {"state": {}, "param_groups": [{"lr": 0.5, "step": 30}]}},
        SavedNumbers(None, 3, 0.5, 30),
    ),
    "steps of a half tensor": (
        {"epoch": 3, "optimizer": {"state": {0: {"step": torch.tensor(3.0).half()}}}},
        SavedNumbers(None, 3),
    ),
    "batches of normalisation": (
        {"model": normalised(30), "epoch": 2, "args": argparse.Namespace(batch_size=8, lr=0.1)},
        SavedNumbers(None, 2, passes=30),
    ),
    "batches of normalisation, options in a dictionary": (
        {
            "state_dict_ema": normalised(7),
            "state_dict": normalised(30),
            "epoch": 2,
            "hparams": {"train_batch_size": 8, "accum_iter": 1},
        },
        SavedNumbers(None, 2, passes=30),
    ),
    "batches of normalisation that are accumulated": (
        {"model": normalised(30), "args": argparse.Namespace(batch_size=8, grad_accum_steps=2)},
        SavedNumbers(),
    ),
    "batches of normalisation of a batch over all ranks": (
        {"model": normalised(30), "args": {"batch_size": 8, "Global_Batch_Size": 32}},
        SavedNumbers(),
    ),
    "batches of normalisation without options": (
        {"model": normalised(30), "args": {"lr": 0.1}, "epoch": 2},
        SavedNumbers(None, 2),
    ),
    "keys that are numbers": ({0: 1, "epoch": 4}, SavedNumbers(None, 4)),
    "one number": ({"epoch": 4}, SavedNumbers(None, 4)),
}


@pytest.mark.parametrize("name", SAVED)
def test_checkpoints_of_one_file(tmp_path: Path, name: str) -> None:
    value, numbers = SAVED[name]
    for protocol in (2, 4):
        torch.save(value, tmp_path / "last.pth", pickle_protocol=protocol)
        assert read_numbers(str(tmp_path / "last.pth")) == numbers


def test_no_checkpoint_of_one_file(tmp_path: Path) -> None:
    assert read_numbers(str(tmp_path / "none.pt")) == SavedNumbers()
    assert read_numbers(str(tmp_path)) == SavedNumbers()
    (tmp_path / "x.pt").write_bytes(b"epoch")
    assert read_numbers(str(tmp_path / "x.pt")) == SavedNumbers()
    torch.save({"epoch": 3, "text": "x" * (1 << 20)}, tmp_path / "large.pt")
    assert read_numbers(str(tmp_path / "large.pt")) == SavedNumbers(), "its pickle has 1 MiB"


@pytest.mark.parametrize("name", ["optimizer.bin", "optimizer.pt"])
def test_steps_of_an_optimizer_in_a_directory(tmp_path: Path, name: str) -> None:
    torch.save(trained(7)["optimizer"], tmp_path / name)
    assert read_directory(str(tmp_path)) == SavedNumbers(updates=7)


@pytest.mark.parametrize(("name", "scheduled"), [("scheduler.bin", 7), ("scheduler.pt", None)])
def test_steps_of_a_scheduler_in_a_directory(
    tmp_path: Path, name: str, scheduled: int | None
) -> None:
    """Only accelerate may step it once for each rank."""
    torch.save(trained(7)["lr_scheduler"], tmp_path / name)
    numbers = read_directory(str(tmp_path))
    assert numbers == SavedNumbers(rate=pytest.approx(9.3e-3), scheduled=scheduled)


@pytest.mark.parametrize("data", [None, b"", b"1", bytes(5), bytes(1 << 20), b"\0\0\xc0\x7f"])
def test_a_storage_of_another_size_is_no_number(tmp_path: Path, data: bytes | None) -> None:
    torch.save(trained(7)["optimizer"], tmp_path / "whole")
    with zipfile.ZipFile(tmp_path / "whole") as whole:
        names = whole.namelist()
        with zipfile.ZipFile(tmp_path / "optimizer.pt", "w", zipfile.ZIP_DEFLATED) as archive:
            for name in names:
                if "/data/" not in name:
                    archive.writestr(name, whole.read(name))
                elif data is not None:
                    archive.writestr(name, data)
    assert read_directory(str(tmp_path)) == SavedNumbers()
