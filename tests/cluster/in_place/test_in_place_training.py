"""A training of the library grows and shrinks in place: controller, esrun and ranks together.

Where the library itself is not at stake, a light training (tests/support/light_training) says to
esrun what the library says.
"""

import functools
import json
import re
from collections.abc import Iterator

import pytest

from tests.support.container_cluster import light_trainings
from tests.support.container_cluster.selasticd import (
    Daemon,
    companions,
    eager_config,
    gpus,
    running,
    shown,
    total_gpus,
)
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

PROJECT = "/opt/src/slurm-elastic"
LIGHT = "/shared/scratch/light-in-place"
SAMPLES, EPOCHS = 1024, 5
SIZE = f"--samples {SAMPLES} --epochs {EPOCHS} --global-batch 32"
CONFIG = eager_config().replace("[resize]", "[resize]\nmin_gain = 0.01")
#: Node with the GPUs of a test: rack 2's a100.
PLACE = "-Ca100&rack2"
#: 160 steps.
GAN = f"{PROJECT}/docs/examples/train_gan.py --epochs 10"


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    closed = "scontrol create PartitionName=closed Nodes=g04 AllocNodes=ctld State=UP"
    cluster.exec(closed, check=False)

    def run(script: str, *, stdin: str) -> None:
        cluster.exec(script, user="alice", stdin=stdin)

    light_trainings.install(run, LIGHT)
    with running(cluster, CONFIG, reporters=()) as daemon:
        yield daemon
    cluster.exec("scontrol delete PartitionName=closed", check=False)


def read_losses(cluster: SlurmCluster, out: str) -> list[dict[str, float]]:
    """Return the rows that a training has written about its steps."""
    text = cluster.exec(f"cat {out}/losses.jsonl").stdout
    return [json.loads(line) for line in text.splitlines()]


@functools.cache
def undisturbed_losses(cluster: SlurmCluster) -> list[dict[str, float]]:
    """Return the losses of a run of train_gan.py on one rank, which is made once."""
    out = "/shared/home/alice/in-place-undisturbed"
    command = f"rm -rf {out}; OMP_NUM_THREADS=1 python3 {GAN} --out {out}"
    cluster.exec(command, user="alice", timeout=200)
    return read_losses(cluster, out)


class Training:
    """A job of train_library.py on one GPU that may have four."""

    program = f"{PROJECT}/docs/examples/train_library.py {SIZE} --rate 20"

    def __init__(self, daemon: Daemon, name: str, *options: str) -> None:
        self.daemon, self.cluster = daemon, daemon.cluster
        self.out = f"/shared/home/alice/in-place-{name}"
        self.begun = len(daemon.log())
        self.cluster.exec(f"rm -rf {self.out} {self.out}.log", user="alice")
        self.job = self.cluster.sbatch(
            "export OMP_NUM_THREADS=1 SLURM_ELASTIC_CONTROLLER=ctld:7321\n"
            f"export PYTHONPATH={LIGHT}\nexec esrun python3 {self.program} --out {self.out}",
            *("--elastic=1-4,sizes=1:2:4", "--gres=gpu:1", "--time=30", "--open-mode=append"),
            *(PLACE, f"--output={self.out}.log", *options),
        )

    def log(self) -> str:
        return self.cluster.exec(f"cat {self.out}.log 2>&1", check=False).stdout

    def companions(self) -> list[int]:
        return companions(self.cluster, self.job, "PD,R")

    def has(self, size: int, *, timeout: float = 120) -> None:
        """Wait until base and companions hold so many GPUs, and no change is under way."""

        def there() -> bool:
            return total_gpus(self.cluster, self.job) == size

        until(there, seconds=timeout, what=self.log)

    def changed(self, action: str, *, timeout: float = 120) -> None:
        """Wait for the end of the next change, which is made in place."""
        pattern = rf"JobId={self.job} Transition=\d+ State=(DONE|UNDONE) Action=(\w+)"
        match = self.daemon.wait_for(pattern, after=self.begun, timeout=timeout)
        self.begun = match.end()
        assert match.group(1, 2) == ("DONE", action), self.log()

    def ends_well(self) -> None:
        """Wait for its end: one run, each step computed once, nothing left."""
        self.cluster.wait(self.job, "COMPLETED", timeout=240)
        assert shown(self.cluster, self.job)["restart_cnt"] == 0
        until(lambda: not self.companions(), seconds=30, what="a companion outlives its base")
        self.check()
        self.daemon.check_log()

    def check(self) -> None:
        """Check that each sample counts once, and each step is computed once."""
        words = ["--samples", str(SAMPLES), "--epochs", str(EPOCHS)]
        self.cluster.exec(["python3", f"{PROJECT}/docs/examples/check_run.py", self.out, *words])


class LightTraining(Training):
    """A job of a light training, which `ends_well` ends."""

    steps = 3200, 200, 32  # samples, epochs, samples of a step: more than a test waits for
    program = "-m {} --samples {} --epochs {} --global-batch {} --step 0.1".format(
        light_trainings.PROGRAM, *steps
    )

    def ends_well(self) -> None:
        self.cluster.exec(f"touch {self.out}/finish", user="alice")
        super().ends_well()

    def check(self) -> None:
        losses = self.cluster.exec(f"cat {self.out}/losses.jsonl").stdout
        light_trainings.check_steps(losses, self.steps)


