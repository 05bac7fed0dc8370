"""The Compose file of a layout, as JSON, which both generations of Compose read."""

from __future__ import annotations

from typing import Any

from clusterlib.layout import CTLD_HOST, FARM_HOST, Layout

LABEL = "slurm-elastic.cluster"


def image_name(name: str) -> str:
    """Return the name of a cluster's image; each cluster has its own."""
    return f"slurm-elastic-cluster:{name}"


def compose_file(name: str, layout: Layout) -> dict[str, Any]:
    """Return the Compose file: ctld, one container per node or one farm, a volume, a network."""
    roles = {"ctld": ("ctld", layout.host(CTLD_HOST))}
    if layout.farm:
        roles["farm"] = ("farm", layout.host(FARM_HOST))
    else:
        roles |= {node.name: ("node", node.address) for node in layout.node_list()}
    volumes: dict[str, Any] = {"shared": {"labels": {LABEL: name}}}
    if layout.small_mb:
        tmpfs = {"type": "tmpfs", "device": "tmpfs", "o": f"size={layout.small_mb}m,mode=1777"}
        volumes["small"] = {"labels": {LABEL: name}, "driver_opts": tmpfs}
    return {
        "services": {
            host: _service(name, layout, host, role, address)
            for host, (role, address) in roles.items()
        },
        "networks": {"default": {"ipam": {"config": [{"subnet": layout.subnet}]}}},
        "volumes": volumes,
    }


def _service(name: str, layout: Layout, host: str, role: str, address: str) -> dict[str, Any]:
    return {
        "image": image_name(name),
        "command": ["cluster-start", role],
        "container_name": f"{name}-{host}",
        "hostname": host,
        "environment": layout.environment(),
        "labels": {LABEL: name},
        "networks": {"default": {"ipv4_address": address}},
        "volumes": ["shared:/shared", *(["small:/small"] if layout.small_mb else [])],
        "init": True,  # reaps the daemons that tests kill
        "shm_size": "512m",  # torch's data loaders
        "stop_grace_period": "1s",
    }
