"""Uncaught errors of the library are shown as one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.trainings.forked_scripts import run_forked

SCRIPT = """
from slurm_elastic.training import init
import sys, torch
width = int(sys.argv[1])
layers = [("front", torch.nn.Linear(4, width)), ("back", torch.nn.Linear(8, 2))]
points = torch.randn(8, 4)
job = init(layers, torch.nn.CrossEntropyLoss(), lambda p: torch.optim.SGD(p, lr=0.1),
           torch.utils.data.TensorDataset(points, points.argmax(dim=1) % 2), global_batch=4,
           epochs=1, checkpoint_dir="ckpt", schedule=sys.argv[2])
for batch in job:
    job.step(batch)
job.finish()
"""


def run(where: Path, *words: str, forked: bool = True, **environment: str) -> str:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])} | environment
    if forked:
        done = run_forked(SCRIPT, *words, cwd=where, env=env)
    else:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *words],
            cwd=where,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1, done.stderr
    return done.stderr


def test_an_error_of_the_library_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    assert run(tmp_path, "8", "2f2b", forked=False) == (
        "slurm-elastic: schedule: '2f2b' is invalid: expected one of gpipe, 1f1b, pipedream\n"
    )
    stderr = run(tmp_path, "6", "pipedream")
    assert stderr.startswith(
        "slurm-elastic: layer back does not accept the output of layer front: mat1"
    )
    assert stderr.count("\n") == 1
    assert "Traceback" in run(tmp_path, "8", "2f2b", SLURM_ELASTIC_TRACEBACK="1")
    assert not (tmp_path / "ckpt").exists()


def test_an_error_of_torch_keeps_its_traceback(tmp_path: Path) -> None:
    assert "Traceback" in run(tmp_path, "6", "1f1b")  # torch itself, in a whole model
