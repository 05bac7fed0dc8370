"""An emulated step shortens with the frozen prefix as the layer profile predicts."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slurm_elastic.core.application import LayerCost, Prefixes
from slurm_elastic.models.effective_progress import part
from tests.support.trainings.forked_scripts import run_forked

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
sys.path.insert(0, str(EXAMPLES))

import emulate  # noqa: E402

pytestmark = pytest.mark.torch
LAYERS = 4


class Clock:
    """Simulated clock that advances only by `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def take(self) -> float:
        """Return the seconds since the last call."""
        passed, self.now = self.now, 0.0
        return passed


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = Clock()
    monkeypatch.setattr(
        emulate, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep)
    )
    monkeypatch.setattr(torch.distributed, "all_reduce", torch.distributed.all_reduce)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(LAYERS))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    device = emulate.Device("v100", samples_per_s=100.0, communication_s=0.5)
    device.attach(model, optimizer)

    def step() -> tuple[float, float]:
        """Return the seconds of computing and of communication of 10 samples."""
        model(torch.ones(10, 8)).sum().backward()
        compute = clock.take()
        optimizer.step()
        return compute, clock.take()

    def freeze(layers: int) -> None:
        for i, layer in enumerate(model):
            for parameter in layer.parameters():
                parameter.requires_grad_(i >= layers)
                parameter.grad = None

    return SimpleNamespace(step=step, freeze=freeze, size=8 * 8 + 8)


def test_a_step_shortens_with_the_frozen_prefix_and_grows_back(training: SimpleNamespace) -> None:
    prefixes = Prefixes(
        layers=LAYERS,
        certified=LAYERS - 1,
        max_penalty=1.0,
        costs=(LayerCost(1.0, 2.0, 4.0 * training.size),) * LAYERS,
    )
    for frozen in (0, 1, 3, 2, 0):
        training.freeze(frozen)
        left = part(prefixes, frozen)
        compute, communication = training.step()
        assert compute == pytest.approx(0.1 * left.compute)
        assert communication == pytest.approx(0.5 * left.network)


def test_the_example_freezes_only_its_settled_layers(tmp_path: Path) -> None:
    env = {"OMP_NUM_THREADS": "1", "EMULATED_DEVICES": "/absent"}
    done = run_forked(
        EXAMPLES / "train_library.py", "--out", str(tmp_path), "--settled", "4",
        "--samples", "2048", "--epochs", "4",
        env=os.environ | env | {"SLURM_ELASTIC": "1,freeze=auto,max-penalty=2%"},
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "4 of 7 layers frozen, up to 3" in done.stdout + done.stderr
    assert "5 of 7" not in done.stdout + done.stderr
