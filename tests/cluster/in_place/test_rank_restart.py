"""Programs without the library on a job and its companions: a change starts all ranks again."""

import json
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from clusterlib.lifecycle import container

from tests.support.container_cluster import plain_training
from tests.support.container_cluster.selasticd import (
    Daemon,
    companions,
    eager_config,
    gpus,
    running,
    shown,
)
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

FOLDER = "/shared/scratch/rank-restart"
TRAIN = Path(plain_training.__file__).read_text()
COMMANDS = {
    "plain": "python3 train.py",
    "torchrun": "torchrun --standalone --nproc_per_node=gpu train.py torch",
    "copied": "python3 /tmp/copy-$SLURM_JOB_ID/train.py",
}
#: Runs in the batch script before esrun, on the nodes of the job itself.
COPY = "mkdir -p /tmp/copy-$SLURM_JOB_ID && cp train.py /tmp/copy-$SLURM_JOB_ID"
BEFORE = {"copied": f"srun --ntasks-per-node=1 bash -c '{COPY}'\n"}
CONFIG = (
    eager_config()
    .replace("[resize]", "[resize]\nmin_gain = 0.01")
    .replace("notice_s = 10", "notice_s = 60")
)


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    with running(cluster, CONFIG, reporters=()) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def _others(daemon: Daemon, cluster: SlurmCluster) -> None:
    """Leave one GPU of g01: growth within a node would be a requeue. All jobs end with the test."""
    job = cluster.sbatch("sleep 3600", "--gres=gpu:3", "-wg01", "--time=60", user="bob")
    cluster.wait(job, "RUNNING")


class Script:
    """A job of `plain_training` on one GPU of g01, which may have four."""

    def __init__(
        self,
        daemon: Daemon,
        name: str,
        command: str = "plain",
        *,
        fails_on: int = 0,
        in_place: int = 0,
        directive: str = "1-4,sizes=1:2:4",
    ) -> None:
        self.daemon, self.cluster = daemon, daemon.cluster
        self.has_agents = command == "torchrun"  # they are numbered as they meet
        self.folder = f"{FOLDER}/{name}"
        self.seen = len(daemon.log())
        begin = f"rm -rf {self.folder}; mkdir -p {self.folder}; cd {self.folder}; cat >train.py"
        begin += f"; echo {fails_on} >fails-on" if fails_on else ""
        begin += f"; echo {in_place} >in-place" if in_place else ""
        self.cluster.exec(begin, user="alice", stdin=TRAIN)
        self.job = self.cluster.sbatch(
            "export OMP_NUM_THREADS=1 SLURM_ELASTIC_CONTROLLER=ctld:7321\n"
            f"{BEFORE.get(command, '')}"
            f"exec esrun --checkpoint out/ckpt.json --signal USR2 {COMMANDS[command]}",
            *(f"--elastic={directive}", "--gres=gpu:1", "--time=30", "--open-mode=append"),
            *("-wg01", f"--chdir={self.folder}", "--output=log", f"--job-name={name}"),
            user="alice",
        )

    def output(self) -> str:
        return self.cluster.exec(f"cat {self.folder}/log", check=False).stdout

    def log(self) -> str:
        return f"{self.output()[-4000:]}\n{self.daemon.log()[-6000:]}"

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

    def has_saved(self) -> None:
        """Wait until esrun knows of a complete checkpoint since the last start of the program."""
        saved = re.compile(
            r"attempt \d+ in place: (?!.*attempt \d+ in place).*esrun: resumed:", re.DOTALL
        )
        until(lambda: saved.search(self.output()), seconds=150, what=self.log)

    def has_saved_in_attempt(self, number: int) -> None:
        saved = re.compile(rf"attempt {number}: .*esrun: resumed:", re.DOTALL)
        until(lambda: saved.search(self.output()), seconds=150, what=self.log)

    def companions(self) -> list[int]:
        return companions(self.cluster, self.job, "PD,R")

    def kinds(self) -> set[str]:
        return {row["kind"] for row in self.changes()}

    def ends_well(self, *, again: int, requeues: int = 0) -> None:
        """End it; check its ranks, and that its steps are those of an undisturbed run.

        Args:
            again: most steps that it may have computed twice.
            requeues: that it may have had beside its rehearsal.
        """
        assert shown(self.cluster, self.job)["restart_cnt"] <= 1 + requeues
        self.cluster.exec(f"touch {self.folder}/stop", user="alice")
        self.cluster.wait(self.job, "COMPLETED", timeout=90)
        until(lambda: not self.companions(), seconds=30, what="a companion outlives its base")
        self.check_ranks()
        steps = self.rows("steps")
        numbers = Counter(row["step"] for row in steps)
        assert set(numbers) == set(range(1, max(numbers) + 1))
        assert len(steps) - len(numbers) <= again
        losses = list(plain_training.undisturbed_losses(max(numbers)))
        assert max(abs(row["loss"] - losses[row["step"] - 1]) for row in steps) < 1e-6
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
            assert len({(row["node"], row["LOCAL_RANK"]) for row in rows}) == world
            assert {row["SLURM_JOB_ID"] for row in rows} == {self.job}
            groups = sorted(rows, key=lambda row: row["GROUP_RANK"])
            by_group = {k: [*v] for k, v in groupby(groups, key=lambda row: row["GROUP_RANK"])}
            assert sorted(by_group) == list(range(rows[0]["GROUP_WORLD_SIZE"]))
            for members in by_group.values():
                local = sorted(row["LOCAL_RANK"] for row in members)
                assert local == list(range(members[0]["LOCAL_WORLD_SIZE"]))
            if not self.has_agents:
                assert all(row["SLURM_NNODES"] == row["GROUP_WORLD_SIZE"] for row in rows)
                assert all(row["SLURM_NODEID"] == row["GROUP_RANK"] for row in rows)


