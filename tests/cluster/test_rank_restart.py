"""Programs without the library on a job and its companions: a change starts all ranks again.

The ranks share the samples of a step and add up their gradients, so that its loss is that of an
undisturbed run only if every rank has computed its part.
"""

import json
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
from clusterlib.lifecycle import container

from tests.support.selasticd import Daemon, eager_config, gpus, running, shown
from tests.support.slurm_cluster import SlurmCluster, until

FOLDER = "/shared/scratch/rank-restart"
#: As people write it for torchrun. Rank 0 saves at USR2 and now and then, and reads the newest.
TRAIN = """
import json, os, signal, sys, time, torch
signals = []
signal.signal(signal.SIGUSR2, lambda *_: signals.append(True))
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
slurm = "SLURM_PROCID SLURM_NTASKS SLURM_NODEID SLURM_NNODES SLURM_JOB_ID"
row = {name: int(os.environ[name]) for name in [*names.split(), *slurm.split()]}
row["gpu"] = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[row["LOCAL_RANK"]]
row["node"] = os.environ["SLURMD_NODENAME"]
weights, step = torch.zeros(4, dtype=torch.float64), 0
if os.path.exists("out/ckpt.pt"):
    state = torch.load("out/ckpt.pt")
    weights, step = state["weights"], state["step"]
row["start"] = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}.{step}"
with open("ranks", "a") as file:
    file.write(json.dumps(row) + "\\n")
if os.path.exists("fails-on") and world == int(open("fails-on").read()):
    sys.exit(3)
while True:
    time.sleep(0.25)
    points = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    errors = (points[rank::world] @ weights - points[rank::world].sum(1)).requires_grad_()
    parts = torch.cat([(errors**2).sum()[None], 2 * errors @ points[rank::world]]).detach()
    stops = torch.tensor([float(os.path.exists("stop")), float(len(signals))])
    torch.distributed.all_reduce(parts)
    torch.distributed.all_reduce(stops)
    weights, step = weights - 0.002 * parts[1:], step + 1
    if rank == 0:
        line = {"step": step, "loss": float(parts[0]), "world": world}
        with open("steps", "a") as file:
            file.write(json.dumps(line) + "\\n")
    if stops[1] or stops[0] or step % 40 == 0:
        signals.clear()
        if rank == 0:
            os.makedirs("out", exist_ok=True)
            torch.save({"step": step, "weights": weights}, "out/new.tmp")
            os.rename("out/new.tmp", "out/ckpt.pt")
        torch.distributed.barrier()
    if stops[0]:
        break
torch.distributed.destroy_process_group()
"""
#: The loss of each step on one rank that nothing disturbs.
REFERENCE = """
import json, sys, torch
weights = torch.zeros(4, dtype=torch.float64)
for step in range(int(sys.argv[1])):
    points = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    errors = points @ weights - points.sum(1)
    print(json.dumps(float((errors**2).sum())))
    weights = weights - 0.004 * errors @ points
"""
COMMANDS = {
    "plain": "python3 train.py",
    "torchrun": "torchrun --standalone --nproc_per_node=gpu train.py",
}
CONFIG = (
    eager_config()
    .replace("[resize]", '[resize]\nin_place = "auto"\nmin_gain = 0.01')
    .replace("notice_s = 10", "notice_s = 60")
)


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    with running(cluster, CONFIG, reporters=()) as daemon:
        yield daemon


