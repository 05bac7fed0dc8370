"""Launchers in jobs: Debian's torchrun, which is built without libuv, and accelerate.

Three jobs of launchers train side by side while a controller gives each a second GPU and takes it
back; the tests look at what they have left behind.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

import pytest

from tests.support.container_cluster.selasticd import Daemon, eager_config, running
from tests.support.container_cluster.slurm_cluster import WAIT_FACTOR, SlurmCluster
from tests.support.container_cluster.staged_jobs import StagedJobs

FOLDER = "/shared/scratch/launchers"
#: Adds up all ranks, each on the GPU that it would take.
SUM = """
import os, sys, torch
torch.distributed.init_process_group("gloo")
total = torch.tensor([1.0])
torch.distributed.all_reduce(total)
gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
names = "RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE"
row = *(os.environ[name] for name in names.split()), int(total), len(gpus)
# In one write: ranks of a node share its output.
sys.stdout.write(" ".join(map(str, ("=", *row, gpus[int(os.environ["LOCAL_RANK"])]))) + "\\n")
sys.stdout.flush()
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
    text = finished(cluster, line, "COMPLETED", "-N2", "--gpus=a100:3", "-c1", "-n2")
    lines = [part.partition("=")[2].split() for part in text.splitlines() if "]:=" in part]
    assert sorted(words[0] for words in lines) == [str(rank) for rank in range(3)], text
    assert {(words[1], words[3], words[4]) for words in lines} == {("3", "2", "3")}
    # Each node's ranks see its GPUs and take one each.
    assert sorted((words[2], words[5], words[6]) for words in lines) == [
        ("1", "1", "0"), ("2", "2", "0"), ("2", "2", "1")
    ]  # fmt: skip


def test_accelerate(cluster: SlurmCluster, folder: str) -> None:
    if cluster.exec("test -x /opt/frameworks/bin/accelerate", node="g01", check=False).returncode:
        pytest.skip("/opt/frameworks of the image has no accelerate")
    script = "source /opt/frameworks/bin/activate\nesrun accelerate launch --num_processes 1 sum.py"
    text = finished(cluster, script, "COMPLETED", "-N2", "--gpus=a100:3", "-c1", "-n2")
    assert [words[:2] + words[3:5] for words in sums(text)] == [
        [str(rank), "3", "2", "3"] for rank in range(3)
    ], text


def test_a_script_that_starts_torchrun_in_each_rank(cluster: SlurmCluster, folder: str) -> None:
    cluster.exec(f"echo 'import time; time.sleep(60)' >{folder}/wait.py", user="alice")
    # By a file: Debian's torchrun cannot meet by TCP, and would end before it is seen.
    meet = "--rdzv_backend=c10d --rdzv_conf=store_type=file --rdzv_id=$RANK"
    line = f"torchrun --nnodes=1 --nproc_per_node=1 {meet} wait.py"
    cluster.exec(f"cat >{folder}/run.sh", stdin=line, user="alice")
    text = finished(cluster, "esrun bash run.sh", "FAILED", "-N1", "--gres=gpu:a100:2")
    assert "esrun: the program starts torchrun in each rank, so 2 trainings would run" in text


RESIZED = "/shared/scratch/resized-launchers"
ACTIVATE = "source /opt/frameworks/bin/activate"
SAVE_EVERY = 4
RESIZED_S = 200.0
#: Trains, in ranks that a launcher starts, until the file `stop` exists: counts the ranks in each
#: step. Rank 0 saves each few steps and at the end; with the argument `signal` also at SIGUSR2,
#: which it notes at once: it may come during a save, after which nothing else is written.
COUNT_RANKS = f"""
import json, os, signal, sys, time, torch
signals = []
rank, step, stops, world = int(os.environ["RANK"]), 0, 0, 0
def note(*_):
    signals.append(True)
    if rank == 0:
        with open("signals", "a") as file:
            file.write(json.dumps({{"step": step, "world": world}}) + "\\n")
if "signal" in sys.argv:
    signal.signal(signal.SIGUSR2, note)
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
if os.path.exists("out/ckpt.pt"):
    step = torch.load("out/ckpt.pt")["step"]
while not stops:
    time.sleep(0.5)
    sums = torch.tensor([1, int(os.path.exists("stop"))])
    torch.distributed.all_reduce(sums)
    world, stops, step = int(sums[0]), int(sums[1]), step + 1
    if rank:
        continue
    with open("steps", "a") as file:
        file.write(json.dumps({{"step": step, "world": world}}) + "\\n")
    if step % {SAVE_EVERY} == 0 or signals or stops:
        signals.clear()
        os.makedirs("out", exist_ok=True)
        torch.save({{"step": step}}, "out/new.tmp")
        os.rename("out/new.tmp", "out/ckpt.pt")
torch.distributed.destroy_process_group()
"""


@dataclass(frozen=True)
class LauncherJob:
    """A job whose ranks a launcher starts.

    Attributes:
        command: after `esrun --checkpoint`.
        sbatch: a line of options in the batch script.
        setup: commands before.
    """

    command: str
    sbatch: str = ""
    setup: str = ""


