r"""Links between the GPUs of a node, from `Links=` of gres.conf.

slurmctld does not report links: the file is read on the controller's host. Links are unknown
where the file is missing, or where slurmd detects them (AutoDetect=); then `[topology] domains`
of elastic.toml gives them.

>>> parse_link_domains(
...     "NodeName=g[01-02] Name=gpu File=/dev/nvidia0 Links=-1,4,0\n"
...     "NodeName=g[01-02] Name=gpu File=/dev/nvidia1 Links=4,-1,0\n"
...     "NodeName=g[01-02] Name=gpu File=/dev/nvidia2 Links=0,0,-1\n").of("g02")
((0, 1), (2,))
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import networkx as nx

from slurm_elastic.core.nodelist import expand

_SLURM_CONF = "/etc/slurm/slurm.conf"
#: Key of lines without NodeName, which hold for all nodes.
_EVERYWHERE = ""
#: Per node; lines with more are taken for a typing error.
_MOST_GPUS = 1024

Domains = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LinkDomains:
    """Link domains by node; key "" holds for nodes without lines of their own."""

    by_node: dict[str, Domains] = field(default_factory=dict)

    def of(self, node: str) -> Domains:
        """Return the indexes of the GPUs of each domain of a node; () if unknown."""
        return self.by_node.get(node) or self.by_node.get(_EVERYWHERE, ())


def read_link_domains() -> LinkDomains:
    """Read gres.conf beside slurm.conf ($SLURM_CONF); no domains if it cannot be read."""
    path = Path(os.environ.get("SLURM_CONF") or _SLURM_CONF).with_name("gres.conf")
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return LinkDomains()
    return parse_link_domains(text)


def parse_link_domains(text: str) -> LinkDomains:
    """Read the text of gres.conf; lines that cannot be parsed are left out."""
    graphs: dict[str, nx.Graph[int]] = {}
    counts: dict[str, int] = {}
    linked: set[str] = set()
    for pairs in _lines(text):
        if pairs.get("name", "gpu").lower() != "gpu":
            continue
        try:
            nodes = expand(pairs.get("nodename", "")) or (_EVERYWHERE,)
            count = len(expand(pairs.get("file", ""))) or int(pairs.get("count", "1"))
            if count > _MOST_GPUS:
                continue
            links = [int(n) for n in pairs.get("links", "").split(",") if n]
        except ValueError:
            continue
        for node in nodes:
            first = counts.get(node, 0)
            counts[node] = first + count
            graph = graphs.setdefault(node, nx.Graph())
            graph.add_nodes_from(range(first, first + count))
            if links and count == 1:
                linked.add(node)
                index = links.index(-1) if -1 in links else first
                graph.add_edges_from((index, other) for other, n in enumerate(links) if n > 0)
    return LinkDomains({n: _domains(graphs[n], counts[n]) for n in linked})


def _domains(graph: nx.Graph[int], gpus: int) -> Domains:
    parts = [tuple(sorted(i for i in part if i < gpus)) for part in nx.connected_components(graph)]
    return tuple(sorted(part for part in parts if part))


def _lines(text: str) -> Iterator[dict[str, str]]:
    """Yield each line's `Key=value` pairs, keys in lower case."""
    for line in text.replace("\\\n", " ").splitlines():
        tokens = line.partition("#")[0].split()
        pairs = {k.lower(): v for k, eq, v in (w.partition("=") for w in tokens) if eq}
        if pairs and "include" not in pairs:
            yield pairs
