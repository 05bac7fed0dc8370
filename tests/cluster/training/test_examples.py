"""docs/examples, submitted as a user does, while a controller resizes them.

They train at the same time; the tests look at what they have left behind.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.container_cluster.selasticd import Daemon, eager_config
from tests.support.container_cluster.slurm_cluster import WAIT_FACTOR, SlurmCluster
from tests.support.container_cluster.staged_jobs import StagedJobs

PROJECT = "/opt/src/slurm-elastic"
EXAMPLES = f"{PROJECT}/docs/examples"
STAGE = "/shared/scratch/examples"
PACED = Path(__file__).parents[1] / "drivers" / "paced.py"
PATIENCE_S = 200.0

GPT = "--samples 160 --epochs 10 --global-batch 16 --blocks 2 --tied"
VOLUMES = "--width 16 --filters 4 --samples 32 --epochs 5"
#: Run undisturbed, too: what they train on, by example.
REFERENCES = {"gpt": GPT, "volumes": VOLUMES}


@dataclass(frozen=True)
class Example:
    """Options of one example's submission.

    Attributes:
        options: of sbatch. Fewer GPUs than in the batch scripts: all share a few CPUs.
        arguments: of the script.
        step_s: what a step takes at least on one GPU, see drivers/paced.py.
    """

    options: str
    arguments: str
    step_s: float = 0.0


SUBMITTED = {
    "cnn": Example(
        "--elastic=1-2,freeze=auto,max-penalty=40%",
        "--samples 512 --epochs 6 --global-batch 32 --checkpoint-every 2",
        0.25,
    ),
    "gpt": Example("--elastic=1-2,parallel=hybrid", f"{GPT} --checkpoint-every 2", 0.3),
    # It knows the cluster's emulated devices, and how long they take.
    "plain": Example(
        "--elastic=1-2,types=v100 --gres=gpu:v100:1 --ntasks-per-node=1",
        "--samples 1024 --epochs 8 --global-batch 32 --rate 100 --save-every 10",
    ),
    "unmodified": Example("--elastic=1-4", "--samples 1024 --epochs 8 --batch 32", 0.2),
    "lightning": Example("--elastic=1-2", "--samples 512 --epochs 8", 0.3),
    "volumes": Example(
        "--elastic=2-4,parallel=spatial,unit=2", f"{VOLUMES} --checkpoint-every 2", 0.6
    ),
}


class Examples(StagedJobs):
    """Jobs of the examples.

    Attributes:
        explained: the answer of `selastic explain` for the one without checkpoints.
    """

    explained = ""

    def submit(self, names: list[str]) -> None:
        for name in names:
            example = SUBMITTED[name]
            scripts = f"{STAGE}/paced" if example.step_s else EXAMPLES
            words = (
                f"cd {STAGE} && OUT={STAGE}/{name} EXAMPLES={scripts} REAL_EXAMPLES={EXAMPLES}"
                f" STEP_S={example.step_s} sbatch --parsable --output={STAGE}/{name}.log"
                f" {example.options} {EXAMPLES}/train_{name}.sbatch {example.arguments}"
            )
            self.jobs[name] = int(self.cluster.exec(words, user="alice").stdout)
            self.cluster.jobs.append(self.jobs[name])

    def watch(self) -> None:
        """Wait until the last job has ended; order stages for the GPT once it has two GPUs."""
        end = time.monotonic() + WAIT_FACTOR * PATIENCE_S
        ordered = False
        while True:
            running, losses = self.running("losses.jsonl")
            if not running:
                return
            assert time.monotonic() < end, f"{running}\n{self.daemon.log()}"
            if "unmodified" in running and "Not yet" not in self.explained:
                job = str(self.jobs["unmodified"])
                self.explained = self.daemon.selastic("explain", job, check=False)
            two = losses.get("gpt", {}).get("layout") == "2x1"
            if not ordered and "gpt" in running and two:
                self.daemon.selastic("update", str(self.jobs["gpt"]), "--layout", "1x2")
                ordered = True
            time.sleep(1)

    def grew(self, name: str, *, least: int = 1) -> None:
        """Check that a job was resized, from its least size to twice that, and completed."""
        state, gpus = self.sizes(name)
        assert state == "COMPLETED", self.log(name)
        assert least in gpus, gpus
        assert 2 * least in gpus, f"{gpus}\n{self.log(name)}\n{self.daemon.log()}"


def losses(lines: list[dict[str, Any]]) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines}


@pytest.fixture(scope="module")
def examples(cluster: SlurmCluster) -> Iterator[Examples]:
    cluster.exec(f"rm -rf {STAGE}; install -d -o alice -g alice {STAGE} {STAGE}/paced")
    names = list(SUBMITTED)
    if cluster.exec("python3 -c 'import lightning'", node="g01", check=False).returncode:
        names.remove("lightning")
    for name in names:
        cluster.exec(f"cat >{STAGE}/paced/train_{name}.py", stdin=PACED.read_text(), user="alice")
    daemon = Daemon(cluster, eager_config().replace("notice_s = 10", "notice_s = 30"), reporters=())
    examples = Examples(cluster, daemon, STAGE)
    try:
        daemon.start()
        examples.submit(names)
        # Undisturbed, beside them.
        runs = "; ".join(
            f"python3 train_{name}.py {arguments} --out {STAGE}/reference-{name}"
            for name, arguments in REFERENCES.items()
        )
        references = cluster.exec(
            f"cd {EXAMPLES}; export OMP_NUM_THREADS=1; ({runs}) </dev/null"
            f" >{STAGE}/references.log 2>&1 & echo $!",
            user="alice",
        ).stdout.strip()
        examples.watch()
        cluster.exec(f"while kill -0 {references}; do sleep 0.2; done 2>/dev/null")
        yield examples
    finally:
        daemon.close()
        cluster.exec(f"rm -rf {STAGE}")
    assert "Traceback" not in daemon.log()


def test_the_gpt_learns_in_any_layout_what_an_undisturbed_one_does(examples: Examples) -> None:
    examples.grew("gpt")
    lines = examples.records("gpt", "losses.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 101))
    # Begun alone, resized by the controller, cut into stages by its owner's order.
    layouts = [layout for layout, _ in groupby(line["layout"] for line in lines)]
    assert layouts in (["1x1", "2x1", "1x2"], ["1x1", "1x2"])
    found, expected = losses(lines), losses(examples.records("reference-gpt", "losses.jsonl"))
    assert found == pytest.approx(expected, rel=1e-4)
    assert found[100] < found[1] / 2


def test_ranks_that_share_each_sample_become_two_groups_with_the_same_losses(
    examples: Examples,
) -> None:
    examples.grew("volumes", least=2)
    lines = examples.records("volumes", "losses.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 41))
    layouts = [layout for layout, _ in groupby(line["layout"] for line in lines)]
    assert layouts == ["1x1s2", "2x1s2"]
    expected = losses(examples.records("reference-volumes", "losses.jsonl"))
    assert losses(lines) == pytest.approx(expected, rel=1e-5)


def test_the_cnn_learns_although_it_is_resized(examples: Examples) -> None:
    """Batch-norm makes its losses depend on the number of ranks a little."""
    examples.grew("cnn")
    lines = examples.records("cnn", "epochs.jsonl")
    assert [line["epoch"] for line in lines] == list(range(6))
    assert lines[-1]["validation_loss"] < lines[0]["validation_loss"]
    assert lines[-1]["accuracy"] > 0.2
    assert all(a["frozen"] <= b["frozen"] for a, b in pairwise(lines))


def test_the_plain_loop_is_resized_by_its_own_checkpoints(examples: Examples) -> None:
    examples.grew("plain")
    assert "resumed: the script has read its newest checkpoint" in examples.log("plain")
    found = losses(examples.records("plain", "losses.jsonl"))
    assert sorted(found) == list(range(1, 257))
    assert found[256] < found[1] / 2


def test_a_script_without_checkpoints_keeps_what_it_has(examples: Examples) -> None:
    assert examples.sizes("unmodified") == ("COMPLETED", [2]), examples.log("unmodified")
    assert "Not yet:" in examples.explained
    said = re.findall(r"epoch (\d) with 2 rank\(s\): loss (\S+)", examples.log("unmodified"))
    assert [epoch for epoch, _ in said] == [str(epoch) for epoch in range(8)]
    assert float(said[-1][1]) < float(said[0][1])


def test_lightning_is_resized_between_epochs(examples: Examples) -> None:
    if "lightning" not in examples.jobs:
        pytest.skip("PyTorch Lightning is not installed on the cluster")
    examples.grew("lightning")
    # What comes after the checkpoint that the controller waited for is trained on again.
    last = {line["epoch"]: line for line in examples.records("lightning", "epochs.jsonl")}
    assert sorted(last) == list(range(8))
    assert {line["world"] for line in last.values()} == {1, 2}
    assert last[7]["loss"] < last[0]["loss"] / 2
