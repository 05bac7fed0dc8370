"""The example job on real Slurm: started by esrun, notified, requeued in other shapes."""

import time

import pytest

from tests.support.container_cluster.slurm_cluster import SlurmCluster

PROJECT = "/opt/src/slurm-elastic"
SIZE = "--samples 1024 --epochs 2 --global-batch 32"
STEPS = 64


class Run:
    """One job of train_library.py and its folder."""

    def __init__(self, cluster: SlurmCluster, name: str, *, rate: int = 40) -> None:
        self.cluster = cluster
        self.out = f"/shared/home/alice/training-{name}"
        cluster.exec(f"rm -rf {self.out} {self.out}.log", user="alice")
        self.job = cluster.sbatch(
            f"export OMP_NUM_THREADS=1\n"
            f"esrun python3 {PROJECT}/docs/examples/train_library.py"
            f" --out {self.out} {SIZE} --rate {rate}",
            *("--requeue", "--open-mode=append", f"--output={self.out}.log"),
            *("--nodes=1", "--gres=gpu:2", "--ntasks-per-node=2"),
        )

    def log(self) -> str:
        return self.cluster.exec(f"cat {self.out}.log 2>&1", check=False).stdout

    def step(self) -> int:
        done = self.cluster.exec(f"wc -l < {self.out}/losses.jsonl", check=False)
        return int(done.stdout or 0)

    def wait_for(self, step: int, timeout: float = 90) -> None:
        end = time.monotonic() + timeout
        while self.step() < step:
            assert time.monotonic() < end, f"not at step {step}:\n{self.log()}"
            time.sleep(0.3)

    def wait_for_line(self, text: str, timeout: float = 60) -> None:
        end = time.monotonic() + timeout
        while text not in self.log():
            assert time.monotonic() < end, f"{text!r} is not in:\n{self.log()}"
            time.sleep(0.1)

    def requeue(self, *, nodes: int, gpus: int) -> float:
        """Requeue with another shape; returns the seconds until the job has left its nodes."""
        begun = time.monotonic()
        self.cluster.exec(f"scontrol requeuehold Incomplete {self.job}")
        query = f"squeue -h -j {self.job} -o '%T %r'"
        while not self.cluster.exec(query).stdout.startswith("PENDING"):
            time.sleep(0.05)
        left = time.monotonic() - begun
        time.sleep(2)
        self.cluster.exec(
            f"scontrol update jobid={self.job} NumNodes={nodes}-{nodes} NumTasks={nodes * gpus}"
            f" TasksPerNode={gpus} TresPerNode=gres/gpu:{gpus} MinCPUsNode={gpus} StartTime=now"
            f" && scontrol release {self.job}"
        )
        return left

    def check(self, *options: str) -> str:
        """Return the line of check_run.py; fail unless every step was computed exactly once."""
        return self.cluster.exec(
            [
                "python3",
                f"{PROJECT}/docs/examples/check_run.py",
                self.out,
                "--samples",
                "1024",
                "--epochs",
                "2",
                *options,
            ]
        ).stdout


@pytest.fixture(scope="module")
def reference(cluster: SlurmCluster) -> str:
    """Return OUT of an uninterrupted run on one rank."""
    out = "/shared/home/alice/training-reference"
    cluster.exec(
        f"rm -rf {out}; OMP_NUM_THREADS=1 EMULATED_DEVICES=/absent python3"
        f" {PROJECT}/docs/examples/train_library.py --out {out} {SIZE}",
        user="alice",
    )
    return out


def test_requeues_in_other_shapes_lose_and_repeat_nothing(
    cluster: SlurmCluster, reference: str
) -> None:
    run = Run(cluster, "shapes")
    run.wait_for(8)
    run.requeue(nodes=1, gpus=3)  # SIGTERM finds it training
    run.wait_for(24)
    cluster.exec(f"scancel -s USR2 {run.job}", user="alice")
    run.wait_for_line("waiting to be requeued")
    # It waits for nothing but SIGTERM, and leaves at once; KillWait is 30 s.
    assert run.requeue(nodes=2, gpus=1) < 10
    cluster.wait(run.job, "COMPLETED", timeout=120)
    said = run.check("--like", reference, "--tolerance", "1e-5")
    assert f"{STEPS} steps, ranks 2 -> 3 -> 2" in said
    assert run.log().count("resumed from step") == 2


def test_a_cancelled_job_has_saved(cluster: SlurmCluster) -> None:
    run = Run(cluster, "cancelled")
    run.wait_for(5)
    cluster.exec(f"scancel {run.job}", user="alice")
    cluster.wait(run.job, "CANCELLED")
    run.wait_for_line("SIGTERM: saved step")
    kept = int(
        cluster.exec(f"cat {run.out}/checkpoints/latest").stdout.strip().removeprefix("step_")
    )
    assert kept == run.step()


def test_ranks_see_the_emulated_devices(cluster: SlurmCluster) -> None:
    """Two a100 take half as long as two v100."""
    times = {}
    for kind in ("a100", "v100"):
        script = (
            f"cd {PROJECT}/docs/examples; python3 -c 'import emulate; d = emulate.device(100);"
            " print(d.kind, d.samples_per_s, d.communication_s)'"
        )
        done = cluster.exec(
            [
                "srun",
                "--nodes=1",
                f"--gres=gpu:{kind}:2",
                "sh",
                "-c",
                f"WORLD_SIZE=2; export WORLD_SIZE; {script}",
            ],
            user="alice",
        )
        times[kind] = done.stdout.split()
    assert times["a100"] == ["a100", "200.0", "0.005"]
    assert times["v100"] == ["v100", "100.0", "0.005"]
