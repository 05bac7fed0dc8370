"""The task of the recorded trainings: data, network, optimizer and schedule."""

from collections.abc import Iterable

import torch
from torch import nn

#: Length of the schedule: 4 epochs of 192 samples, 32 samples per step.
SCHEDULE_STEPS = 24


class RegressionSamples(torch.utils.data.Dataset):
    """Points, the values of a smooth function there, and the number of each."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = self.x.sum(1).tanh()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> dict:
        return {"x": self.x[at], "y": self.y[at], "number": torch.tensor(at)}


def regression_network() -> nn.Module:
    """Return an untrained network for the samples."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def optimizer_and_schedule(parameters: Iterable[nn.Parameter]) -> tuple:
    """Return an optimizer, and a schedule that changes its rate in each step."""
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SCHEDULE_STEPS)