class Script:
    """A job of TRAIN on one GPU, which may have four."""

    def __init__(
        self,
        daemon: Daemon,
        name: str,
        place: str,
        command: str = "plain",
        *,
        fails_on: int = 0,
        directive: str = "1-4,sizes=1:2:4",
    ) -> None:
        self.daemon, self.cluster = daemon, daemon.cluster
        self.folder = f"{FOLDER}/{name}"
        self.seen = len(daemon.log())
        begin = f"rm -rf {self.folder}; mkdir -p {self.folder}; cd {self.folder}; cat >train.py"
        begin += f"; echo {fails_on} >fails-on" if fails_on else ""
        self.cluster.exec(begin, user="alice", stdin=TRAIN)
        self.job = self.cluster.sbatch(
            "export OMP_NUM_THREADS=1 SLURM_ELASTIC_CONTROLLER=ctld:7321\n"
            f"exec esrun --checkpoint out/ckpt.pt --signal USR2 {COMMANDS[command]}",
            *(f"--elastic={directive}", "--gres=gpu:1", "--time=30", "--open-mode=append"),
            *(f"-C{place}", f"--chdir={self.folder}", "--output=log", f"--job-name={name}"),
            user="alice",
        )

    def log(self) -> str:
        ranks = self.cluster.exec(f"cat {self.folder}/log", check=False).stdout
        return f"{ranks[-4000:]}\n{self.daemon.log()[-6000:]}"

    def rows(self, name: str) -> list[Any]:
        text = self.cluster.exec(f"cat {self.folder}/{name}", check=False).stdout
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1:] == "\n"]

    def changes(self) -> list[dict[str, Any]]:
        answer = self.daemon.selastic("history", str(self.job), "--json")
        return [row for row in json.loads(answer)["changes"] if row["action"] != "rehearsal"]

    def changed(self, action: str, outcome: str = "DONE", *, timeout: float = 150) -> None:
        """Wait for the next change of this kind."""
        pattern = rf"JobId={self.job} Transition=\d+ State={outcome} Action={action} "
        self.seen = self.daemon.wait_for(pattern, after=self.seen, timeout=timeout).end()

    def trains_on(self, world: int, *, steps: int = 6) -> None:
        """Wait until the last steps were computed by so many ranks."""

        def there() -> bool:
            last = [row["world"] for row in self.rows("steps")[-steps:]]
            return last == [world] * steps

        until(there, seconds=150, what=self.log)

    def companions(self) -> list[int]:
        text = self.cluster.exec("squeue -h -o '%A %k' -t PD,R").stdout
        found = re.findall(rf"^(\d+) selastic:companion:{self.job}:", text, re.MULTILINE)
        return [int(job) for job in found]

    def kinds(self) -> set[str]:
        return {row["kind"] for row in self.changes()}

    def ends_well(self, *, again: int) -> None:
        """End it; check its ranks, and that its steps are those of an undisturbed run.

        Args:
            again: most steps that it may have computed twice.
        """
        runs = shown(self.cluster, self.job)["restart_cnt"]
        assert runs <= 1, "only the rehearsal is a requeue"
        self.cluster.exec(f"touch {self.folder}/stop", user="alice")
        self.cluster.wait(self.job, "COMPLETED", timeout=90)
        until(lambda: not self.companions(), seconds=30, what="a companion outlives its base")
        self.check_ranks()
        steps = self.rows("steps")
        numbers = Counter(row["step"] for row in steps)
        assert set(numbers) == set(range(1, max(numbers) + 1))
        assert len(steps) - len(numbers) <= again
        reference = self.cluster.exec(
            ["python3", "-", str(max(numbers))], stdin=REFERENCE, node="g01"
        ).stdout.split()
        differences = [abs(row["loss"] - float(reference[row["step"] - 1])) for row in steps]
        assert max(differences) < 1e-6
        self.daemon.check_log()

    def check_ranks(self) -> None:
        starts = defaultdict(list)
        for row in self.rows("ranks"):
            starts[row["start"], row["WORLD_SIZE"]].append(row)
        for (_, world), rows in starts.items():
            if len(rows) != world:  # some had not come so far when others failed
                continue
            assert sorted(row["RANK"] for row in rows) == list(range(world))
            assert len({(row["node"], row["gpu"]) for row in rows}) == world
            assert {row["SLURM_JOB_ID"] for row in rows} == {self.job}
            groups = sorted(rows, key=lambda row: row["GROUP_RANK"])
            by_group = {k: [*v] for k, v in groupby(groups, key=lambda row: row["GROUP_RANK"])}
            assert sorted(by_group) == list(range(rows[0]["GROUP_WORLD_SIZE"]))
            for members in by_group.values():
                local = sorted(row["LOCAL_RANK"] for row in members)
                assert local == list(range(members[0]["LOCAL_WORLD_SIZE"]))
            if "RANK" in rows[0] and rows[0]["SLURM_NTASKS"] == world:
                assert all(row["SLURM_NNODES"] == row["GROUP_WORLD_SIZE"] for row in rows)
                assert all(row["SLURM_NODEID"] == row["GROUP_RANK"] for row in rows)


