# ruff: noqa: E501 - tables of command lines
"""Launchers: which command lines contain one, and what is started in its place."""

import shlex
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.job import launch, srun
from slurm_elastic.job.esrun_options import parse
from slurm_elastic.job.launchers import adaptation
from slurm_elastic.job.launchers.adaptation import LauncherError, WorldShape, adapt
from slurm_elastic.job.launchers.launcher_site import recognise
from slurm_elastic.job.slurm_env import STEP_VARIABLE, SlurmAllocation
from tests.support.needs import require

TORCHRUN = [
    *("--nnodes=2", "--nproc_per_node=$ESRUN_LOCAL_RANKS", "--node_rank=$ESRUN_NODE_RANK"),
    *("--rdzv_backend=static", "--rdzv_id=$SLURM_ELASTIC_RUN_ID"),
    *("--master_addr=$MASTER_ADDR", "--master_port=$MASTER_PORT"),
]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchrun train.py", "torchrun @ train.py"),
        ("/opt/x/bin/torchrun --standalone train.py", "/opt/x/bin/torchrun @ train.py"),
        ("torchrun --nnodes 1:4 --nproc-per-node gpu t.py --nnodes 9", "torchrun @ t.py --nnodes 9"),
        ("torchrun --nproc=4 --rdzv_end=h:1 --max_restarts=3 t.py", "torchrun @ --max_restarts=3 t.py"),
        ("torchrun -r 3 --rdzv-conf timeout=9 -m a.b", "torchrun @ -r 3 --rdzv-conf timeout=9 -m a.b"),
        ("torchrun --no-python --master-port 1 ./binary", "torchrun @ --no-python ./binary"),
        ("python3 -um torch.distributed.run --node_rank 1 t", "python3 -um torch.distributed.run @ t"),
        ("python -m torch.distributed.launch --use_env t", "python -m torch.distributed.launch @ --use_env t"),
        ("python -X dev /usr/bin/torchrun t.py", "python -X dev /usr/bin/torchrun @ t.py"),
        ("env -u X A=torchrun torchrun t.py", "env -u X A=torchrun torchrun @ t.py"),
        ("timeout -k 5 3h nice torchrun t.py", "timeout -k 5 3h nice torchrun @ t.py"),
        ("apptainer exec --nv --bind /a:/b i.sif torchrun t", "apptainer exec --nv --bind /a:/b i.sif torchrun @ t"),
        ("python -mtorch.distributed.run t.py", "python -mtorch.distributed.run @ t.py"),
        ("podman run --gpus all img torchrun t.py", "podman run --gpus all img torchrun @ t.py"),
        ("conda run -n env torchrun t.py", "conda run -n env torchrun @ t.py"),
        ("uv run torchrun t.py", "uv run torchrun @ t.py"),
    ],
)  # fmt: skip
def test_torchrun_gets_the_shape_of_the_job(line: str, expected: str) -> None:
    adapted = adapt(line.split(), WorldShape(2, 6))
    assert adapted is not None
    assert " ".join(adapted.program) == expected.replace("@", " ".join(TORCHRUN))
    assert (adapted.name, adapted.per_node) == ("torchrun", True)
    assert srun.may_contain_launcher(line.split())
    assert recognise(line.split()) == "torchrun"


