"""Two network namespaces of this machine, joined by a link of a chosen rate, and ranks in them.

The namespaces need root.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from slurm_elastic.job.launch import free_port

#: Names, devices and addresses of both ends.
NAMESPACES = ("overlap-a", "overlap-b")
LINKS = ("overlap0", "overlap1")
ADDRESSES = ("10.231.7.1", "10.231.7.2")


class LinkSetupError(Exception):
    """Namespaces that cannot be made here; the text says why."""


class Link:
    """Two network namespaces, joined by a pair of veth."""

    def shape(self, rate: str, burst: str = "256kb") -> None:
        """Limit both directions to a rate, but for bytes that pass at once, as `tc` reads both."""
        for namespace, device in zip(NAMESPACES, LINKS, strict=True):
            limit = f"tbf rate {rate} burst {burst} latency 50ms"
            _run(f"ip netns exec {namespace} tc qdisc replace dev {device} root {limit}")

    def unshape(self) -> None:
        """End the limit."""
        for namespace, device in zip(NAMESPACES, LINKS, strict=True):
            _run(f"ip netns exec {namespace} tc qdisc del dev {device} root")


@contextlib.contextmanager
def joined_namespaces() -> Iterator[Link]:
    """Make the namespaces, and delete them at the end.

    Raises:
        LinkSetupError: that is not possible here.
    """
    missing = [name for name in ("ip", "tc") if not shutil.which(name)]
    if missing or os.geteuid():
        raise LinkSetupError(f"no {missing[0]} here" if missing else "not root")
    try:
        for namespace in NAMESPACES:
            _run(f"ip netns add {namespace}")
            _run(f"ip -n {namespace} link set lo up")
        _run(f"ip link add {LINKS[0]} type veth peer name {LINKS[1]}")
        for namespace, device, address in zip(NAMESPACES, LINKS, ADDRESSES, strict=True):
            _run(f"ip link set {device} netns {namespace}")
            _run(f"ip -n {namespace} addr add {address}/30 dev {device}")
            _run(f"ip -n {namespace} link set {device} up")
        yield Link()
    finally:
        for namespace in NAMESPACES:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def figures_of_ranks(
    module: str, ranks: int, options: Mapping[str, object], *, link: Link | None
) -> list[dict[str, Any]]:
    """Run a module in several processes of one thread each; return what each has written.

    Each has `RANK`, `WORLD_SIZE` and what gloo needs in its environment, and writes JSON to the
    file RANK.json in the directory of its option `--out`.

    Args:
        module: of each process.
        ranks: number of processes.
        options: of its command line, by name.
        link: each of two ranks runs at one end of it; None: all on the loopback device.

    Raises:
        SystemExit: a rank failed.
    """
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", module, *given, "--out", out]
        # A job that this runs in is another matter. Namespaces have no names, of which gloo warns.
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RANK"))}
        plain |= {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port(29512))}
        plain |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "USE_LIBUV": "0", "WORLD_SIZE": str(ranks)}
        plain |= {"MASTER_ADDR": ADDRESSES[0] if link else "127.0.0.1"}
        processes = []
        for rank in range(ranks):
            environment = plain | {"RANK": str(rank)}
            environment |= {"GLOO_SOCKET_IFNAME": LINKS[rank] if link else "lo"}
            where = ["ip", "netns", "exec", NAMESPACES[rank]] if link else []
            processes.append(subprocess.Popen([*where, *command], cwd=ROOT, env=environment))
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"{' '.join(given)}: ranks ended with {codes}")
        paths = [Path(out) / f"{rank}.json" for rank in range(ranks)]
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkSetupError(f"{command}: {done.stderr.strip()}")
