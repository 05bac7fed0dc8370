"""Trainings that `init` does not support: one line that names the other interface."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from slurm_elastic.training import init
from slurm_elastic.training.init_arguments import UnsupportedTrainingError, epoch_schedule_warning
from tests.support.trainings.forked_scripts import run_forked

POINTS = TensorDataset(torch.randn(12, 3), torch.randint(2, (12,)))
OWN_LOOP = "keep your own loop, with slurm_elastic.training.ElasticLoop"


@pytest.fixture(autouse=True)
def _process_state() -> Iterator[None]:
    handlers = {n: signal.getsignal(n) for n in (signal.SIGUSR2, signal.SIGTERM)}
    hook = sys.excepthook
    yield
    sys.excepthook = hook
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        yield torch.zeros(3), 0


class SizedStream(Stream):
    def __len__(self) -> int:
        return 1


class Samples(Dataset):  # type: ignore[type-arg]
    def __init__(self, sample: Any) -> None:
        self._sample = sample

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self._sample


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.layer(words) * mask


class ReturnsItsLoss(nn.Module):
    """A model as those of nanoGPT, or of Hugging Face."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self._kind = nn.Linear(3, 2), kind

    def forward(self, words: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        scores = self.layer(words)
        return {"logits": scores, "loss": None} if self._kind == "dict" else (scores, None)


def start(tmp_path: Path, **arguments: Any) -> Any:
    model = arguments.pop("model", None) or nn.Linear(3, 2)
    optimizer = arguments.pop("optimizer", lambda p: torch.optim.SGD(p, lr=0.1))
    loss_fn = arguments.pop("loss_fn", nn.CrossEntropyLoss())
    dataset = arguments.pop("dataset", POINTS)
    given = {"global_batch": 4, "epochs": 2, "checkpoint_dir": tmp_path / "ckpt"} | arguments
    return init(model, loss_fn, optimizer, dataset, **given)


def error_of(tmp_path: Path, **arguments: Any) -> str:
    with pytest.raises(UnsupportedTrainingError) as caught:
        start(tmp_path, **arguments)
    return str(caught.value)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("dataset", [Stream(), SizedStream(), [None].__iter__()])
def test_a_stream_is_refused(tmp_path: Path, dataset: Any) -> None:
    message = error_of(tmp_path, dataset=dataset)
    assert message.startswith("init: dataset: ")
    assert message.endswith(OWN_LOOP)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_several_optimizers_are_refused(tmp_path: Path, kind: Any) -> None:
    generator, critic = nn.Linear(3, 2), nn.Linear(3, 2)
    both = kind({"g": sgd(generator), "c": sgd(critic)}.items())
    message = error_of(tmp_path, model=generator, optimizer=both)
    assert f"optimizer: a {kind.__name__} of 2 is invalid: expected one; for several" in message
    assert OWN_LOOP in error_of(tmp_path, model=generator, optimizer=lambda _: both)


def test_lbfgs_is_refused(tmp_path: Path) -> None:
    message = error_of(tmp_path, optimizer=torch.optim.LBFGS)
    assert "optimizer: LBFGS is invalid: expected one whose step() takes no closure" in message


def test_a_scheduler_that_reads_a_metric_is_refused(tmp_path: Path) -> None:
    message = error_of(tmp_path, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    assert "scheduler: ReduceLROnPlateau is invalid" in message
    assert message.endswith(f"for those that read a metric {OWN_LOOP}")


def test_a_model_of_several_inputs_is_refused(tmp_path: Path) -> None:
    message = error_of(tmp_path, model=TwoInputs())
    assert "model: forward(words, mask) is invalid: expected a module of one input" in message


def test_a_wrapped_model_is_refused(tmp_path: Path) -> None:
    message = error_of(tmp_path, model=nn.DataParallel(nn.Linear(3, 2)))
    assert "model: DataParallel(…) is invalid: expected the bare module" in message
    inner = nn.Sequential(nn.DataParallel(nn.Linear(3, 2)))
    assert OWN_LOOP in error_of(tmp_path, model=inner)


def test_a_scaler_among_the_extras_is_refused(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert "extra 'scaler': GradScaler is invalid" in error_of(tmp_path, extra={"scaler": scaler})
    assert "extra 'best': a float is invalid" in error_of(tmp_path, extra={"best": 1.0})


def test_no_loss_function_is_refused(tmp_path: Path) -> None:
    assert "loss_fn: None is invalid" in error_of(tmp_path, loss_fn=None)


@pytest.mark.parametrize(
    ("sample", "value"),
    [
        ({"words": torch.zeros(3), "label": 0}, "samples of a dict"),
        ((torch.zeros(3), torch.zeros(3), 0), "samples of 3 values"),
        (torch.zeros(3), "samples of Tensor"),
    ],
)
def test_samples_that_are_no_pairs_are_refused_at_the_first_batch(
    tmp_path: Path, sample: Any, value: str
) -> None:
    job = start(tmp_path, dataset=Samples(sample))
    with pytest.raises(UnsupportedTrainingError, match=f"init: dataset: {value} is invalid"):
        job.step(next(iter(job)))


@pytest.mark.parametrize(("kind", "name"), [("dict", "a dict"), ("tuple", "a tuple")])
def test_a_model_that_returns_its_loss_is_refused_at_the_first_batch(
    tmp_path: Path, kind: str, name: str
) -> None:
    job = start(tmp_path, model=ReturnsItsLoss(kind))
    with pytest.raises(UnsupportedTrainingError, match=f"model: its output, {name}, is invalid"):
        job.step(next(iter(job)))


def test_an_error_of_the_scripts_own_loss_function_stays_as_it_is(tmp_path: Path) -> None:
    def faulty(_output: Any, _target: Any) -> torch.Tensor:
        raise TypeError("a mistake of the script")

    job = start(tmp_path, loss_fn=faulty)
    with pytest.raises(TypeError, match="a mistake of the script"):
        job.step(next(iter(job)))


@pytest.mark.parametrize(
    ("make", "seems_per_epoch"),
    [
        (lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1), True),
        (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=14), True),
        (lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [5, 10]), True),
        (lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [500, 1000]), False),
        (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=14 * 938), False),
        (lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda _: 1.0), False),
    ],
)
def test_a_schedule_that_seems_meant_per_epoch_is_logged(make: Any, seems_per_epoch: bool) -> None:
    scheduler = make(sgd(nn.Linear(1, 1)))
    line = epoch_schedule_warning(scheduler, epochs=14, steps_per_epoch=938)
    assert bool(line) == seems_per_epoch
    assert ("938 times per epoch" in line) == seems_per_epoch
    assert not epoch_schedule_warning(scheduler, epochs=14, steps_per_epoch=1)


def test_a_user_sees_one_line(tmp_path: Path) -> None:
    script = f"""
from slurm_elastic.training import init
import torch
model = torch.nn.Linear(3, 2)
init(model, torch.nn.CrossEntropyLoss(), [torch.optim.SGD(model.parameters())], [0],
     global_batch=4, epochs=1, checkpoint_dir={str(tmp_path / "ckpt")!r})
"""
    done = run_forked(script, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout) == (1, "")
    wrong = "slurm-elastic: init: optimizer: a list of 1 is invalid: expected one; for several"
    assert done.stderr.splitlines() == [f"{wrong} {OWN_LOOP}"]