RESIZED_JOBS = {
    "torchrun": LauncherJob("torchrun --standalone --nproc_per_node=gpu train.py"),
    "signal": LauncherJob(
        "--signal USR2 torchrun --nproc_per_node=1 train.py signal", "--signal=USR2@60"
    ),
    "accelerate": LauncherJob("accelerate launch --num_processes 1 train.py", setup=ACTIVATE),
}


class ResizedLaunchers(StagedJobs):
    """Jobs of launchers, and what they left behind.

    Attributes:
        names: of the jobs.
    """

    def __init__(self, cluster: SlurmCluster, daemon: Daemon, names: list[str]) -> None:
        super().__init__(cluster, daemon, RESIZED)
        self.names = names

    def submit(self) -> None:
        """Submit each job with one GPU; it may have two."""
        for name in self.names:
            job, folder = RESIZED_JOBS[name], f"{RESIZED}/{name}"
            self.cluster.exec(f"mkdir {folder}; cat >{folder}/train.py", stdin=COUNT_RANKS)
            self.cluster.exec(f"chown -R alice: {folder}")
            script = (
                f"#SBATCH --elastic=1-2 --nodes=1 --gres=gpu:1 --open-mode=append --time=30\n"
                f"#SBATCH --output={folder}.log --chdir={folder} {job.sbatch}\n"
                f"{job.setup}\nexport OMP_NUM_THREADS=1\n"
                f"exec esrun --checkpoint out/ckpt.pt {job.command}"
            )
            self.jobs[name] = self.cluster.sbatch(script, f"--job-name={name}")

    def watch(self) -> None:
        """Take the second GPU back once a job has saved on it; end the job when it has left it."""
        end = time.monotonic() + WAIT_FACTOR * RESIZED_S
        saved_after: dict[str, int] = {}
        shrunk: set[str] = set()
        while True:
            remaining, steps = self.running("steps")
            if not remaining:
                return
            assert time.monotonic() < end, self.logs()
            for name in remaining.keys() & steps.keys():
                world, step = steps[name]["world"], steps[name]["step"]
                # Before its first save in an attempt a script gets no signal.
                saves = world == 2 and step > saved_after.setdefault(name, step + SAVE_EVERY)
                if saves and name not in shrunk:
                    self.daemon.selastic("update", str(self.jobs[name]), "--elastic=1-1")
                    shrunk.add(name)
                elif world == 1 and name in shrunk:
                    self.cluster.exec(f"touch {RESIZED}/{name}/stop")
            time.sleep(1)

    def state(self, name: str) -> str:
        """Return the final state of a job as sacct writes it."""
        command = f"sacct -Xnj {self.jobs[name]} --format=State"
        return self.cluster.exec(command).stdout.strip()

    def changes(self, name: str) -> list[tuple[str, str]]:
        """Return action and outcome of each change of a job."""
        text = self.daemon.selastic("history", str(self.jobs[name]), "--json")
        rows = json.loads(text)["changes"]
        return [(row["action"], row["outcome"]) for row in rows]


@pytest.fixture(scope="module")
def resized(cluster: SlurmCluster) -> Iterator[ResizedLaunchers]:
    names = list(RESIZED_JOBS)
    if cluster.exec("test -x /opt/frameworks/bin/accelerate", node="g01", check=False).returncode:
        names.remove("accelerate")
    config = eager_config().replace("notice_s = 10", "notice_s = 30\nmax_in_flight = 16")
    cluster.exec(f"rm -rf {RESIZED}; install -d -o alice -g alice {RESIZED}")
    with running(cluster, config, reporters=()) as daemon:
        jobs = ResizedLaunchers(cluster, daemon, names)
        jobs.submit()
        jobs.watch()
        yield jobs
    cluster.exec(f"rm -rf {RESIZED}")
    daemon.check_log()


@pytest.mark.parametrize("name", RESIZED_JOBS)
def test_a_job_of_a_launcher_grows_and_shrinks(resized: ResizedLaunchers, name: str) -> None:
    if name not in resized.names:
        pytest.skip("/opt/frameworks of the image has no accelerate")
    assert resized.state(name) == "COMPLETED", resized.logs()
    # As the ranks count themselves: two trainings side by side would be two worlds of one rank.
    steps = resized.records(name, "steps")
    assert [world for world, _ in groupby(step["world"] for step in steps)] == [1, 2, 1]
    actions = resized.changes(name)
    assert ("rehearsal", "proven") in actions, resized.logs()
    assert {"grow", "shrink"} <= {action for action, outcome in actions if outcome == "done"}
    # Each attempt continues at its newest checkpoint.
    for before, after in pairwise(steps):
        assert before["step"] - SAVE_EVERY < after["step"] <= before["step"] + 1, resized.logs()


def test_the_ranks_of_torchrun_save_at_the_signal(resized: ResizedLaunchers) -> None:
    """Torchrun itself does not die of it, and the next attempt continues after that save."""
    steps, signals = (resized.records("signal", name) for name in ("steps", "signals"))
    attempts = [list(attempt) for _, attempt in groupby(steps, lambda step: step["world"])]
    for before, after in pairwise(attempts):
        first, last = before[0]["step"], before[-1]["step"]
        came = [
            signal["step"]
            for signal in signals
            if signal["world"] == before[0]["world"] and first <= signal["step"] <= last
        ]
        assert came, resized.logs()
        assert came[-1] < after[0]["step"] <= last + 1, resized.logs()
