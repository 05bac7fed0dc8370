"""Slurm's switch tree, from `scontrol show topology`; pyslurm has no class for it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

import structlog

from slurm_elastic.core.cluster import Switch
from slurm_elastic.core.nodelist import expand

_TIMEOUT_S = 15


def read_switches() -> tuple[Switch, ...]:
    """Ask slurmctld. Empty without topology/tree or topology/block, or without an answer."""
    try:
        process = subprocess.run(
            ["scontrol", "-o", "show", "topology"],
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return (
        parse_topology(process.stdout.decode(errors="replace")) if process.returncode == 0 else ()
    )


def parse_topology(text: str) -> tuple[Switch, ...]:
    """Parse lines like `SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node[1-2]`.

    Blocks count as switches: `BlockName=b1 BlockIndex=0 Nodes=node[1-2] BlockSize=2`, and above
    them, if BlockSizes= has several values, `AggregatedBlock=b[1-2] …` with their nodes.
    """
    switches: list[Switch] = []
    aggregated_blocks: list[tuple[str, tuple[str, ...]]] = []
    for line in text.splitlines():
        pairs = dict(word.partition("=")[::2] for word in line.split())
        try:
            if "SwitchName" in pairs:
                switches.append(_switch(pairs))
            elif "BlockName" in pairs:
                switches.append(Switch(pairs["BlockName"], 0, expand(pairs.get("Nodes", ""))))
            elif "AggregatedBlock" in pairs:
                aggregated_blocks.append((pairs["AggregatedBlock"], expand(pairs.get("Nodes", ""))))
        except ValueError as error:
            structlog.get_logger("topology").warning(f"{line.split()[0]} is left out: {error}")
    return (*switches, *_aggregated(switches, aggregated_blocks))


def _switch(pairs: Mapping[str, str]) -> Switch:
    return Switch(
        name=pairs["SwitchName"],
        level=int(pairs.get("Level", "0")),
        nodes=expand(pairs.get("Nodes", "")),
        children=expand(pairs.get("Switches", "")),
        link_speed=int(pairs.get("LinkSpeed", "1")),
    )


def _aggregated(
    blocks: list[Switch], aggregated_blocks: list[tuple[str, tuple[str, ...]]]
) -> tuple[Switch, ...]:
    """Return aggregated blocks as switches above the blocks that they contain, the smallest first.

    Slurm does not name their children. An aggregated block of a single block is left out.
    """
    aggregated: list[Switch] = []
    roots = list(blocks)
    for name, nodes in sorted(aggregated_blocks, key=lambda block: len(block[1])):
        members = set(nodes)
        children = [b for b in roots if b.nodes and members.issuperset(b.nodes)]
        if len(children) > 1:
            level = 1 + max(b.level for b in children)
            switch = Switch(name, level, nodes, tuple(b.name for b in children))
            roots = [*(b for b in roots if b not in children), switch]
            aggregated.append(switch)
    return tuple(aggregated)
