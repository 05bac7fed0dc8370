"""Two network namespaces of this machine, joined by a link of a chosen rate; needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

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


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkSetupError(f"{command}: {done.stderr.strip()}")
