#!/usr/bin/env python3
"""A training that exchanges and reads a megabyte in a step, of 0.1 s at least.

    exchanging.py OUT

Writes OUT/steps, a line with the time (epoch s) for each step of rank 0.
"""

# Before torch: the library starts torch faster than torch does.
from slurm_elastic.training import init  # isort: skip

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

STEP_S = 0.1
#: 4 bytes each: a megabyte of gradients.
WIDTH = 512
READ_BYTES = 1 << 20


class Wide(nn.Module):
    """A layer that reads a file from storage, past the page cache."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        file.write_bytes(os.urandom(READ_BYTES))
        self._file = os.open(file, os.O_RDONLY)
        os.fsync(self._file)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer."""
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.pread(self._file, READ_BYTES, 0)
        time.sleep(STEP_S)
        return self.inner(points)


def main() -> None:
    """Train until the job is cancelled."""
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    model = Wide(Path(f"/tmp/exchanging-{os.environ.get('SLURM_JOB_ID')}"))
    points = torch.randn(4096, WIDTH)
    job = init(
        model,
        nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=0.001),
        TensorDataset(points, points),
        global_batch=2,
        epochs=10**6,
        checkpoint_dir=out / "checkpoints",
        application="exchanging",
    )
    with (out / "steps").open("a", buffering=1) as steps:
        for batch in job:
            job.step(batch)
            if job.rank == 0:
                steps.write(f"{time.time():.3f}\n")


if __name__ == "__main__":
    main()
