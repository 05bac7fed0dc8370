"""Links between the nodes of the container cluster, made slow or cut.

Slow ones have a token bucket filter (tbf) on each node.
"""

import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from clusterlib.lifecycle import container

from tests.support.container_cluster.slurm_cluster import SlurmCluster
from tests.support.needs import require

_DEVICE = "eth0"
#: Seconds of its rate that a fast link may send at once: the kernel's timer has no finer steps.
_BURST_S = 4e-3


def _tc(cluster: SlurmCluster, node: str, *words: str, check: bool = True) -> None:
    _in_network(cluster, node, "tc", *words, check=check)


def _in_network(cluster: SlurmCluster, node: str, *words: str, check: bool = True) -> None:
    """Run a command of this host in the network of a node."""
    pid = _docker("inspect", "-f", "{{.State.Pid}}", container(cluster.name, node))
    command = ["nsenter", "-t", pid, "-n", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


def _docker(*words: str) -> str:
    return subprocess.run(
        ["docker", *words], capture_output=True, text=True, check=True
    ).stdout.strip()


@contextmanager
def cut(cluster: SlurmCluster, node: str) -> Iterator[None]:
    """Cut a node off from all others during the context; connections are not closed.

    Skips the test where the host does not let us change its containers' interfaces.
    """
    require("root")
    require("nsenter")
    require("ip")
    _in_network(cluster, node, "ip", "link", "set", _DEVICE, "down")
    try:
        yield
    finally:
        _in_network(cluster, node, "ip", "link", "set", _DEVICE, "up")


@contextmanager
def slow(
    cluster: SlurmCluster, pairs: Iterable[tuple[str, str]], *, kbit_s: float
) -> Iterator[None]:
    """Limit what the first node of each pair sends to the second to this rate, during the context.

    Skips the test where the host does not let us shape its containers' interfaces.
    """
    require("root")
    require("nsenter")
    require("tc")
    targets: dict[str, list[str]] = {}
    for source, target in pairs:
        targets.setdefault(source, []).append(target)
    shaped = []
    try:
        for source, others in targets.items():
            shaped.append(source)
            add = ("add", "dev", _DEVICE, "parent")
            _tc(cluster, source, "qdisc", *add[:3], "root", "handle", "1:", "htb", "default", "10")
            for leaf in ("10", "20"):
                _tc(cluster, source, "class", *add, "1:", "classid", f"1:{leaf}", "htb",
                    "rate", "10gbit", "quantum", "60000")  # fmt: skip
            _tc(cluster, source, "qdisc", *add, "1:20", "tbf", "rate", f"{kbit_s:.0f}kbit",
                "burst", f"{max(8.0, kbit_s / 8 * _BURST_S):.0f}kb", "limit", "1mb")  # fmt: skip
            for other in others:
                address = cluster.exec(f"getent hosts {other}").stdout.split()[0]
                match = ("match", "ip", "dst", f"{address}/32")
                _tc(cluster, source, "filter", *add, "1:", "protocol", "ip", "u32", *match,
                    "flowid", "1:20")  # fmt: skip
        yield
    finally:
        for source in shaped:
            _tc(cluster, source, "qdisc", "del", "dev", _DEVICE, "root", check=False)
