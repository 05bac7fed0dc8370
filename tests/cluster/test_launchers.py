"""Launchers in jobs: Debian's torchrun, which is built without libuv, and accelerate."""

from collections.abc import Iterator

import pytest

from tests.support.slurm_cluster import SlurmCluster

FOLDER = "/shared/scratch/launchers"
#: Adds up all ranks, each on the GPU that it would take.
SUM = """
import os, torch
torch.distributed.init_process_group("gloo")
total = torch.tensor([1.0])
torch.distributed.all_reduce(total)
gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
names = "RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE"
print("=", *(os.environ[name] for name in names.split()), int(total), len(gpus),
      gpus[int(os.environ["LOCAL_RANK"])], flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def folder(cluster: SlurmCluster) -> Iterator[str]:
    cluster.exec(f"install -d -o alice -g alice {FOLDER}")
    cluster.exec(f"cat >{FOLDER}/sum.py", stdin=SUM, user="alice")
    yield FOLDER
    cluster.cancel()
    cluster.exec(f"rm -rf {FOLDER}")


def finished(cluster: SlurmCluster, script: str, state: str, *options: str) -> str:
    """Run a job to its end; return its output."""
    job = cluster.sbatch(script, f"--chdir={FOLDER}", "--output=out", *options)
    cluster.wait(job, state, timeout=120)
    return cluster.exec(f"cat {FOLDER}/out").stdout


def sums(text: str) -> list[list[str]]:
    return sorted(line.split()[1:] for line in text.splitlines() if line.startswith("="))


def test_torchrun_on_nodes_with_different_numbers_of_gpus(
    cluster: SlurmCluster, folder: str
) -> None:
    line = "esrun torchrun --standalone --nproc_per_node=8 --tee 3 sum.py"
    text = finished(cluster, line, "COMPLETED", "-N2", "--gpus=a100:6", "-c1", "-n2")
    lines = [part.partition("=")[2].split() for part in text.splitlines() if "]:=" in part]
    assert sorted(words[0] for words in lines) == [str(rank) for rank in range(6)], text
    assert {(words[1], words[3], words[4]) for words in lines} == {("6", "2", "6")}
    # Each node's ranks see its GPUs and take one each.
    assert sorted((words[2], words[5], words[6]) for words in lines) == [
        ("2", "2", "0"), ("2", "2", "1"), *(("4", "4", str(gpu)) for gpu in range(4))
    ]  # fmt: skip


def test_accelerate(cluster: SlurmCluster, folder: str) -> None:
    if cluster.exec("test -x /opt/frameworks/bin/accelerate", node="g01", check=False).returncode:
        pytest.skip("/opt/frameworks of the image has no accelerate")
    script = "source /opt/frameworks/bin/activate\nesrun accelerate launch --num_processes 1 sum.py"
    lines = sums(finished(cluster, script, "COMPLETED", "-N2", "--gpus=a100:3", "-c1", "-n2"))
    assert [words[:2] + words[3:5] for words in lines] == [
        [str(rank), "3", "2", "3"] for rank in range(3)
    ]


def test_a_script_that_starts_torchrun_in_each_rank(cluster: SlurmCluster, folder: str) -> None:
    cluster.exec(f"echo 'import time; time.sleep(60)' >{folder}/wait.py", user="alice")
    cluster.exec(f"echo 'torchrun --standalone wait.py' >{folder}/run.sh", user="alice")
    text = finished(cluster, "esrun bash run.sh", "FAILED", "-N1", "--gres=gpu:a100:2")
    assert "esrun: the program starts torchrun in each rank, so 2 trainings would run" in text
