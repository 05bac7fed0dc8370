"""The srun command, and the shell script of each rank."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from slurm_elastic.job import srun
from slurm_elastic.job.environment import joint_shape
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
def test_gpus_of_each_node_are_read_from_the_probe(
    output: str, gpus: tuple[int, ...] | None
) -> None:
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
def test_a_rank_sees_one_gpu_if_asked(visible: dict[str, str], said: str) -> None:
    env = {**environment(gpus="one"), **visible}
    assert rank(2, 0, 2, env, "$CUDA_VISIBLE_DEVICES $ROCR_VISIBLE_DEVICES") == said


def test_a_rank_sees_all_gpus_of_its_node() -> None:
    env = {**environment(), "CUDA_VISIBLE_DEVICES": "0,1,2,3", "ROCR_VISIBLE_DEVICES": "0,1,2,3"}
    show = "$LOCAL_RANK $CUDA_VISIBLE_DEVICES $ROCR_VISIBLE_DEVICES $ESRUN_GPUS"
    assert rank(2, 0, 2, env, show) == "2 0,1,2,3 0,1,2,3"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_launcher_does_not_die_of_a_signal_for_its_ranks(ranks: int) -> None:
    """With one rank, too, for which accelerate starts only one process."""
    program = ["env", "accelerate", "launch", "x"]
    command = srun.command(allocation(), (ranks, 0), program, gpus=True)
    script = command[command.index("-c") + 1]
    done = subprocess.run(
        ["sh", "-c", script, "esrun", "env", "sh", "-c", 'kill -USR2 "$$"; echo $RANK alive'],
        env=environment() | dict.fromkeys(("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"), "0"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == ("0 alive" if ranks == 1 else "alive"), done.stderr


#: Variables that `_start_workers` and `start_processes` of torch 2.13 set for a worker.
TORCHRUN = """
RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_RANK LOCAL_WORLD_SIZE WORLD_SIZE GROUP_WORLD_SIZE
ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS
TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE TORCH_NCCL_ASYNC_ERROR_HANDLING
TORCHELASTIC_ERROR_FILE OMP_NUM_THREADS
"""


def test_a_rank_finds_the_variables_of_torchrun() -> None:
    show = " ".join(f"{name}=${name}" for name in TORCHRUN.split())
    env = environment(restarts=3)
    assert dict(item.split("=") for item in rank(5, 1, 1, env, show).split()) == {
        "RANK": "5",
        "ROLE_RANK": "5",
        "WORLD_SIZE": "6",
        "ROLE_WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "g01",
        "MASTER_PORT": "20001",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_MAX_RESTARTS": "1000000",
        "TORCHELASTIC_RUN_ID": "slurm-7",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCHELASTIC_ERROR_FILE": "/tmp/esrun-m.5.error.json",
        "OMP_NUM_THREADS": "1",
    }


def test_settings_of_the_user_are_kept() -> None:
    env = {**environment(), "OMP_NUM_THREADS": "8", "TMPDIR": "/tmp/a b"}
    assert rank(5, 1, 1, env, '$OMP_NUM_THREADS "$TORCHELASTIC_ERROR_FILE"') == (
        "8 /tmp/a b/esrun-m.5.error.json"
    )
    arguments = {"port": 1, "socket": "", "step": "m"}
    user = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    env = srun.step_environment(user, allocation(), (0, 1), **arguments)  # type: ignore[arg-type]
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert env["GROUP_WORLD_SIZE"] == "1", "a node without ranks does not count"
    env |= {"PATH": "/bin:/usr/bin"}
    assert rank(0, 0, 0, env, "threads=$OMP_NUM_THREADS") == "threads=", "as torchrun, for one rank"


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


def test_ranks_of_a_companion_are_started_in_its_job() -> None:
    job = allocation("g03", "6", SLURM_JOB_ID="4712", SLURM_GPUS_ON_NODE="3")
    command = srun.command(job, (3,), ["/bin/train.sh"], gpus=True, companion=True)
    expected = ["--jobid=4712", "--ntasks=3", "--cpus-per-task=2", "--overlap", "--mem=0"]
    assert set(expected) <= set(command)
    env = {
        "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_GPUS": "2", "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_ELASTIC_RUN_ID": "x-7",
        "MASTER_ADDR": "127.0.0.1", "ROLE_NAME": "default", "HOME": "/home/alice",
    }  # fmt: skip
    ranks = srun.companion_environment(
        env, job, master=("g01", 4000), first_rank=2, nodes=2, mark="m"
    )
    assert not {"SLURM_JOB_ID", "SLURM_NTASKS", "SBATCH_GPUS", "CUDA_VISIBLE_DEVICES"} & set(ranks)
    kept = {name: ranks[name] for name in ("SLURM_CONF", "SLURM_ELASTIC_RUN_ID", "HOME")}
    assert kept == {name: env[name] for name in kept}
    task = ranks | {
        "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "3",
        "PATH": "/usr/bin:/bin",
    }  # fmt: skip
    show = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK/$GROUP_WORLD_SIZE"
    show += " $MASTER_ADDR:$MASTER_PORT $SLURM_ELASTIC_JOIN ${ESRUN_WORLD-}"
    script = [*command[command.index("sh") : command.index("esrun") + 1], "sh", "-c", show]
    done = subprocess.run(script, env=task, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3/5", "1/3", "1/2", "g01:4000", "4712"]


def joint_environment(node: int, program: list[str]) -> list[str]:
    """Run the script of the step that begins with a node; return what its second task prints."""
    base = allocation("g[01-02]", "4,2", SLURM_GPUS_ON_NODE="2")
    parts = [
        joint_shape.CompanionPart(
            allocation(name, "6", SLURM_JOB_ID=str(job), SLURM_GPUS_ON_NODE="3"), ranks, "m"
        )
        for job, name, ranks in ((41, "g01", 1), (42, "g03", 3))
    ]
    shape = joint_shape.JointShape.of(base, (2, 1), parts)
    own = base if node == 0 else parts[node - 2].allocation
    tasks = (2, 1) if node == 0 else (parts[node - 2].ranks,)
    command = srun.command(
        own, tasks, program, gpus=True, companion=node > 0, world=(shape.nodes, shape.ranks)
    )
    assert ("--jobid=42" in command) == (node == 3)
    env = srun.step_environment({}, base, (2, 1), port=4000, socket="@s", step="m")
    task = env | shape.variables(base.job_id, node) | {
        "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "42",
        "SLURM_STEP_NUM_TASKS": "3", srun.TASKS_VARIABLE: ",".join(map(str, tasks)),
        "PATH": "/usr/bin:/bin",
    }  # fmt: skip
    script = command[command.index("sh") :]
    done = subprocess.run(script, env=task, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_ranks_of_several_jobs_are_numbered_as_one_world() -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK GROUP_WORLD_SIZE"
    show = " ".join(f"${name}" for name in names.split())
    slurm = " $SLURM_PROCID $SLURM_NTASKS $SLURM_NODEID $SLURM_NNODES $SLURM_JOB_ID"
    slurm += " $SLURM_JOB_NODELIST $SLURM_TASKS_PER_NODE ${ESRUN_JOB-} ${ESRUN_WORLD-}"
    program = ["sh", "-c", f"echo {show}{slurm}"]
    common = ["7", "g01,g02,g03", "2,1,1,3"]
    assert joint_environment(0, program) == [*"1702004", *"1704", *common]
    assert joint_environment(3, program) == [*"5703334", *"5734", *common]


def test_a_launcher_is_told_the_nodes_of_all_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(srun, "without_libuv", lambda: False)
    launcher = tmp_path / "torchrun"
    launcher.write_text('#!/bin/sh\n[ -z "$RANK" ] && echo "$@"\n')
    launcher.chmod(0o755)
    words = joint_environment(3, [str(launcher), "--nproc_per_node=8", "train.py"])
    assert words[-1] == "train.py"
    assert {"--nnodes=4", "--nproc_per_node=3", "--node_rank=3"} <= set(words)


def test_a_step_in_a_job_with_shards_asks_for_no_gpu() -> None:
    shards = allocation("g01", "1", SLURM_GPUS_ON_NODE="1", SLURM_SHARDS_ON_NODE="2")
    assert shards.gpus == (1,)
    assert not [word for word in options(shards, [1]) if "gpu" in word]
