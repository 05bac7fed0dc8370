#!/usr/bin/env python3
"""Runs the example of its own name, no faster than so many seconds a step.

Copied under an example's name: real computing on a test machine takes anything between a moment
and too long, and a training that shall be resized has to last until then.
"""

import os
import runpy
import sys
import time
from pathlib import Path

real = Path(os.environ["REAL_EXAMPLES"], Path(__file__).name)
if "slurm_elastic" in real.read_text():
    # Before torch, as in the example.
    import slurm_elastic.training  # noqa: F401

from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

register_optimizer_step_post_hook(lambda *_: time.sleep(float(os.environ["STEP_S"])))
sys.path.insert(0, str(real.parent))
runpy.run_path(str(real), run_name="__main__")
