"""Shape of a test cluster: its nodes, their types and racks.

Imported on the host and, to write Slurm's configuration, in the containers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network

from clusterlib.slurm_build import DEBIAN_RELEASE

TYPES = ("a100", "v100")
CTLD_HOST = 2  # number of the controller's address within the subnet
FARM_HOST = 3
FIRST_NODE_HOST = 11
MAX_NODES = 200  # containers; more nodes than this want --farm
MAX_FARM = 1000
FIRST_FARM_PORT = 17001


@dataclass(frozen=True)
class Node:
    """One node in Slurm's terms."""

    name: str
    gpu_type: str
    rack: int
    address: str
    port: int


@dataclass(frozen=True)
class Layout:
    """Input from which the Compose file and Slurm's configuration are generated."""

    nodes: int = 6
    gpus_per_node: int = 4
    shards: int = 0  # parts of each GPU that jobs may ask for; 0: whole GPUs only
    farm: bool = False  # all slurmds in one container
    subnet: str = "10.89.0.0/24"
    extra_conf: str = ""  # lines appended to slurm.conf
    small_mb: int = 0  # of a file system at /small that all hosts share and tests fill; 0: none
    slurm: str = DEBIAN_RELEASE

    def environment(self) -> dict[str, str]:
        """Return the environment variables that carry the layout into the containers."""
        return {
            "CLUSTER_NODES": str(self.nodes),
            "CLUSTER_GPUS_PER_NODE": str(self.gpus_per_node),
            "CLUSTER_SHARDS": str(self.shards),
            "CLUSTER_FARM": "1" if self.farm else "",
            "CLUSTER_SUBNET": self.subnet,
            "CLUSTER_EXTRA_CONF": self.extra_conf,
            "CLUSTER_SLURM": self.slurm,
        }

    @staticmethod
    def from_environment(env: Mapping[str, str] = os.environ) -> Layout:
        """Return the layout that `environment` wrote."""
        return Layout(
            nodes=int(env["CLUSTER_NODES"]),
            gpus_per_node=int(env["CLUSTER_GPUS_PER_NODE"]),
            shards=int(env["CLUSTER_SHARDS"]),
            farm=bool(env["CLUSTER_FARM"]),
            subnet=env["CLUSTER_SUBNET"],
            extra_conf=env["CLUSTER_EXTRA_CONF"],
            slurm=env["CLUSTER_SLURM"],
        )

    def host(self, number: int) -> str:
        """Return the address with this number; fixed, so that a restarted node keeps its own."""
        return str(IPv4Network(self.subnet)[number])

    def rack_size(self) -> int:
        """Return the nodes per rack: three for up to nine nodes, eight above."""
        return 3 if self.nodes <= 9 else 8

    def node_list(self) -> list[Node]:
        """Return the nodes; every rack has both types, and the odd node is of each type in turn."""
        return [self._node(index) for index in range(self.nodes)]

    def _node(self, index: int) -> Node:
        rack, place = divmod(index, self.rack_size())
        size = min(self.rack_size(), self.nodes - rack * self.rack_size())
        of_first_type = (size + 1 - rack % 2) // 2
        width = 3 if self.farm or self.nodes > 99 else 2
        return Node(
            name=f"g{index + 1:0{width}d}",
            gpu_type=TYPES[0] if place < of_first_type else TYPES[1],
            rack=rack + 1,
            address=self.host(FARM_HOST if self.farm else FIRST_NODE_HOST + index),
            port=FIRST_FARM_PORT + index if self.farm else 6818,
        )
