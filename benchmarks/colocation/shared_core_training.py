#!/usr/bin/env python3
"""A training of one of two kinds, for `shared_cores`; it runs until it is cancelled.

    shared_core_training.py OUT KIND

A step takes as long alone in both: `computing` keeps a core busy, `loading` mostly waits for its
data. OUT has one line per finished step: the time (epoch s).
"""

# Before torch: the library starts torch faster than torch does.
from slurm_elastic.training import init  # isort: skip

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

STEP_S = 0.1
#: Part of a step in which the core computes.
COMPUTED = {"computing": 1.0, "loading": 0.2}


class Work(nn.Module):  # type: ignore[misc, unused-ignore]
    """A layer whose forward pass waits, and then computes, for the time of a step.

    Args:
        computed: part of the step in which it computes.
    """

    def __init__(self, computed: float) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self._computed = computed
        self._numbers = torch.ones(64, 64)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer."""
        time.sleep((1 - self._computed) * STEP_S)
        end = time.thread_time() + self._computed * STEP_S
        while time.thread_time() < end:
            torch.mm(self._numbers, self._numbers)
        return self.inner(points)


def main() -> None:
    """Train."""
    out, kind = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Work(COMPUTED[kind])
    points = torch.randn(32, 8)
    job = init(
        model,
        nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=0.01),
        TensorDataset(points, points),
        global_batch=8,
        epochs=10**6,
        checkpoint_dir=out.with_suffix(".checkpoints"),
        application=kind,
    )
    with out.open("a", buffering=1) as steps:
        for batch in job:
            job.step(batch)
            steps.write(f"{time.time():.3f}\n")


if __name__ == "__main__":
    main()