@pytest.mark.parametrize(
    "line",
    [
        "python train.py torchrun",
        "python train.py --launcher srun",
        "python -c 'import torch.distributed.run'",
        "python -m pkg.torchrun",
        "./torchrun_data/train --x",
        "bash run_torchrun.sh",
        "bash -c 'python train.py # torchrun'",
        "bash -c 'echo \"torchrun\"; python train.py --with accelerate launch'",
        "env X=torchrun python train.py",
        "accelerate config",
        "apptainer exec i.sif python train.py torchrun",
        "bash",
        "bash -c",
        "python",
        "python -m",
        "env",
    ],
)
def test_other_programs_are_left_alone(line: str) -> None:
    assert adapt(shlex.split(line), WorldShape(2, 6)) is None
    assert recognise(shlex.split(line)) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torchrun t.py", "torchrun {} t.py"),
        (
            'cd x && A=b exec torchrun --standalone \\\n  --nproc_per_node="$N" t.py \'$A\' | tee l',
            "cd x && A=b exec torchrun {} \\\n t.py '$A' | tee l",
        ),
        (
            "if [ -f x ]; then torchrun --nnodes 2 a.py; else python -m torch.distributed.run b.py; fi",
            "if [ -f x ]; then torchrun {} a.py; else python -m torch.distributed.run {} b.py; fi",
        ),
        (
            "torchrun --nnodes $((N * (1 + 1))) --nproc_per_node=$(nvidia-smi -L | wc -l) --node_rank `id` t.py $(date) \"$(pwd)\"",
            'torchrun {} t.py $(date) "$(pwd)"',
        ),
        ("torchrun --nproc_per_node ${G:-4} --tee 3 ${S} & wait", "torchrun {} --tee 3 ${S} & wait"),
        ("(torchrun t.py) 2>&1", "(torchrun {} t.py) 2>&1"),
    ],
)  # fmt: skip
def test_shell_text_is_adapted_in_place(text: str, expected: str) -> None:
    adapted = adapt(["env", "A=b", "bash", "-lc", text, "name"], WorldShape(2, 6))
    assert adapted is not None
    new_text = expected.replace("{}", " ".join(TORCHRUN))
    assert adapted.program == ["env", "A=b", "bash", "-lc", new_text, "name"]
    assert adapted.per_node


def accelerate(line: str, nodes: int = 2, ranks: int = 6) -> list[str]:
    adapted = adapt(line.split(), WorldShape(nodes, ranks))
    assert adapted is not None
    assert adapted.name == "accelerate"
    return adapted.program


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def test_accelerate_gets_the_shape_of_the_job() -> None:
    program = accelerate(
        "accelerate launch --num_processes 4 --num-machines=1 --mixed_precision bf16 t.py"
    )
    assert program[:3] == ["accelerate", "launch", "--multi_gpu"]
    assert program[-3:] == ["--mixed_precision", "bf16", "t.py"]
    expected = {"--num_processes=$ESRUN_NUM_PROCESSES", "--num_machines=2", "--same_network"}
    expected |= {"--machine_rank=$ESRUN_NODE_RANK", "--main_process_ip=$MASTER_ADDR"}
    assert expected <= set(program)
    assert "4" not in program
    adapted = adapt(["accelerate", "launch", "--multi_gpu", "t.py"], WorldShape(1, 1))
    assert adapted is not None
    assert not adapted.per_node, "one process: it takes its rank from the environment"
    assert "--multi_gpu" not in adapted.program, "accelerate refuses it for one process"
    for line in ("accelerate-launch t.py", "python -m accelerate.commands.launch t.py"):
        assert "--num_machines=2" in accelerate(line)
    program = accelerate(
        "accelerate launch --use_deepspeed --deepspeed_multinode_launcher pdsh t.py"
    )
    assert "--deepspeed_multinode_launcher=standard" in program
    assert not {"--multi_gpu", "pdsh"} & set(program)


@pytest.mark.parametrize(
    ("kind", "multi_gpu"), [("FSDP", False), ("MULTI_GPU", True), ("'NO'", True)]
)
def test_the_configuration_of_accelerate_decides(
    tmp_path: Path, kind: str, multi_gpu: bool
) -> None:
    config = tmp_path / "hf" / "accelerate" / "default_config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(f"compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\n")
    assert ("--multi_gpu" in accelerate("accelerate launch t.py")) is multi_gpu
    other = tmp_path / "fsdp.json"
    other.write_text('{"distributed_type": "FSDP"}')
    assert "--multi_gpu" not in accelerate(f"accelerate launch --config_file {other} t.py")


