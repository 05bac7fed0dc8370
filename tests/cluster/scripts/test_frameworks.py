"""Trainings of other frameworks, in a researcher's environment, resized and moved by a controller.

Each is submitted as docs/integrations.md says, from an activated environment that has the
framework and the library without the extra `controller`. They train at the same time; each is
compared with the same training on one GPU from beginning to end.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.recorded_steps import assert_same_steps, steps_of
from tests.support.container_cluster.selasticd import Daemon, eager_config, run_concurrently
from tests.support.container_cluster.slurm_cluster import WAIT_FACTOR, SlurmCluster
from tests.support.container_cluster.staged_jobs import StagedJobs

ENVIRONMENT = "/opt/frameworks"
STAGE = "/shared/scratch/frameworks"
SCRIPTS = Path(__file__).parents[2] / "integrations"
#: 192 samples, 32 of them in a step: four micro-batches of eight.
MICRO_BATCHES, EPOCHS, STEPS = 4, 8, 48
#: Steps between two checkpoints.
SAVE_EVERY = 4
#: Seconds of a step: the resizes take place within the training.
STEP_S = 1.0
PATIENCE_S = 280.0
#: Seconds between two looks at the jobs.
LOOK_S = 2.0
#: Sums of the same samples in another order, fp32 (docs/integrations.md).
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Training:
    """A script of tests/integrations.

    Attributes:
        script: its module there.
        checkpoint: pattern of its checkpoints, in its folder.
        undisturbed: its options on one rank without esrun.
        resized: its options as a job.
    """

    script: str
    checkpoint: str
    undisturbed: str = ""
    resized: str = ""


TRAININGS = {
    "trainer": Training("hf_training", "checkpoint-*", "--plain --accumulation 4"),
    "accelerate": Training("accelerate_training", "step_*"),
    "lightning": Training("lightning_training", "*.ckpt"),
    "deepspeed": Training("deepspeed_training", "global_step*", resized="--stage 1"),
}
SBATCH = """#SBATCH --nodes=1 --gres=gpu:1 --elastic=1-2,types=a100 --open-mode=append --time=60
source {environment}/bin/activate
export PYTHONPATH={stage} OMP_NUM_THREADS=1
exec esrun --micro-batches {micro_batches} --checkpoint '{out}/ckpt/{checkpoint}' \\
    python -m tests.integrations.{script} --out {out} --epochs {epochs} \\
    --save-every {save_every} --sleep {step_s} {resized}"""


class Trainings(StagedJobs):
    """Jobs of the trainings."""

    def __init__(self, cluster: SlurmCluster, daemon: Daemon, folder: Path) -> None:
        super().__init__(cluster, daemon, STAGE)
        self.folder = folder
        self.shrunk: set[str] = set()

    def copy_scripts(self) -> None:
        """Copy the scripts to a directory that all nodes share."""
        home = f"{STAGE}/tests/integrations"
        self.cluster.exec(f"rm -rf {STAGE}; install -d -o alice -g alice {STAGE} {home}")
        for file in [SCRIPTS.parent / "__init__.py", *SCRIPTS.glob("*.py")]:
            if file.exists():
                place = f"{STAGE}/{file.relative_to(SCRIPTS.parents[1])}"
                self.cluster.exec(f"cat >{place}", stdin=file.read_text("utf-8"))

    def submit(self) -> None:
        """Submit each training as a job of one GPU that may have two."""
        for name, training in TRAININGS.items():
            script = SBATCH.format(
                environment=ENVIRONMENT,
                stage=STAGE,
                micro_batches=MICRO_BATCHES,
                out=f"{STAGE}/{name}",
                checkpoint=training.checkpoint,
                script=training.script,
                epochs=EPOCHS,
                save_every=SAVE_EVERY,
                step_s=STEP_S,
                resized=training.resized,
            )
            self.cluster.exec(f"mkdir {STAGE}/{name}", user="alice")
            options = (f"--job-name={name}", f"--output={STAGE}/{name}.log", "--chdir=/tmp")
            self.jobs[name] = self.cluster.sbatch(script, *options)

    def run_undisturbed(self) -> None:
        """Run each script on one rank, without Slurm."""
        scripts = {training.script: training.undisturbed for training in TRAININGS.values()}
        words = " ".join(f"'{script}={options}'" for script, options in scripts.items())
        self.cluster.exec(
            f"cd /tmp; export PYTHONPATH={STAGE} OMP_NUM_THREADS=1"
            f" SLURM_ELASTIC_MICRO_BATCHES={MICRO_BATCHES};"
            f" {ENVIRONMENT}/bin/python -m tests.integrations.undisturbed {STAGE} {words}"
            f" -- --epochs {EPOCHS} --save-every {SAVE_EVERY} >{STAGE}/undisturbed.log 2>&1"
            f" || {{ cat {STAGE}/undisturbed.log >&2; exit 1; }}",
            user="alice",
        )

    def watch(self) -> None:
        """Wait until the jobs have ended; once one uses two GPUs, give it one of the other type."""
        end = time.monotonic() + WAIT_FACTOR * PATIENCE_S
        while True:
            running, steps = self.running("steps.0")
            if not running:
                return
            assert time.monotonic() < end, self.logs()
            for name in running.keys() & steps.keys() - self.shrunk:
                if steps[name]["world"] == 2:
                    elsewhere = "--elastic=1-1,types=v100"
                    self.daemon.selastic("update", str(self.jobs[name]), elsewhere)
                    self.shrunk.add(name)
            time.sleep(LOOK_S)

    def moved(self, name: str) -> bool:
        """Return whether the last run of a job was on another type of GPU than all before."""
        command = f"sacct -DXPn -j {self.jobs[name]} --format=AllocTRES"
        rows = self.cluster.exec(command).stdout.splitlines()
        return ["gpu:v100" in row for row in rows] == [False] * (len(rows) - 1) + [True]

    def steps(self, name: str) -> dict[int, dict[str, Any]]:
        """Return the record of each step of a training."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        names = self.cluster.exec(f"cd {STAGE}/{name}; ls steps.*").stdout.split()
        for file in names:
            text = self.cluster.exec(f"cat {STAGE}/{name}/{file}").stdout
            (folder / file).write_text(text, encoding="utf-8")
        return steps_of(folder)


