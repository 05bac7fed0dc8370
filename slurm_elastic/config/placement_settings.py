"""Sections of elastic.toml about the nodes that jobs get: distance, neighbours, links."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.config.key import key


def _timers(value: str) -> None:
    names = ("own", "fixed", "auto", "nowait", "full")
    node, _, rack = value.partition(",")
    try:
        valid = value in names or 0 <= float(node) <= float(rack)
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"{', '.join(names)}, or NODE,RACK in leases with NODE <= RACK: 12,24")


@dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """Section `[placement]`."""

    mode: str = key(
        "near",
        "`near` takes the nearest place that is free; `delay` may wait for a nearer one.",
        choices=("near", "delay"),
    )
    timers: str = key(
        "own",
        "How long jobs wait: `own` is tuned by past waits; `fixed` is `wait_node_s` and"
        " `wait_rack_s`; `auto`, `nowait`, `full`, or two numbers of leases such as `12,24`, are as"
        " published.",
        parse=_timers,
    )
    lease_s: float = key(300.0, "Seconds of a lease, the unit of tuned timers.", bounds=(1, 1e7))
    wait_node_s: float = key(
        300.0,
        "Seconds after which a job that loses speed accepts more nodes than it needs; with `own`"
        " the least.",
        bounds=(0, 1e7),
    )
    wait_rack_s: float = key(
        900.0,
        "Seconds after which a job that loses speed accepts more racks than it needs; with `own`"
        " the least.",
        bounds=(0, 1e7),
    )
    tolerance: float = key(
        0.05, "A job that loses at most this fraction of its speed does not wait.", bounds=(0, 1)
    )


@dataclass(frozen=True, kw_only=True)
class NeighbourSettings:
    """Section `[neighbours]`."""

    mode: str = key(
        "observe",
        "Jobs on one node: `observe` learns how much they slow each other down, and `selastic"
        " explain` shows it; `act` also keeps jobs apart that slow each other down too much.",
        choices=("off", "observe", "act"),
    )
    gate: float = key(
        0.9,
        "Least speed of a job beside another one, relative to its speed alone; below it, the pair"
        " is kept apart where another place is free.",
        bounds=(0.1, 1),
    )
    measurements: int = key(
        3,
        "Measurements of 30 s of a pair before a running job moves away from its neighbour.",
        bounds=(1, 20),
    )
    share_gpus: str = key(
        "off",
        "`act`: a job with share=yes that finds no free GPU gets half of the GPU of another one"
        " with share=yes, on nodes with an even number of shards per GPU; needs `mode` `observe`"
        " or `act`.",
        choices=("off", "act"),
    )


@dataclass(frozen=True, kw_only=True)
class TopologySettings:
    """Section `[topology]`."""

    speeds: dict[str, float] = key(
        {},
        "Gbit/s of a link of each tier: inside a link domain of GPUs, between the domains of a"
        " node, from a node to its rack, from a rack upwards, e.g."
        " { domain = 4800.0, rack = 200.0 }. They set what distance costs jobs; rack and spine are"
        " measured where they are not set.",
        names=("domain", "node", "rack", "spine"),
    )
    uplinks: dict[str, float] = key(
        {}, 'Gbit/s of single links, from a node or switch upwards, e.g. { "g[01-04]" = 400.0 }.'
    )
    domains: dict[str, int] = key(
        {},
        "GPUs of a link domain (NVLink, one PCIe switch), by node or GPU type, e.g. { a100 = 4 };"
        " takes precedence over Links= in gres.conf.",
    )
    spatial_reach: str = key(
        "domain",
        "How far a spatial group (`parallel=spatial`) may reach: `domain`, within one link domain"
        " of GPUs, or one node where domains are not known; `node`, within one node; `any`.",
        choices=("domain", "node", "any"),
    )
