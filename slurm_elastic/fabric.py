"""Link speeds and GPU link domains of the cluster, from `[topology]` of elastic.toml.

Links are named as in `topology.Topology.links`: a node's link to its rack by the node, a switch's
uplink by `switch:NAME`. Settings for nodes, switches or types that the cluster does not have are
left out and reported in `problems`.

>>> from slurm_elastic.core.cluster import Node, Switch
>>> nodes = (Node(name="a", gpu_type="a100", gpus=4), Node(name="b", gpu_type="v100", gpus=4))
>>> fabric = Fabric.of(
...     Snapshot(time=0, nodes=nodes, jobs=(), switches=(Switch("s", 0, ("a", "b")),)),
...     placement_settings.TopologySettings(
...         speeds={"rack": 100.0}, uplinks={"b": 40.0}, domains={"a100": 2, "c": 2}))
>>> fabric.gbit_s("a"), fabric.gbit_s("b"), fabric.gbit_s("switch:s")
(100.0, 40.0, None)
>>> fabric.domains("a"), fabric.domains("b")
(((0, 1), (2, 3)), ())
>>> fabric.problems
('[topology] domains: c is neither a node nor a GPU type; correct or remove it',)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_elastic.config import placement_settings
from slurm_elastic.core.cluster import Node, Snapshot
from slurm_elastic.core.nodelist import expand, fold

_SWITCH = "switch:"

Domains = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Speeds in Gbit/s, GPUs of a node by index.

    Attributes:
        speeds: by tier, `domain`, `node`, `rack` or `spine`; unknown ones are left out.
        problems: errors of the configuration, one line each.
    """

    speeds: Mapping[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    _uplinks: Mapping[str, float] = field(default_factory=dict)
    _domains: Mapping[str, Domains] = field(default_factory=dict)

    @classmethod
    def of(cls, snapshot: Snapshot, settings: placement_settings.TopologySettings) -> Fabric:
        """Apply the settings to this cluster."""
        uplinks: dict[str, float] = {}
        domains = {n.name: n.domains for n in snapshot.nodes if n.domains}
        problems = [*_uplinks(snapshot, settings, uplinks), *_domains(snapshot, settings, domains)]
        return cls(
            speeds=settings.speeds, problems=tuple(problems), _uplinks=uplinks, _domains=domains
        )

    def gbit_s(self, link: str) -> float | None:
        """Return the speed of a link; None if it is not known."""
        tier = "spine" if link.startswith(_SWITCH) else "rack"
        return self._uplinks.get(link, self.speeds.get(tier))

    def domains(self, node: str) -> Domains:
        """Return the indexes of the GPUs of each link domain of a node; () if not known."""
        return self._domains.get(node, ())

    def in_one_domain(self, node: str, gpus: tuple[int, ...]) -> bool:
        """Return whether these GPUs of a node are in one link domain; False if not known."""
        return any(set(gpus) <= set(domain) for domain in self.domains(node)) if gpus else False


def _uplinks(
    snapshot: Snapshot, settings: placement_settings.TopologySettings, bandwidths: dict[str, float]
) -> Iterator[str]:
    switches = {s.name for s in snapshot.switches}
    for text, speed in settings.uplinks.items():
        names = (text,) if text in switches else _names(text)
        if not names:
            yield _unreadable("uplinks", text)
        for name in names:
            if name in snapshot.node:
                bandwidths[name] = speed
            elif name in switches:
                bandwidths[f"{_SWITCH}{name}"] = speed
        unknown = [n for n in names if n not in snapshot.node and n not in switches]
        if unknown:
            yield _unknown("uplinks", unknown, "switch")


def _domains(
    snapshot: Snapshot, settings: placement_settings.TopologySettings, domains: dict[str, Domains]
) -> Iterator[str]:
    types = {n.gpu_type for n in snapshot.nodes}
    # Types first, so that settings of single nodes override them.
    for text, size in sorted(settings.domains.items(), key=lambda item: item[0] not in types):
        names = (text,) if text in types else _names(text)
        if not names:
            yield _unreadable("domains", text)
        named = {*names}
        nodes = [n for n in snapshot.nodes if n.gpus and (n.name in named or n.gpu_type == text)]
        domains |= {n.name: _even(n, size) for n in nodes if n.gpus % size == 0}
        uneven = [n for n in nodes if n.gpus % size]
        if uneven:
            yield (
                f"[topology] domains: {fold(n.name for n in uneven)} has {uneven[0].gpus} GPUs,"
                f" not divisible by {size}; change the number for {text}"
            )
        unknown = [n for n in names if n not in snapshot.node and n not in types]
        if unknown:
            yield _unknown("domains", unknown, "GPU type")


def _even(node: Node, size: int) -> Domains:
    return tuple(tuple(range(i, i + size)) for i in range(0, node.gpus, size))


def _names(text: str) -> tuple[str, ...]:
    try:
        return expand(text)
    except ValueError:
        return ()


def _unknown(key: str, names: Sequence[str], other: str) -> str:
    verb = "is" if len(names) == 1 else "are"
    return (
        f"[topology] {key}: {fold(names)} {verb} neither a node nor a {other}; correct or remove it"
    )


def _unreadable(key: str, text: str) -> str:
    return f'[topology] {key}: "{text}" is invalid: expected a list of nodes, e.g. g[01-04]'
