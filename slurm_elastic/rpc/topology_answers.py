"""JSON of `selastic topology`; see `answers`."""

from __future__ import annotations

from typing import TypedDict

from slurm_elastic.rpc.answers import Place


class LinkRow(TypedDict):
    """A link and the jobs that communicate over it: `users` by display id, `others` not shown."""

    link: str
    gbit_s: float | None
    users: list[str]
    others: int


class SwitchRow(LinkRow):
    """A switch of `selastic topology`; its link is the one upwards."""

    name: str
    parent: str
    level: int
    link_speed: int


class HolderRow(TypedDict):
    """A job on a node; `devices` are the indexes of its GPUs there."""

    job_id: int
    display_id: str
    elastic: bool
    gpus: int
    devices: list[int] | None


class NodeRow(LinkRow):
    """A node with GPUs; its link is the one to its lowest switch.

    `asleep`: it is not available, but Slurm starts jobs there after a boot.
    """

    name: str
    switch: str
    gpu_type: str
    gpus: int
    used: int
    idle: int
    available: bool
    asleep: bool
    state: str
    domains: list[list[int]]
    holders: list[HolderRow]


class SpreadRow(TypedDict):
    """Distances of a job's GPUs; `shared` names the links that other jobs use as well."""

    job_id: int
    display_id: str
    name: str
    user: str
    elastic: bool
    gpus: int
    gpu_type: str
    where: list[Place]
    tier: str
    node_count: int
    rack_count: int
    shared: list[str]


class MeasuredLinkRow(TypedDict):
    """A tier's links by the stalls of so many jobs of so many owners.

    `counts` in decisions for `all` jobs, their `own` or `none`.
    """

    gbit_s: float
    jobs: int
    owners: int
    counts: str


class TopologyAnswer(TypedDict):
    """`selastic topology`; `measured` has tiers that `speeds` has not."""

    time: float
    notes: list[str]
    speeds: dict[str, float]
    measured: dict[str, MeasuredLinkRow]
    switches: list[SwitchRow]
    nodes: list[NodeRow]
    jobs: list[SpreadRow]
