#!/usr/bin/env python3
"""docs/examples/train_library.py with a bug: its second epoch skips one sample and repeats another.

The demo's `--break skip-sample` runs it in place of the example, to show that the verdict notices.
"""

import os
import runpy
import sys

# Before torch, as in the example.
from slurm_elastic.training.sampler import Sampler  # isort: skip

import torch

LOST, TWICE = 17, 18
_order = Sampler.order


def order(self: Sampler, epoch: int) -> torch.Tensor:
    """Return the epoch's order, with the bug."""
    samples = _order(self, epoch)
    if epoch == 1:
        samples[samples == LOST] = TWICE
    return samples


Sampler.order = order  # type: ignore[method-assign]
real = os.environ["REAL_EXAMPLES"]
sys.path.insert(0, real)
runpy.run_path(f"{real}/train_library.py", run_name="__main__")