@pytest.mark.parametrize(
    ("command", "place"), [("plain", "a100&rack2"), ("torchrun", "a100&rack1")]
)
def test_it_grows_and_shrinks_without_a_requeue(daemon: Daemon, command: str, place: str) -> None:
    script = Script(daemon, command, place, command)
    script.changed("grow")
    script.trains_on(4, steps=50)  # has saved, so that it is asked by the signal
    daemon.selastic("update", str(script.job), "--elastic=1-1")
    script.changed("shrink")
    script.trains_on(1, steps=50)
    assert not script.companions()
    daemon.selastic("update", str(script.job), "--elastic=1-4,sizes=1:2:4")
    script.changed("grow")
    script.trains_on(4)
    assert script.kinds() == {"restart"}
    script.ends_well(again=20)  # it trains on until esrun has seen that its save is complete


def test_ranks_of_a_companion_are_killed(daemon: Daemon, cluster: SlurmCluster) -> None:
    script = Script(daemon, "killed", "a100&rack2")
    script.changed("grow")
    script.trains_on(4, steps=50)  # and has a checkpoint
    (companion,) = script.companions()
    cluster.exec(["scancel", "-s", "KILL", f"{companion}.0"], user="alice")
    until(lambda: companion not in script.companions(), what=script.log)
    script.changed("grow")
    script.trains_on(4)
    script.ends_well(again=50)


def test_a_companion_is_cancelled(daemon: Daemon, cluster: SlurmCluster) -> None:
    script = Script(daemon, "cancelled", "a100&rack2")
    script.changed("grow")
    script.trains_on(4)
    (companion,) = script.companions()
    cluster.exec(["scancel", str(companion)], user="alice")
    script.changed("grow")
    script.trains_on(4)
    assert companion not in script.companions()
    script.ends_well(again=50)


def test_a_shape_in_which_it_fails_is_barred(daemon: Daemon, cluster: SlurmCluster) -> None:
    script = Script(daemon, "fails", "a100&rack2", fails_on=4)
    script.changed("shrink")  # the way back from four
    script.changed("grow")
    script.trains_on(2)
    assert gpus(cluster, script.job) == 1
    answer = json.loads(daemon.selastic("explain", str(script.job), "--json"))
    assert [row["gpus"] for row in answer["barred"]] == [4]
    assert script.kinds() == {"restart"}
    script.ends_well(again=50)


def test_the_node_of_a_companion_is_lost(daemon: Daemon, cluster: SlurmCluster) -> None:
    script = Script(daemon, "node-lost", "a100&rack1", directive="1-5")
    script.changed("grow")
    script.trains_on(5, steps=50)  # on two nodes, and has a checkpoint
    base = cluster.exec(f"squeue -h -j {script.job} -o %N").stdout.strip()
    held = {cluster.exec(f"squeue -h -j {i} -o %N").stdout.strip() for i in script.companions()}
    (lost,) = held - {base}
    docker = ["docker", "kill", container(cluster.name, lost)]
    subprocess.run(docker, check=True, capture_output=True)
    try:
        until(lambda: script.rows("steps")[-1]["world"] < 5, seconds=90, what=script.log)
    finally:
        docker[1] = "start"
        subprocess.run(docker, check=True, capture_output=True)
    idle = f"sinfo -h -n {lost} -o %t"
    until(lambda: "down" not in cluster.exec(idle).stdout, seconds=90, what=lost)
    script.ends_well(again=60)
