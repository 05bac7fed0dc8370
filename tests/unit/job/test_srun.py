"""The srun command, and the shell script of each rank."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from slurm_elastic.job import srun
from slurm_elastic.job.slurm_env import SlurmAllocation


def allocation(nodes: str = "g[01-02]", cpus: str = "4(x2)", **env: str) -> SlurmAllocation:
    return SlurmAllocation(
        {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": nodes,
            "SLURM_JOB_CPUS_PER_NODE": cpus,
            "SLURM_GPUS_ON_NODE": "2",
            "SLURMD_NODENAME": "g01",
            **env,
        }
    )


def options(job: SlurmAllocation, tasks: Sequence[int], **more: object) -> list[str]:
    command = srun.command(job, tasks, ["/bin/train.sh", "x"], **{"gpus": True, **more})  # type: ignore[arg-type]
    end = command.index("sh")
    assert command[end:] == ["sh", "-c", srun.RANK_SCRIPT, "esrun", "/bin/train.sh", "x"]
    return command[:end]


def test_an_even_world() -> None:
    command = options(allocation(), (2, 2))
    expected = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=2"]
    expected += ["--gpus-per-task=1", "--gpu-bind=none", "--overlap", "--kill-on-bad-exit=1"]
    assert set(expected) <= set(command)
    assert "--job-name=train.sh" in command
    assert "--overcommit" not in command


def test_an_uneven_world_is_laid_out_by_name() -> None:
    command = options(allocation(cpus="4,2"), (4, 2))
    assert "--distribution=arbitrary" in command
    assert "--nodelist=g01,g01,g01,g01,g02,g02" in command
    assert "--cpus-per-task=1" in command
    assert not any(word.startswith(("--nodes", "--ntasks-per-node")) for word in command)


def test_a_node_without_gpus_is_left_out() -> None:
    assert "--nodelist=g02,g02" in options(allocation(), (0, 2))


def test_fewer_cpus_than_ranks() -> None:
    command = options(allocation(cpus="1(x2)"), (2, 2))
    assert "--overcommit" in command
    assert not any(word.startswith("--cpus") for word in command)


def test_the_users_options_come_last() -> None:
    assert (
        options(allocation(), (1, 1), user_options=["--cpus-per-task=1"])[-1] == "--cpus-per-task=1"
    )


def test_without_gpus() -> None:
    assert not any("gpu" in word for word in options(allocation(), (1, 1), gpus=False))


def test_tasks_follow_gpus_and_else_what_was_asked() -> None:
    assert srun.tasks_per_node(allocation(), (4, 2)) == (4, 2)
    assert srun.tasks_per_node(allocation(SLURM_NTASKS="3"), (0, 0)) == (2, 1)
    assert srun.tasks_per_node(allocation(), (0, 0)) == (1, 1)


@pytest.mark.parametrize(
    ("output", "gpus"),
    [
        ("0 0,1,2,3\n1 0,1\n", (4, 2)),
        ("1 0\n0 \n", (0, 1)),
        ("0 0,1\n", None),
        ("srun: error: no\n", None),
        ("", None),
    ],
)
def test_probed(output: str, gpus: tuple[int, ...] | None) -> None:
    assert srun.probed(output, 2) == gpus


def test_the_probe_takes_the_tasks_of_a_job_with_gpus_per_task() -> None:
    job = allocation(SLURM_NTASKS="4")
    assert "--ntasks=2" in srun.probe_command(job, {})
    command = srun.probe_command(job, {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"})
    assert "--ntasks=4" in command
    assert "--ntasks=2" in srun.probe_command(job, {"SLURM_TRES_PER_TASK": "cpu=4"})


def environment(**more: object) -> dict[str, str]:
    arguments = {"port": 20001, "socket": "@s", "step": "m", **more}
    return srun.step_environment(
        {"PATH": "/bin:/usr/bin"},
        allocation(),
        (4, 2),
        **arguments,  # type: ignore[arg-type]
    )


def rank(number: int, node: int, local: int, env: dict[str, str], show: str) -> str:
    slurm = {"SLURM_PROCID": number, "SLURM_NODEID": node, "SLURM_LOCALID": local}
    process = subprocess.run(
        ["sh", "-c", srun.RANK_SCRIPT, "esrun", "sh", "-c", f"echo {show}"],
        env={**env, **{k: str(v) for k, v in slurm.items()}, "SLURM_STEP_NUM_TASKS": "6"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not process.stderr
    return process.stdout.strip()


@pytest.mark.parametrize(
    ("number", "node", "local", "said"),
    [
        (0, 0, 0, "0/6 0/4 0"),
        (3, 0, 3, "3/6 3/4 0"),
        (4, 1, 0, "4/6 0/2 1"),
        (5, 1, 1, "5/6 1/2 1"),
    ],
)
def test_a_rank_knows_its_place(number: int, node: int, local: int, said: str) -> None:
    show = "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK $ESRUN_TASKS"
    assert rank(number, node, local, environment(), show) == said


@pytest.mark.parametrize(
    ("visible", "said"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "ROCR_VISIBLE_DEVICES": "0,1,2,3"}, "2 0,1,2,3"),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6"}, "6"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, "GPU-c"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "0"),
        ({}, ""),
    ],
)
def test_a_rank_sees_one_gpu(visible: dict[str, str], said: str) -> None:
    env = {**environment(), **visible}
    assert rank(2, 0, 2, env, "$CUDA_VISIBLE_DEVICES $ROCR_VISIBLE_DEVICES") == said


def test_what_every_rank_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(srun, "without_libuv", lambda: True)
    env = environment()
    assert env["MASTER_ADDR"] == "g01"
    assert env["MASTER_PORT"] == "20001"
    assert env["USE_LIBUV"] == "0"
    assert env["SLURM_ELASTIC_RUN_ID"] == "slurm-7"
    assert env["SLURM_ELASTIC_SOCKET"] == "@s"
    arguments = {"port": 1, "socket": "", "step": ""}
    env = srun.step_environment({"USE_LIBUV": "1"}, allocation(), (2, 0), **arguments)  # type: ignore[arg-type]
    assert env["USE_LIBUV"] == "1"
    assert env["MASTER_ADDR"] == "127.0.0.1"
    env = srun.step_environment({}, allocation(), (0, 2), **arguments)  # type: ignore[arg-type]
    assert env["MASTER_ADDR"] == "g02"


def test_helpers_run_beside_the_step() -> None:
    command = srun.helper_command(["g01", "g02"], "x", "KILL", "m")
    assert {"--nodelist=g01,g02", "--ntasks=2", "--overlap", "--gres=none"} <= set(command)
    assert command[-6:] == ["sh", "-c", "x", "esrun", "KILL", "m"]


@pytest.mark.parametrize(
    ("signals", "calls"), [("TERM", ""), ("USR2 TERM", "KILL m.1"), ("USR2 USR1", ""), ("USR1", "")]
)
def test_a_guard_acts_at_sigterm_once_armed(signals: str, calls: str) -> None:
    script = srun.GUARD_SCRIPT.replace("armed=\n", 'signal_tasks() { echo "$@"; }\narmed=\n', 1)
    with subprocess.Popen(
        ["sh", "-c", script, "esrun", "KILL", "m.1"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as guard:
        assert guard.stdout is not None
        assert guard.stdout.readline() == "ready\n"
        for name in signals.split():
            subprocess.run(["kill", "-s", name, "--", f"-{guard.pid}"], check=True)
            time.sleep(0.2)
        assert guard.stdout.read().strip() == calls
        assert guard.wait() == 0


def test_signals_find_a_task_and_spare_its_children() -> None:
    """Run the signal script under a parent whose name begins with slurmstepd."""
    program = (
        "import os, signal, sys, time\n"
        "open('/proc/self/comm', 'w').write('slurmstepd')\n"
        "task = os.fork()\n"
        "if task == 0:\n"
        "    os.environ['x'] = 'y'\n"
        "    os.execve('/bin/sh', ['sh', '-c', 'sleep 60 & wait'], {'SLURM_ELASTIC_STEP': 'm.1'})\n"
        "print(task, flush=True)\n"
        "print(os.waitpid(task, 0)[1], flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as stepd:
        assert stepd.stdout is not None
        task = int(stepd.stdout.readline())
        children = Path(f"/proc/{task}/task/{task}/children")
        while not (child := children.read_text().strip()):
            time.sleep(0.01)
        script = ["sh", "-c", srun.SIGNAL_SCRIPT, "esrun"]
        try:
            assert subprocess.run([*script, "USR1", "m.2"], check=False).returncode == 1
            assert subprocess.run([*script, "USR1", "m.1"], check=False).returncode == 0
            assert int(stepd.stdout.readline()) == 10
            subprocess.run(["kill", "-0", child], check=True)
        finally:
            subprocess.run(["kill", child], check=False)
            stepd.kill()
