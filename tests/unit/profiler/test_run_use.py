"""What the ranks of a profiling run use, and when."""

import os
import subprocess
import sys
import time

import pytest

from slurm_elastic.job.slurm_env import STEP_VARIABLE
from slurm_elastic.profiler.profile_file import ProfiledUse
from slurm_elastic.profiler.run_use import LocalUse, UseSample, mean_use


def sample(begin, cpus, gpu=None):
    return UseSample(begin, begin + 1.0, ProfiledUse(busy_cpus=cpus, gpu_busy=gpu))


def test_the_mean_is_that_of_the_samples_within_the_steps():
    samples = [sample(10, 9.0), sample(11, 2.0, 0.5), sample(12, 4.0), sample(13, 9.0, 1.0)]
    use = mean_use(samples, 11.0, 13.0)
    assert (use.busy_cpus, use.gpu_busy, use.read_bytes_s) == (3.0, 0.5, None)
    # Of the last one a quarter only lies within, of the first one half.
    assert mean_use(samples, 10.5, 13.25).busy_cpus == pytest.approx((4.5 + 2 + 4) / 2.5)
    assert mean_use(samples, 11.2, 11.4) == ProfiledUse()
    assert mean_use([], 0.0, 1.0) == ProfiledUse()


def test_busy_ranks_are_seen_while_they_run(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    mark = f"profile-{os.getpid()}"
    with subprocess.Popen(
        ["sh", "-c", '"$0" -c "while True: pass"; true', sys.executable],
        env=os.environ | {STEP_VARIABLE: mark},
        start_new_session=True,
    ) as shell:
        recorder = LocalUse(mark, 2)
        time.sleep(2.5)
        os.killpg(shell.pid, 9)
        shell.wait()
        samples = recorder.stop()
    assert samples
    busy = max(s.use.busy_cpus for s in samples)
    assert 0.0 < busy < 0.75  # one process of two GPUs
    assert all(s.use.gpu_busy is None for s in samples)
