"""A slow network on one machine: each rank in its own network namespace.

    rank 0 [eth0] ---- bridge ---- [eth0] rank 1      10.77.0.1, 10.77.0.2, ...

Every interface, and the bridge's port to it, has a token bucket filter (tbf): a full-duplex
port of so many bits/s, as a machine has on a switch. Where ordinary users may have user
namespaces no root is needed: nothing outside the namespaces changes, and all of it goes
when the processes end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

_INSIDE = "SELASTIC_SLOW_NETWORK"
#: Each alone is in Debian's and Fedora's smallest installations, not so in containers.
_TOOLS = {"unshare": "util-linux", "ip": "iproute2", "tc": "iproute2"}
_TRY = (
    "ip link set lo up && ip link add br0 type bridge && "
    "ip link add one0 type veth peer name two0 && "
)
#: Of a packet. Larger ones cost less processor time.
_MTU = 8000
#: What a port lets through at once: one packet and its headers, or small messages were free.
_BURST_BYTES = 10_000
PORT = 29500
#: Of ranks. Addresses here have no names, of which PyTorch would warn.
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class NoNetworkError(RuntimeError):
    """This machine or user cannot have a slow network; the message has reason and remedy."""


def address(rank: int) -> str:
    """Return the address of a rank.

    >>> address(0)
    '10.77.0.1'
    """
    return f"10.77.0.{rank + 1}"


def enter(module: str, arguments: Sequence[str]) -> None:
    """Start the program again inside a new network namespace; return if this is it.

    Args:
        module: what `python -m` runs.
        arguments: its.

    Raises:
        NoNetworkError: it cannot be.
    """
    if os.environ.get(_INSIDE):
        return
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise NoNetworkError(f"a slow network needs `{tool}`: install {package}")
    command = ["unshare", "-n" if os.geteuid() == 0 else "-rn"]
    probe = _TRY + " ".join(_shaping("two0", 1e6))
    tried = subprocess.run(
        [*command, "sh", "-c", probe], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        why = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise NoNetworkError(
            f"a slow network cannot be made here: {why}. It needs network namespaces (as root, or "
            "where users may have user namespaces; not in an ordinary container) and the "
            "kernel's bridge, veth and tbf"
        )
    os.environ[_INSIDE] = "1"
    os.execvp(command[0], [*command, sys.executable, "-m", module, *arguments])  # noqa: S606


class Switch:
    """Processes of the ranks on one switch; as a context, it ends them.

    Args:
        bits_per_s: of each port, in each direction.
    """

    def __init__(self, bits_per_s: float) -> None:
        self._rate = bits_per_s
        self._ranks: list[subprocess.Popen[str]] = []
        _run("ip", "link", "add", "br0", "type", "bridge")
        _run("ip", "link", "set", "br0", "up")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.communicate()
        _run("ip", "link", "delete", "br0")

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start the next rank's process on its own port; the process calls `plug_in` first."""
        rank = len(self._ranks)
        process = subprocess.Popen(
            ["unshare", "-n", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | _ENVIRONMENT,
        )
        self._ranks.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "here\n":
            raise NoNetworkError(f"rank {rank} did not start")
        port = f"port{rank}"
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns",
             str(process.pid))  # fmt: skip
        _run("ip", "link", "set", port, "mtu", str(_MTU), "master", "br0", "up")
        _run(*_shaping(port, self._rate))
        process.stdin.write("go\n")
        process.stdin.flush()
        return process


def plug_in(rank: int, bits_per_s: float) -> None:
    """Set up the network interface, in a rank's process before anything else."""
    print("here", flush=True)
    if not sys.stdin.readline():
        sys.exit(1)
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "address", "add", f"{address(rank)}/24", "dev", "eth0")
    _run("ip", "link", "set", "eth0", "mtu", str(_MTU), "up")
    _run(*_shaping("eth0", bits_per_s))


def _shaping(interface: str, bits_per_s: float) -> list[str]:
    rate = ["rate", f"{bits_per_s:.0f}bit", "burst", str(_BURST_BYTES), "latency", "500ms"]
    return ["tc", "qdisc", "add", "dev", interface, "root", "tbf", *rate]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
