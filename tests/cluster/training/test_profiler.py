"""`selastic profile` finds known delays, and no others."""

import json
from pathlib import Path

import pytest

from tests.support.container_cluster.slow_links import slow
from tests.support.container_cluster.slurm_cluster import SlurmCluster

DRIVER = Path(__file__).parents[1] / "drivers" / "planted.py"
HOME = "/shared/home/alice/profiler"
pytestmark = pytest.mark.alone
#: Seconds of a step.
COMPUTE = 0.12
BATCH = 4
NODES = ("g01", "g02")
#: What goes over the wire for a byte of data: 1448 of them in each 1514.
FRAME = 1514 / 1448

#: Within 15 % of what was planted; no other part by more than 5 % of the step.
FOUND, OTHERS = 0.15, 0.05


class Planted:
    """Trainings with known delays on two nodes of one rack."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        cluster.exec(f"rm -rf {HOME} && mkdir {HOME}", user="alice")
        cluster.exec(["tee", f"{HOME}/planted.py"], user="alice", stdin=DRIVER.read_text())
        cluster.exec(f"head -c 2097152 /dev/urandom > {HOME}/data.bin", user="alice")

    def profile(
        self, name: str, *, shapes: str, nodes: int = 1, gpus: int = 1, width: int = 64,
        compute: float = COMPUTE, loader: float = 0.0, cold: float = 0.0, steps: int = 4,
        data: bool = True,
    ) -> dict[str, dict]:  # fmt: skip
        """Profile configurations by shape; delays in seconds, of `loader` and `cold` per sample."""
        variables = {
            "OMP_NUM_THREADS": "1", "PLANTED_FILE": f"{HOME}/data.bin",
            "PLANTED_OUT": f"{HOME}/{name}-checkpoints", "PLANTED_COMPUTE": compute,
            "PLANTED_LOADER": loader, "PLANTED_COLD": cold, "PLANTED_WIDTH": width,
        }  # fmt: skip
        exports = " ".join(f"{k}={v}" for k, v in variables.items())
        named = ",".join(NODES[:nodes])
        command = (
            f"cd {HOME} && export {exports} && salloc -Q --immediate=20 -t 5 -N{nodes} -w {named}"
            f" --gpus-per-node={gpus} --ntasks-per-node={gpus}"
            f" selastic profile --dir {name} --again --shapes {shapes} --batch {BATCH}"
            f" --repeats 3 --steps {steps} --warm-up 1"
            + (" --data data.bin" if data else "")
            + " --json -- python3 planted.py"
        )
        done = self.cluster.exec(command, user="alice", timeout=280)
        kept = self.cluster.exec(f"ls {HOME}", user="alice").stdout
        assert "checkpoints" not in kept
        found = json.loads(done.stdout)["configurations"]
        return {f"{c['gpus']}@{c['nodes']}": c for c in found}


@pytest.fixture(scope="module")
def planted(cluster: SlurmCluster) -> Planted:
    return Planted(cluster)


def check(configuration: dict, **planted_s: float) -> None:
    """Compare each part with the delay that was set, in seconds of a step."""
    step = sum(
        configuration[part]["seconds"]
        for part in ("compute", "interconnect", "network", "prep", "fetch")
        if configuration[part]
    )
    for part in ("interconnect", "network", "prep", "fetch"):
        if configuration[part] is None:
            assert part not in planted_s, part
            continue
        seconds, expected = configuration[part]["seconds"], planted_s.get(part, 0.0)
        if expected:
            assert seconds == pytest.approx(expected, rel=FOUND), (part, configuration)
        else:
            assert seconds <= OTHERS * step, (part, configuration)


def test_one_process_waits_for_nothing(planted: Planted) -> None:
    found = planted.profile("alone", shapes="1", compute=0.6)
    check(found["1@1"])
    assert found["1@1"]["compute"]["seconds"] == pytest.approx(0.6, rel=FOUND)
    # Its ranks, below slurmstepd, were found: a step is one wait.
    assert 0 <= found["1@1"]["use"]["busy_cpus"] < 1


def test_a_slow_loader_and_cold_reads_are_told_apart(planted: Planted) -> None:
    found = planted.profile("data", shapes="1", loader=0.1, cold=0.12)
    check(found["1@1"], prep=BATCH * 0.1, fetch=BATCH * 0.12)


def test_a_slow_network_is_the_networks(cluster: SlurmCluster, planted: Planted) -> None:
    # Of a megabyte: TCP begins each exchange with ten frames, and waits for an answer to them.
    width, mbit = 512, 30.0
    both = [NODES, NODES[::-1]]
    with slow(cluster, both, kbit_s=mbit * 1e3):
        # Long steps: the processes need some milliseconds of a busy core for a megabyte, too.
        found = planted.profile(
            "network", shapes="2,2@2", nodes=2, gpus=2, width=width, compute=0.3, steps=6,
            data=False,
        )  # fmt: skip
    # Two ranks exchange all gradients once in each direction, in frames with headers.
    gradients = (width * width + width) * 4
    check(found["2@2"], network=gradients * FRAME * 8 / (mbit * 1e6))
    check(found["2@1"])