@pytest.fixture(scope="module")
def trainings(
    cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trainings]:
    config = eager_config().replace("notice_s = 10", "notice_s = 60")
    daemon = Daemon(cluster, config, reporters=())
    trainings = Trainings(cluster, daemon, tmp_path_factory.mktemp("frameworks"))
    try:
        daemon.start()
        trainings.copy_scripts()
        trainings.submit()
        run_concurrently(trainings.run_undisturbed, trainings.watch)
        yield trainings
    finally:
        daemon.close()
        cluster.exec(f"rm -rf {STAGE}")
    daemon.check_log()


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_that_is_resized_is_the_undisturbed_one(trainings: Trainings, name: str) -> None:
    state, gpus = trainings.sizes(name)
    assert state == "COMPLETED", trainings.logs()
    assert [count for count, _ in groupby(gpus)] == [1, 2, 1], trainings.logs()
    assert trainings.moved(name), trainings.logs()
    expected, actual = trainings.steps(TRAININGS[name].script), trainings.steps(name)
    assert_same_steps(actual, expected, steps=STEPS, tolerance=TOLERANCE)
    assert {line["world"] for line in actual.values()} == {1, 2}


@pytest.mark.parametrize("name", TRAININGS)
def test_no_step_is_trained_twice_after_a_notice(trainings: Trainings, name: str) -> None:
    """The rehearsal may repeat steps: it begins at the checkpoint of before."""
    for before, after in pairwise(trainings.records(name, "steps.0")):
        if before["world"] != after["world"]:
            assert after["step"] == before["step"] + 1, trainings.log(name)


@pytest.mark.parametrize("name", TRAININGS)
def test_the_environment_has_the_library_only_and_uses_the_esrun_of_the_site(
    trainings: Trainings, name: str
) -> None:
    log = trainings.log(name)
    assert "esrun: attempt 1: 1 ranks" in log or "esrun: attempt 1: 1 rank" in log
    assert "not reached" not in log
    missing = trainings.cluster.exec(
        f"{ENVIRONMENT}/bin/python -c 'import highspy'", check=False
    ).stderr
    assert "No module named 'highspy'" in missing


def test_the_checkpoint_of_zero_is_converted_at_each_change_of_the_ranks(
    trainings: Trainings,
) -> None:
    """The rehearsal goes on with the same ranks."""
    log = trainings.log("deepspeed")
    assert log.count("converted to a universal checkpoint") == 2, log