def test_accelerate_without_gpus_runs_once_per_rank() -> None:
    adapted = adapt(
        ["accelerate", "launch", "--cpu", "--num_processes", "4", "t.py"], WorldShape(2, 6)
    )
    assert adapted is not None
    assert not adapted.per_node
    assert {"--num_processes=1", "--num_machines=1"} <= set(adapted.program)
    assert adapted.program[-2:] == ["--cpu", "t.py"]


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        (
            "deepspeed --num_gpus 4 --hostfile=h --no_ssh t.py --deepspeed 'a b.json'",
            "deepspeed: is invalid here: expected .*; write: esrun python t.py --deepspeed 'a b.json'",
        ),
        ("mpirun -n 4 python t.py", "mpirun: .*; write: esrun python train.py"),
        ("python -m composer.cli.launcher -n 4 t.py", "composer: .*; write: esrun python train.py"),
        ("bash -c 'srun python t.py'", "srun: .*; write: esrun python train.py"),
        ("python -m deepspeed.launcher.runner t.py", "deepspeed: .*; write: esrun python t.py"),
        ("torchx run dist.ddp -j 1x2 --script t.py", "torchx run: .*; write: esrun python train.py"),
        ("python -m fastai.launch t.py", "fastai.launch: .*; write: esrun python train.py"),
        ("tcsh -fc 'srun python t.py'", "srun: .*; write: esrun python train.py"),
    ],
)  # fmt: skip
def test_other_launchers_are_refused_with_the_remedy(line: str, remedy: str) -> None:
    with pytest.raises(LauncherError, match=remedy) as caught:
        adapt(shlex.split(line), WorldShape(1, 1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line", ["ray start --head", "conda run -n x vllm serve m", "bash -c 'ray start; python t.py'"]
)
def test_a_service_is_started_once_or_refused(line: str) -> None:
    assert adapt(shlex.split(line), WorldShape(1, 1)) is None
    remedy = "it 4 times, once for each GPU; start it without esrun and without --elastic"
    with pytest.raises(LauncherError, match=remedy):
        adapt(shlex.split(line), WorldShape(1, 4))
    assert srun.may_contain_launcher(shlex.split(line))


@given(st.lists(st.text(max_size=12), min_size=1, max_size=6), st.text(max_size=40))
def test_any_command_line_is_read(words: list[str], text: str) -> None:
    for line in (words, ["torchrun", *words], ["bash", "-c", text], ["bash", "-c", *words]):
        try:
            adapted = adapt(line, WorldShape(2, 4))
        except LauncherError:
            continue  # as if the user had written the name of another launcher
        assert adapted is not None or line[0] != "torchrun"


#: Each rank adds up all ranks over gloo and writes its place.
PROGRAM = """
import os, sys, torch
torch.distributed.init_process_group("gloo")
total = torch.tensor([torch.distributed.get_rank() + 1])
torch.distributed.all_reduce(total)
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
place = [os.environ[name] for name in names.split()]
folder, *words = sys.argv[1:]
open(f"{folder}/{place[0]}", "w").write(f"{' '.join(place)} {int(total)} {words}")
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("own", [True, False])
def test_debians_torchrun_meets_by_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: bool
) -> None:
    for folder in ["bin", *(["lib/python3.13/site-packages/torch"] if own else [])]:
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "bin" / "torchrun").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    line = ["torchrun", "--rdzv-conf", "timeout=900", "--master_port=1", "t.py"]
    adapted = adapt(line, WorldShape(2, 6, without_libuv=True))
    assert adapted is not None
    if own:
        assert adapted.program == ["torchrun", *TORCHRUN, "--rdzv-conf", "timeout=900", "t.py"]
        return
    conf = "--rdzv_conf=store_type=file,timeout=900"
    assert {conf, "--rdzv_endpoint=$ESRUN_RENDEZVOUS", "--nnodes=2"} <= set(adapted.program)
    assert adapted.program[-1] == "t.py"
    assert not {"timeout=900", "--rdzv_backend=static"} & set(adapted.program)
    adapted = adapt(line, WorldShape(1, 2, without_libuv=True))
    assert adapted is not None
    assert "--rdzv_endpoint=$ESRUN_RENDEZVOUS" not in adapted.program, "torch makes a private file"
    adapted = adapt(["accelerate", "launch", "t.py"], WorldShape(2, 6, without_libuv=True))
    assert adapted is not None
    assert {"--main_process_ip=$ESRUN_RENDEZVOUS", "--rdzv_backend=c10d"} <= set(adapted.program)
    assert "--same_network" not in adapted.program
    adapted = adapt(["sh", "-c", "torchrun t.py"], WorldShape(2, 2, without_libuv=True))
    assert adapted is not None
    assert '"--rdzv_endpoint=$ESRUN_RENDEZVOUS" t.py' in adapted.program[2], (
        "its folder may have spaces"
    )


def places(tmp_path: Path, line: list[str], tasks: tuple[int, ...], port: int) -> list[str]:
    """Run the tasks of a step on this machine; return the output of its ranks."""
    job = SlurmAllocation(
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "g[01-03]", "SLURM_GPUS_ON_NODE": "2"}
    )
    command = srun.command(job, tasks, line, gpus=True)
    assert {f"--ntasks={sum(tasks)}", "--cpu-bind=none"} <= set(command), "as for ranks"
    base = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "RANK": "9", "PET_STANDALONE": "1"}
    base["SLURM_SUBMIT_DIR"] = str(tmp_path / "a folder")
    env = srun.step_environment(base, job, tasks, port=port, socket="", step="m")
    env |= {"MASTER_ADDR": "127.0.0.1", "SLURM_STEP_NUM_TASKS": str(sum(tasks))}
    used = [count for count in tasks if count]
    running = [
        subprocess.Popen(
            command[command.index("sh") :],
            env=env | {"SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)},
        )
        for node, count in enumerate(used)
        for local in range(count)
    ]
    assert [process.wait(120) for process in running] == [0] * sum(tasks)
    return [(tmp_path / str(rank)).read_text() for rank in range(sum(tasks))]


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """Yield a command in place of `python` that starts torch's launcher and ranks quickly."""
    require("python/torch")
    from tests.support.trainings.forked_python import forked_python  # noqa: PLC0415

    with (
        tempfile.TemporaryDirectory() as folder,
        forked_python(Path(folder), "torch.distributed.run") as command,
    ):
        yield command


def test_the_real_torchrun_meets_by_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Path
) -> None:
    (tmp_path / "t.py").write_text(PROGRAM)
    monkeypatch.setattr(srun, "without_libuv", lambda: True)
    monkeypatch.setattr(adaptation, "_has_own_torch", lambda _: False)
    torchrun = [str(python), "-m", "torch.distributed.run", "--standalone"]
    line = [*torchrun, str(tmp_path / "t.py"), str(tmp_path)]
    # The nodes are numbered by name, which is the same here.
    lines = [text.split() for text in places(tmp_path, line, (2, 0, 1), unused_port())]
    assert [words[0:2] for words in lines] == [["0", "3"], ["1", "3"], ["2", "3"]]
    assert sorted(words[3] for words in lines) == ["1", "2", "2"]
    assert {(words[5], words[6]) for words in lines} == {("2", "6")}
    assert list((tmp_path / "a folder" / ".slurm-elastic").glob("m.rendezvous"))


