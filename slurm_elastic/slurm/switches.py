"""Slurm's switch tree, as `scontrol show topology` prints it; pyslurm has no class for it."""

from __future__ import annotations

import subprocess

from slurm_elastic.cluster import Switch
from slurm_elastic.nodelist import expand

_TIMEOUT_S = 15


def read_switches() -> tuple[Switch, ...]:
    """Ask slurmctld. Empty without topology/tree or topology/block, or without an answer."""
    try:
        done = subprocess.run(
            ["scontrol", "-o", "show", "topology"],
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_topology(done.stdout.decode(errors="replace")) if done.returncode == 0 else ()


def parse_topology(text: str) -> tuple[Switch, ...]:
    """Lines like `SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node[1-2]`."""
    switches = []
    for line in text.splitlines():
        pairs = dict(word.partition("=")[::2] for word in line.split())
        if "SwitchName" in pairs:
            switches.append(
                Switch(
                    name=pairs["SwitchName"],
                    level=int(pairs.get("Level", "0")),
                    nodes=expand(pairs.get("Nodes", "")),
                    children=expand(pairs.get("Switches", "")),
                    link_speed=int(pairs.get("LinkSpeed", "1")),
                )
            )
        elif "BlockName" in pairs:
            switches.append(Switch(pairs["BlockName"], 0, expand(pairs.get("Nodes", ""))))
    return tuple(switches)