class LoopTraining(Training):
    """A job of train_gan.py, which keeps its own loop."""

    program = f"{GAN} --pause 0.4"

    def check(self) -> None:
        """Compare with an undisturbed run of one rank."""
        losses = read_losses(self.cluster, self.out)
        expected = undisturbed_losses(self.cluster)
        # Where a loss hits between the updates of two optimizers, no rank has a state to save.
        if "the newest checkpoint stays" in self.log():
            losses = list({line["step"]: line for line in losses}.values())
        assert [line["step"] for line in losses] == [line["step"] for line in expected]
        for line, other in zip(losses, expected, strict=True):
            assert line == pytest.approx(other, abs=1e-3)


def test_it_grows_and_shrinks_and_loses_no_step(daemon: Daemon, cluster: SlurmCluster) -> None:
    training = Training(daemon, "both-ways")
    training.changed("grow")
    training.has(4)
    rigid = cluster.sbatch("exec sleep 8", "-o/dev/null", PLACE, "--gres=gpu:2", user="bob")
    training.changed("shrink")
    cluster.wait(rigid, "RUNNING", "COMPLETED")
    training.changed("grow")
    rows = daemon.selastic("history", str(training.job), "--noheader", "--format=KIND")
    assert set(rows.split()) == {"in-place"}
    training.ends_well()


def test_a_loop_of_its_own_grows_and_shrinks(daemon: Daemon, cluster: SlurmCluster) -> None:
    training = LoopTraining(daemon, "loop")
    training.changed("grow")
    training.has(4)
    rigid = cluster.sbatch("exec sleep 8", "-o/dev/null", PLACE, "--gres=gpu:2", user="bob")
    training.changed("shrink")
    cluster.wait(rigid, "RUNNING", "COMPLETED")
    rows = daemon.selastic("history", str(training.job), "--noheader", "--format=KIND")
    assert set(rows.split()) == {"in-place"}
    training.ends_well()


def test_a_loop_whose_companion_is_killed_starts_again_and_loses_no_step(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    training = LoopTraining(daemon, "loop-killed")
    training.changed("grow")
    (companion,) = training.companions()
    cluster.exec(f"scancel -s KILL {companion}.0", user="alice")
    again = "starting it again in place"
    until(lambda: again in training.log(), seconds=60, what=training.log)
    training.ends_well()


def test_companions_save_what_a_lost_base_has_not_saved(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    training = Training(daemon, "base-lost")
    training.changed("grow")
    cluster.exec(f"scancel -s KILL {training.job}.0", user="alice")
    rescued = re.compile(r"rank 0 is lost; saved step (\d+)")
    until(lambda: rescued.search(training.log()), seconds=60, what=training.log)
    (step,) = rescued.findall(training.log())
    resumed = f"resumed from step {step} with 1 rank(s)"
    until(lambda: resumed in training.log(), seconds=60, what=training.log)
    assert shown(cluster, training.job)["restart_cnt"] == 0
    cluster.cancel()


def test_a_companion_is_cancelled_by_its_owner(daemon: Daemon, cluster: SlurmCluster) -> None:
    training = LightTraining(daemon, "cancelled")
    training.changed("grow")
    (companion,) = training.companions()
    cluster.exec(["scancel", str(companion)], user="alice")
    training.changed("grow")
    (other,) = training.companions()
    assert other != companion
    training.ends_well()


def test_where_companions_are_refused_it_is_requeued(daemon: Daemon, cluster: SlurmCluster) -> None:
    """Its partition has AllocNodes without the compute nodes."""
    problem = "Access/permission denied"
    training = LightTraining(daemon, "refused", "--partition=closed")
    refused = rf"JobId={training.job} Transition=\d+ State=UNDONE Action=grow .*{problem}"
    daemon.wait_for(refused, after=training.begun, timeout=120)
    until(lambda: gpus(cluster, training.job) == 4, seconds=60, what=training.log)
    assert shown(cluster, training.job)["restart_cnt"] == 1
    rows = daemon.selastic("history", str(training.job), "--noheader", "--format=KIND,REASON")
    assert [row.split()[0] for row in rows.splitlines()] == ["in-place", "requeue"]
    assert problem in rows
    cluster.cancel()


@pytest.mark.parametrize("state", ["ASK", "JOIN"])
def test_selasticd_is_killed_meanwhile(daemon: Daemon, state: str) -> None:
    training = LightTraining(daemon, f"killed-{state}")
    daemon.when(training.job, state, daemon.kill_command, action="grow")
    daemon.start()
    training.changed("grow")
    assert len(training.companions()) == 1
    training.ends_well()


def test_its_base_is_cancelled(daemon: Daemon, cluster: SlurmCluster) -> None:
    training = LightTraining(daemon, "ended")
    training.changed("grow")
    assert training.companions()
    cluster.exec(["scancel", str(training.job)], user="alice")
    until(lambda: not training.companions(), seconds=15, what="a companion outlives its base")