@pytest.mark.parametrize("program", ["torchrun", "shell"])
def test_the_real_torchrun_makes_one_world_of_nodes_with_different_numbers_of_gpus(
    tmp_path: Path, python: Path, program: str
) -> None:
    (tmp_path / "t.py").write_text(PROGRAM)
    torchrun = f"{python} -m torch.distributed.run --standalone --nproc_per_node 7 --max_restarts=0"
    arguments = [
        str(tmp_path / "t.py"),
        str(tmp_path),
        "a b",
        "$HOME",
        "--master_port=$MASTER_PORT",
    ]
    line = [*torchrun.split(), *arguments]
    if program == "shell":
        line = ["bash", "-c", f"true; {torchrun} {shlex.join(arguments)}; exit $?"]
    lines = places(tmp_path, line, (2, 0, 1), unused_port())
    words = ["a b", "$HOME", "--master_port=$MASTER_PORT"]
    assert lines == [f"0 3 0 2 0 2 6 {words}", f"1 3 1 2 0 2 6 {words}", f"2 3 0 1 1 2 6 {words}"]


def test_nodes_meet_in_the_directory_for_the_state_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the home directory where that of submission cannot be written."""
    (tmp_path / "submit").write_text("no directory can be made below a file")
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "g[01-02]",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_SUBMIT_DIR": str(tmp_path / "submit"),
        "HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
    }
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(launch, "SrunProcess", lambda words, env, *_: started.append((words, env)))
    monkeypatch.setattr(srun, "without_libuv", lambda: True)
    monkeypatch.setattr(adaptation, "_has_own_torch", lambda _: False)
    step = launch.RankLaunch(parse(["torchrun", "t.py"]), env)
    step.tasks = (1, 1)
    step.start()
    step.listener.close()
    ((command, step_env),) = started
    words = command[command.index("sh") :]
    words[words.index("torchrun")] = "echo"
    node = {"SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    done = subprocess.run(
        words, env={**step_env, **node}, capture_output=True, text=True, check=True
    )
    place = tmp_path / ".slurm-elastic" / f"{step_env[STEP_VARIABLE]}.rendezvous"
    assert f"--rdzv_endpoint={place}" in done.stdout
