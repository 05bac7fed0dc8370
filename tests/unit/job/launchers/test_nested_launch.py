"""Launchers that each rank starts itself are noticed; those of a single rank are not."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_elastic.job.launchers.nested_launch import (
    RankProcess,
    nested_launcher,
    ranks_only,
    step_processes,
)
from tests.support.patience import PATIENCE_S

ESRUN = Path(__file__).resolve().parents[4] / "wrappers" / "esrun"
#: Chains of processes from a task downwards.
TORCHRUN = ("bash run.sh", "python3 /usr/bin/torchrun --nproc_per_node=4 t.py")
PYTHON = ("python launch.py", "python -m torch.distributed.run t.py")
TRAINING = ("bash run.sh", "python train.py --launcher torchrun", "python train.py")
ACCELERATE = ("python /opt/bin/accelerate launch --num_processes=1 t.py", "python t.py")


def tree(*chains: tuple[str, ...], last_run_id: str = "job") -> dict[int, RankProcess]:
    processes = {}
    pid = 100
    for chain in chains:
        parent = 1
        for command in chain:
            run_id = last_run_id if command == chain[-1] else "job"
            processes[pid] = RankProcess(parent, tuple(command.split()), run_id)
            parent, pid = pid, pid + 1
    return processes


@pytest.mark.parametrize(
    ("chains", "name"),
    [
        ([TORCHRUN, TORCHRUN], "torchrun"),
        ([TORCHRUN], "torchrun"),
        ([PYTHON, PYTHON], "torchrun"),
        ([PYTHON], None),
        ([PYTHON, TRAINING], None),
        ([TRAINING, TRAINING], None),
        ([ACCELERATE, ACCELERATE], None),
        ([("bash run.sh", "srun hostname")], None),
        ([("make train", "sh -c x", "deepspeed t.py")], "deepspeed"),
        ([], None),
    ],
)
def test_launchers_below_all_tasks(chains: list[tuple[str, ...]], name: str | None) -> None:
    assert nested_launcher(tree(*chains), run_id="job") == name


def test_the_srun_of_esrun_is_no_launcher_of_the_ranks() -> None:
    """It ends a moment after them."""
    srun = ("srun", "--ntasks=4", "sh", "-c", "x", "esrun", "python", "t.py")
    own = {70: RankProcess(50, srun, "job"), 71: RankProcess(70, srun, "job")}
    assert ranks_only(own, 50) == {}
    rank = RankProcess(80, ("python", "t.py"), "job")
    assert ranks_only({**own, 81: rank}, 50) == {81: rank}
    below = {70: own[70], 90: RankProcess(70, ("sh", "-c", "srun t"), "job")}
    assert list(ranks_only(below, 50)) == [90]


def test_ranks_of_a_launcher_that_was_not_recognised() -> None:
    chain = ("python own.py", "python t.py")
    assert nested_launcher(tree(chain, chain, last_run_id="none"), run_id="job") == "torchrun"
    assert nested_launcher(tree(ACCELERATE, last_run_id="none"), run_id="job") == "torchrun"
    assert nested_launcher(tree(chain, last_run_id="none"), run_id="job") is None


def test_the_processes_of_a_step() -> None:
    mark = f"nested.{os.getpid()}"
    env = {**os.environ, "SLURM_ELASTIC_STEP": mark, "TORCHELASTIC_RUN_ID": "r"}
    with subprocess.Popen(["sh", "-c", "sleep 60; true"], env=env) as shell:
        try:
            while len(processes := step_processes(mark)) < 2:
                time.sleep(0.01)
            assert processes[shell.pid] == RankProcess(
                os.getpid(), ("sh", "-c", "sleep 60; true"), "r"
            )
            assert shell.pid in {process.parent for process in processes.values()}
        finally:
            for pid in step_processes(mark):
                os.kill(pid, 9)
    assert step_processes(f"{mark}.other") == {}


#: srun that runs both ranks of a job, and kills them at SIGTERM.
FAKE_SRUN = """#!/bin/sh
while [ "$1" != sh ]; do shift; done
export SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=2
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & second=$!
trap 'kill -KILL $first $second' TERM
wait $first; wait $second
"""


def job(tmp_path: Path, program: str) -> dict[str, str]:
    """Return the environment of a job with two ranks, whose run.sh starts a program."""
    tools = tmp_path / "bin"
    tools.mkdir()
    seconds = 30 if program == "torchrun" else 4
    sleep = f"import time\ntime.sleep({seconds})\n"
    for name, text in (
        ("srun", FAKE_SRUN),
        ("torchrun", f"#!{sys.executable}\n{sleep}"),
        ("train", f"#!{sys.executable}\n{sleep}"),
        ("run.sh", f"#!/bin/bash\n{program} train.py; exit 0\n"),
    ):
        (tools / name).write_text(text)
        (tools / name).chmod(stat.S_IRWXU)
    return {
        "PATH": f"{tools}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "g01",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURMD_NODENAME": "g01",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }


@pytest.mark.parametrize("program", ["torchrun", "train", "itself"])
def test_a_program_that_starts_a_launcher_in_each_rank_is_ended(
    tmp_path: Path, program: str
) -> None:
    env = job(tmp_path, program)
    log = tmp_path / "log"
    started = ["torchrun", "t.py"] if program == "itself" else ["run.sh"]
    with log.open("w") as errors:  # not a pipe, which programs that this srun leaves would hold
        process = subprocess.run(
            [str(ESRUN), *started], env=env, stderr=errors, check=False, timeout=60
        )
    lines = log.read_text().splitlines()
    if program != "torchrun":
        assert (process.returncode, len(lines)) == (0, 1), lines
        return
    assert process.returncode == 2, lines
    assert (
        "esrun: the program starts torchrun in each rank, so 2 trainings would run side by side;"
        " write esrun before torchrun there, and start the program without esrun"
    ) in lines


def test_a_launcher_that_shows_only_after_a_change_does_not_end_the_job(tmp_path: Path) -> None:
    """On one GPU nothing was wrong with it."""
    env = job(tmp_path, "torchrun")
    marker = tmp_path / ".slurm-elastic" / f"slurm-{env['SLURM_JOB_ID']}.trained"
    marker.parent.mkdir()
    marker.touch()
    env |= {"SLURM_RESTART_COUNT": "1", "SLURM_ELASTIC_CONTROLLER": "127.0.0.1:9"}
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen([str(ESRUN), "run.sh"], env=env, stderr=errors)
    try:
        end = time.monotonic() + PATIENCE_S
        while "waiting for the controller" not in log.read_text():
            assert time.monotonic() < end, log.read_text()
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 2
