"""Slurm's switches and blocks, from `scontrol show topology`; pyslurm has no class for them.

From Slurm 25.05 on, topology.yaml can define several topologies, and a partition can name one. A
node then stands in that of the first partition that names one, else in the cluster's default.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import structlog

from slurm_elastic.core.cluster import Switch
from slurm_elastic.core.nodelist import expand
from slurm_elastic.slurm.command_environment import command_environment

_TIMEOUT_S = 15
#: A partition and its topology, in a line of `scontrol -o show partition`.
_NAMED = re.compile(r"^PartitionName=(\S+)(?=.* Topology=(\S+))", re.MULTILINE)
_UNSUPPORTED = " is not supported, jobs are kept together by node only"
_KNOWN_KINDS = ("SwitchName", "BlockName", "AggregatedBlock")


class SiteTopologies(NamedTuple):
    """Switches of a site, and the parts of its topologies that are not used.

    Attributes:
        switches: of the cluster's default topology and of those that partitions name.
        unused: topology and partition, "torus of partition gpu", → why it is not used.
    """

    switches: tuple[Switch, ...]
    unused: Mapping[str, str]


def read_switches() -> tuple[Switch, ...]:
    """Ask slurmctld. Empty without topology/tree or topology/block, or without an answer."""
    topologies = read_topologies()
    for name, reason in topologies.unused.items():
        structlog.get_logger("topology").warning(f"topology {name} is left out: {reason}")
    return topologies.switches


def read_topologies() -> SiteTopologies:
    """Ask slurmctld for its default topology, and for those that partitions name."""
    named: dict[str, tuple[str, str]] = {}
    for partition, name in _NAMED.findall(_show("partition")):
        if name not in named:
            named[name] = (partition, _show("topology", name))
    return combined(_show("topology"), named)


def combined(default: str, named: Mapping[str, tuple[str, str]]) -> SiteTopologies:
    """Put the topologies of a site together.

    Args:
        default: what Slurm shows of the cluster's default topology.
        named: name of a topology → the first partition that names it, and what Slurm shows of it.
    """
    trees: dict[str, tuple[Switch, ...]] = {}
    unused: dict[str, str] = {}
    taken: set[str] = set()
    if kind := _unknown_kind(default):
        unused["of the cluster"] = f"{kind}{_UNSUPPORTED}"
    for name, (partition, text) in named.items():
        label = f"{name} of partition {partition}"
        if text == default:
            continue
        tree = parse_topology(text)
        nodes = {node for switch in tree for node in switch.nodes}
        if kind := _unknown_kind(text):
            unused[label] = f"{kind}{_UNSUPPORTED}"
        elif shared := nodes & taken:
            unused[label] = f"{min(shared)} is in the topology of another partition"
        else:
            trees[name] = tree
            taken |= nodes
    switches = _without(parse_topology(default), taken)
    for name, tree in trees.items():
        switches += _renamed(tree, {s.name for s in switches}, name)
    return SiteTopologies(switches, unused)


def _show(*words: str) -> str:
    """Return the output of `scontrol show`, a line for each record; "" if it fails."""
    try:
        process = subprocess.run(
            ["scontrol", "-o", "show", *words],
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=command_environment(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.decode(errors="replace") if process.returncode == 0 else ""


def _unknown_kind(text: str) -> str:
    """Return the kind of a topology that is not read, `RingName`; "" if it is read, or flat."""
    kind, equals, _ = text.partition("=")
    return kind.strip() if equals and kind.strip() not in _KNOWN_KINDS else ""


def _without(switches: Sequence[Switch], nodes: set[str]) -> tuple[Switch, ...]:
    """Return switches without some nodes, and without the switches that are empty then."""
    kept = [
        dataclasses.replace(s, nodes=tuple(n for n in s.nodes if n not in nodes))
        for s in switches
        if not s.nodes or not nodes.issuperset(s.nodes)
    ]
    names = {s.name for s in kept}
    return tuple(
        dataclasses.replace(s, children=tuple(c for c in s.children if c in names)) for s in kept
    )


def _renamed(switches: Sequence[Switch], taken: set[str], name: str) -> tuple[Switch, ...]:
    """Return the switches of a topology with names that no other topology has."""
    names = {s.name: f"{name}/{s.name}" if s.name in taken else s.name for s in switches}
    return tuple(
        dataclasses.replace(
            s, name=names[s.name], children=tuple(names.get(c, c) for c in s.children)
        )
        for s in switches
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
        link_speed=int(pairs.get("LinkSpeed", "1")) or 1,  # topology.yaml has none: 0
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