@pytest.mark.parametrize(("command", "world"), [("plain", 4), ("torchrun", 3)])
def test_it_grows_and_shrinks_without_a_requeue(daemon: Daemon, command: str, world: int) -> None:
    sizes = f"1-{world},sizes=1:{world}"
    script = Script(daemon, command, command, directive=sizes)
    script.changed("grow")
    script.trains_on(world)  # on two nodes with different numbers of ranks
    script.has_saved()  # so that it is asked by the signal
    daemon.selastic("update", str(script.job), "--elastic=1-1")
    script.changed("shrink")
    script.trains_on(1)
    script.has_saved()
    assert not script.companions()
    daemon.selastic("update", str(script.job), f"--elastic={sizes}")
    script.changed("grow")
    script.trains_on(world)
    assert script.kinds() == {"restart"}
    script.ends_well(again=20)  # it trains on until esrun has seen that its save is complete


def test_ranks_of_a_companion_are_killed(daemon: Daemon, cluster: SlurmCluster) -> None:
    script = Script(daemon, "killed")
    script.changed("grow")
    script.trains_on(4)
    script.has_saved()
    (companion,) = script.companions()
    cluster.exec(["scancel", "-s", "KILL", f"{companion}.0"], user="alice")
    until(lambda: companion not in script.companions(), what=script.log)
    script.changed("grow")
    script.trains_on(4)
    # What the kill lost, and the steps until esrun had seen that a save was complete: two growths.
    script.ends_well(again=plain_training.SAVE_EVERY + 20)


def test_a_companion_is_cancelled_while_the_only_checkpoint_is_overwritten(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    script = Script(daemon, "cancelled", in_place=4)
    script.changed("grow")
    script.trains_on(4)
    script.has_saved()
    (companion,) = script.companions()
    checkpoint = f"{script.folder}/out/ckpt.json"
    is_cut = (
        f"until ! grep -q ']$' {checkpoint}; do sleep 0.1; done; tail -n1 {script.folder}/steps"
    )
    step = json.loads(cluster.exec(is_cut).stdout)["step"]
    cluster.exec(["scancel", str(companion)], user="alice")

    def goes_on() -> bool:
        """Return whether it goes on from the checkpoint that was being written."""
        return step in [int(row["start"].rpartition(".")[2]) for row in script.rows("ranks")]

    until(goes_on, seconds=90, what=script.log)
    assert "a save is under way: the ranks are ended after it" in script.output()
    assert companion not in script.companions()
    script.ends_well(again=50)


def test_a_shape_in_which_it_fails_is_barred(daemon: Daemon, cluster: SlurmCluster) -> None:
    script = Script(daemon, "fails", fails_on=4)
    script.changed("shrink")  # the way back from four
    script.changed("grow")
    script.trains_on(2)
    assert gpus(cluster, script.job) == 1
    answer = json.loads(daemon.selastic("explain", str(script.job), "--json"))
    assert [row["gpus"] for row in answer["barred"]] == [4]
    assert script.kinds() == {"restart"}
    script.ends_well(again=50)


def test_what_the_batch_script_copies_to_its_nodes_lacks_in_companions(daemon: Daemon) -> None:
    """The size is not barred: a requeue runs the batch script on all nodes."""
    script = Script(daemon, "copied", "copied", directive="1-2")
    script.changed("shrink")  # the way back from a companion
    script.changed("grow")
    script.trains_on(2)
    script.has_saved_in_attempt(3)

    def explained() -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(daemon.selastic("explain", str(script.job), "--json"))
        return answer

    until(
        lambda: (explained()["not_in_place"] or {}).get("code") == "companions-unsuitable",
        what=explained,
    )
    assert explained()["barred"] == []
    assert [row["kind"] for row in script.changes()] == ["restart", "restart", "requeue"]
    script.ends_well(again=50, requeues=1)


def test_the_node_of_a_companion_is_lost(daemon: Daemon, cluster: SlurmCluster) -> None:
    script = Script(daemon, "node-lost", directive="1-5")
    script.changed("grow")
    script.trains_on(5)  # on two nodes
    script.has_saved()
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
