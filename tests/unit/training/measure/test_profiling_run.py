"""Profiling runs: samples and times of each block, with a simulated clock."""

import json
from dataclasses import replace

import pytest
import torch

from slurm_elastic.job import page_cache
from slurm_elastic.job.profile_request import ProfileRequest
from slurm_elastic.training.loader import Loader
from slurm_elastic.training.measure import profiling_run
from slurm_elastic.training.sampler import EvenSplit, Sampler
from tests.support.trainings.forked_scripts import run_forked

COMPUTE, PREP, COLD = 1.0, 0.25, 0.5


class SingleRankGroup:
    rank, size = 0, 1

    def barrier(self, key, timeout_s):
        pass


class SimulatedStorage:
    """Data set with a simulated clock: preparing a sample takes `PREP`, a cold read `COLD`."""

    def __init__(self, samples=64):
        self.now, self.samples = 0.0, samples
        self.cached, self.taken = set(), []

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        self.taken.append(index)
        self.now += PREP + (0.0 if index in self.cached else COLD)
        self.cached.add(index)
        return torch.zeros(2), torch.tensor(0)

    def clock(self):
        return self.now


@pytest.fixture
def storage(monkeypatch):
    found = SimulatedStorage()
    monkeypatch.setattr(page_cache, "drop", lambda paths: found.cached.clear())
    return found


def measure(storage, tmp_path, *blocks, steps=3, warm_up=1, batch=4):
    """Return the seconds of each step by block; each step computes for `COMPUTE`."""
    asked = ProfileRequest(
        result=tmp_path / "answer.json", blocks=blocks, steps=steps, warm_up=warm_up, data=("/d",)
    )
    run = profiling_run.ProfilingRun(
        asked,
        sampler=Sampler(samples=len(storage), global_batch=batch, epochs=1, seed=0),
        loader=Loader(dataset=storage, workers=0, collate=None, pin=False, seed=0),
        rank_group=SingleRankGroup(),
        facts={},
        clock=storage.clock,
    )
    for _ in run.batches(EvenSplit(rank=0, world_size=1)):
        storage.now += COMPUTE
    return {row["block"]: row["seconds"] for row in run._done}


def test_each_block_measures_its_own_delays(storage, tmp_path):
    found = measure(storage, tmp_path, "synthetic", "cold", "warm")
    assert found["synthetic"] == [COMPUTE] * 3
    assert found["cold"] == [COMPUTE + 4 * (PREP + COLD)] * 3
    assert found["warm"] == [COMPUTE + 4 * PREP] * 3


def test_synthetic_data_repeat_the_first_batch(storage, tmp_path):
    measure(storage, tmp_path, "synthetic", steps=5)
    assert len(storage.taken) == 4


def test_warm_data_are_read_once_before_a_warm_block(storage, tmp_path):
    assert measure(storage, tmp_path, "warm")["warm"] == [COMPUTE + 4 * PREP] * 3


def test_blocks_take_the_same_samples(storage, tmp_path):
    measure(storage, tmp_path, "cold", "warm")
    half = len(storage.taken) // 2
    assert half == 4 * 4
    assert storage.taken[:half] == storage.taken[half:]


def test_a_small_dataset_is_repeated_and_a_warning_is_logged(storage, tmp_path, capsys):
    storage.samples = 9  # two full steps
    found = measure(storage, tmp_path, "cold", steps=4, warm_up=0)
    assert found["cold"][2] == COMPUTE + 4 * PREP
    assert "has 2 steps, 4 are run" in capsys.readouterr().err


def test_without_warm_up_the_first_step_counts(storage, tmp_path):
    assert len(measure(storage, tmp_path, "synthetic", steps=2, warm_up=0)["synthetic"]) == 2


def test_the_samples_per_gpu_are_those_of_the_largest_shape(monkeypatch, tmp_path):
    asked = ProfileRequest(result=tmp_path / "a", blocks=("warm",), gpus=4)
    for world, expected in ((1, 16), (2, 32), (4, 64)):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        assert profiling_run.global_batch(asked, 64, samples=1000) == expected
    assert profiling_run.global_batch(replace(asked, batch=5), 64, samples=1000) == 20
    with pytest.raises(ValueError, match="give a smaller --batch"):
        profiling_run.global_batch(asked, 64, samples=63)


SCRIPT = """
import sys, torch
from slurm_elastic.training import init
torch.set_num_threads(1)
model = torch.nn.Linear(2, 2)
data = [(torch.ones(2), torch.tensor(0)) for _ in range(32)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
job = init(model, torch.nn.CrossEntropyLoss(), optimizer, data, global_batch=8, epochs=1,
           checkpoint_dir=sys.argv[1], scheduler=schedule, checkpoint_every_s=0)
print("resumed from", job.resumed_from)
for batch in job:
    job.step(batch)
job.finish()
print("finished")
"""


def test_a_profiled_script_exits_in_its_loop_without_checkpoints(tmp_path):
    script, kept = tmp_path / "train.py", tmp_path / "checkpoints"
    script.write_text(SCRIPT)
    assert run_forked(script, str(kept)).returncode == 0
    before = {p: p.stat().st_mtime_ns for p in kept.rglob("*")}
    assert before
    asked = ProfileRequest(
        result=tmp_path / "a.json", blocks=("synthetic", "warm"), steps=6, warm_up=1
    )
    done = run_forked(script, str(kept), env=asked.environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "resumed from None\n"
    assert {p: p.stat().st_mtime_ns for p in kept.rglob("*")} == before
    found = json.loads(asked.result.read_text())
    assert [(r["block"], len(r["seconds"])) for r in found["blocks"]] == [
        ("synthetic", 6), ("warm", 6),
    ]  # fmt: skip
    assert found["facts"] == {
        "application": "", "model": "Linear", "batch": 8, "samples": 32, "layers": 1,
        "gradient_bytes": 24,
    }  # fmt: skip
