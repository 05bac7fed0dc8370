"""Faults of companions on the real cluster: the training goes on, and no step is lost or repeated.

The program is a light training (tests/support/light_training), which says to esrun what the library
says; the test takes the controller's part. Faults of programs that do not follow, and of sites that
refuse companions: test_companions.py.
"""

import subprocess
from collections.abc import Iterator

import pytest
from clusterlib.lifecycle import container

from tests.support.container_cluster import light_trainings
from tests.support.container_cluster.esrun_stand_in import StandIn, running_stand_in
from tests.support.container_cluster.growing_job import DIRECTORY, GrowingJob
from tests.support.container_cluster.slow_links import cut
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

#: Samples, epochs, samples of a step: more steps than a test waits for.
SIZE = (3200, 200, 32)


@pytest.fixture
def controller(cluster: SlurmCluster) -> Iterator[StandIn]:
    cluster.exec(f"install -d -o alice -g alice {DIRECTORY}")

    def run(script: str, *, stdin: str) -> None:
        cluster.exec(script, user="alice", stdin=stdin)

    light_trainings.install(run, DIRECTORY)
    with running_stand_in(cluster, DIRECTORY) as stand_in:
        yield stand_in
    cluster.exec(f"rm -rf {DIRECTORY}")


class LightJob(GrowingJob):
    """A running light training on g01, ten steps in a second, which `ends_well` ends."""

    def __init__(self, controller: StandIn, *options: str) -> None:
        samples, epochs, batch = SIZE
        size = f"--samples {samples} --epochs {epochs} --global-batch {batch} --step 0.1"
        super().__init__(
            controller,
            *options,
            program=f"python3 -m {light_trainings.PROGRAM} --out $PWD {size}",
            profile=f"export PYTHONPATH={DIRECTORY}",
        )

    def ends_well(self) -> None:
        """Let it end: one attempt, each step computed once, nothing left."""
        self.cluster.exec(f"touch {self.home}/finish", user="alice")
        self.cluster.wait(self.job, "COMPLETED")
        assert self.fields(self.job)["Restarts"] == "0"
        losses = self.cluster.exec(f"cat {self.home}/losses.jsonl").stdout
        light_trainings.check_steps(losses, SIZE)
        until(lambda: not self.left_behind(), what=self.left_behind)
        assert "internal error" not in self.log()

    def lost(self, companion: int, gpus: int = 2) -> None:
        """Wait until the training goes on without a companion, and can change again."""
        self.report(companions=[[companion, gpus, "ended"]], gpus=1, in_place=True)


def docker(*words: str) -> None:
    subprocess.run(["docker", *words], check=True, capture_output=True)


def test_ranks_a_companion_and_its_script_are_killed(
    controller: StandIn, cluster: SlurmCluster
) -> None:
    job = LightJob(controller)
    for how in ("scancel -s KILL {}.0", "scancel {}", "scancel -s KILL --batch {}"):
        companion = job.grow(2, "g02")
        cluster.exec(how.format(companion), user="alice")
        job.lost(companion)
        cluster.wait(companion, "COMPLETED", "CANCELLED", "FAILED", timeout=40)
    job.grow(1, "g03")
    job.ends_well()


def test_newcomers_die_while_they_join(controller: StandIn, cluster: SlurmCluster) -> None:
    """Before the group is formed, while it is, and after the switch."""
    job = LightJob(controller)
    for moment in ("hello", "prepare", "turn"):
        cluster.exec(f"echo {moment} >{job.home}/die", user="alice")
        (companion,) = job.submit(2)
        job.release(companion, "g02")
        # After the switch a companion has joined, and is lost again.
        job.report(change=job.change, change_state="done" if moment == "turn" else "failed")
        job.lost(companion)
        cluster.exec(f"rm {job.home}/die", user="alice")
    job.grow(2, "g02")
    job.ends_well()


def test_the_node_of_a_companion_is_lost(controller: StandIn, cluster: SlurmCluster) -> None:
    job = LightJob(controller)
    companion = job.grow(2, "g06")
    docker("kill", container(cluster.name, "g06"))
    try:
        job.lost(companion)
        job.grow(1, "g02")
    finally:
        docker("start", container(cluster.name, "g06"))
    cluster.wait_until_idle("g06")
    job.ends_well()


def test_the_network_of_a_companion_is_cut(controller: StandIn, cluster: SlurmCluster) -> None:
    job = LightJob(controller)
    companion = job.grow(2, "g06")
    with cut(cluster, "g06"):
        job.lost(companion)
        ranks = "pgrep -f '[l]ight_training' || true"
        until(lambda: not cluster.exec(ranks, node="g06").stdout, what="ranks are left on g06")
    job.grow(1, "g02")
    job.ends_well()
    cluster.wait_until_idle("g06")


def test_the_node_of_the_base_is_lost(controller: StandIn, cluster: SlurmCluster) -> None:
    job = LightJob(controller, "--gres=gpu:1", "--no-requeue")
    companion = job.grow(2, "g02")
    docker("kill", container(cluster.name, "g01"))
    try:
        cluster.wait(companion, "FAILED", "COMPLETED", "CANCELLED", timeout=40)
        cluster.wait(job.job, "NODE_FAIL", timeout=90)
    finally:
        docker("start", container(cluster.name, "g01"))
    cluster.wait_until_idle("g01")
    until(lambda: not job.left_behind(), what=job.left_behind)


def test_a_companion_never_starts(controller: StandIn, cluster: SlurmCluster) -> None:
    job = LightJob(controller)
    (companion,) = job.submit(2, deadline_s=6.0)
    job.report(change=1, change_state="failed")
    cluster.wait(companion, "CANCELLED")
    job.grow(1, "g02")
    job.ends_well()
