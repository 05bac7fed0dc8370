"""Answer to `topology`: the network, the place of each job, and shared links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from slurm_elastic.controller.queries.job_answers import HOLDING, JobRows, order
from slurm_elastic.controller.queries.view import NoAnswerError, View, Viewer
from slurm_elastic.core.cluster import Allocation, Job, Node
from slurm_elastic.fabric import Fabric
from slurm_elastic.models.links import GBIT
from slurm_elastic.placement.eligibility import links_seen
from slurm_elastic.rpc.topology_answers import (
    HolderRow,
    LinkRow,
    NodeRow,
    SpreadRow,
    SwitchRow,
    TopologyAnswer,
)
from slurm_elastic.topology import Topology, problems

_SWITCH = "switch:"


def topology(view: View, viewer: Viewer) -> TopologyAnswer:
    """Return switches, nodes with GPUs, and the jobs that hold some.

    Jobs that the viewer may not see are only counted: as GPUs in use, and as `others` on a link.

    Raises:
        NoAnswerError: nodes are private.
    """
    if not viewer.may_know("nodes"):
        raise NoAnswerError("topology: nodes are private here (PrivateData=nodes): ask an operator")
    snapshot, settings = view.snapshot, view.topology
    fabric = Fabric.of(snapshot, settings)
    tree = Topology.of(snapshot)
    estimates = links_seen(snapshot, view.records, fabric.speeds)
    places = {
        job.job_id: job.allocation
        for job in snapshot.jobs
        if job.allocation and job.state in HOLDING and _present(job.allocation, snapshot.node)
    }
    rows = _LinkRows(view, viewer, fabric, tree, places)
    parents = {c: s.name for s in snapshot.switches for c in s.children}
    shown = [j for j in viewer.jobs(view) if j.job_id in places]
    return {
        "time": snapshot.time,
        "notes": network_problems(view),
        "speeds": dict(fabric.speeds),
        "measured": {
            tier: {
                "gbit_s": link.bytes_s / GBIT,
                "jobs": link.jobs,
                "owners": link.owners,
                "counts": estimates.counts(tier),
            }
            for tier, link in estimates.links.items()
        },
        "switches": [
            rows.switch(s.name, parents.get(s.name, ""), s.level)
            for s in sorted(snapshot.switches, key=lambda s: (-s.level, s.name))
        ],
        "nodes": [rows.node(n) for n in snapshot.nodes if n.gpus],
        "jobs": [rows.spread(j) for j in sorted(shown, key=lambda j: order(j.display_id))],
    }


def network_problems(view: View) -> list[str]:
    """Return the faults of Slurm's topology and of `[topology]`, a line each."""
    snapshot = view.snapshot
    if not snapshot.nodes:  # before the first round
        return []
    return [*problems(snapshot.switches), *Fabric.of(snapshot, view.topology).problems]


class _LinkRows:
    """Rows about jobs and links, as one viewer may see them."""

    def __init__(
        self,
        view: View,
        viewer: Viewer,
        fabric: Fabric,
        tree: Topology,
        places: Mapping[int, Allocation],
    ) -> None:
        self._rows, self._tree, self._fabric = JobRows(view, viewer), tree, fabric
        self._places = places
        self._shown = {j.job_id: j for j in viewer.jobs(view) if j.job_id in places}
        self._links = {job_id: tree.links(where) for job_id, where in places.items()}
        self._users = tree.users(places)
        self._on: dict[str, list[int]] = defaultdict(list)
        for job_id in sorted(self._shown):
            for name in places[job_id].nodes:
                self._on[name].append(job_id)

    def switch(self, name: str, parent: str, level: int) -> SwitchRow:
        """Return the row of a switch, with the jobs that cross its link upwards."""
        link = f"{_SWITCH}{name}"
        return {
            "name": name,
            "parent": parent,
            "level": level,
            "link_speed": self._tree.link_speed(link),
            **self._link(link),
        }

    def node(self, node: Node) -> NodeRow:
        """Return the row of a node, with the jobs that hold its GPUs."""
        rack = self._tree.rack_of(node.name)
        return {
            "name": node.name,
            "switch": "" if rack == f"({node.name})" else rack,
            "gpu_type": node.gpu_type,
            "gpus": node.gpus,
            "used": node.used_gpus,
            "idle": node.free_gpus,
            "available": node.available,
            "asleep": node.asleep,
            "state": node.state,
            "domains": [list(d) for d in self._fabric.domains(node.name)],
            "holders": [self._holder(self._shown[i], node.name) for i in self._on[node.name]],
            **self._link(node.name),
        }

    def spread(self, job: Job) -> SpreadRow:
        """Return how far apart a job's GPUs are, and which of its links are shared."""
        where = self._places[job.job_id]
        nodes, racks = self._tree.spread(where)
        shared = [link for link in self._links[job.job_id] if len(self._users[link]) > 1]
        return {
            "job_id": job.job_id,
            "display_id": job.display_id,
            "name": job.name,
            "user": job.user,
            "elastic": job.elastic,
            "gpus": where.gpus,
            "gpu_type": where.gpu_type,
            "where": self._rows.places(where.nodes),
            "tier": self._tier(job, where),
            "node_count": nodes,
            "rack_count": racks,
            "shared": shared,
        }

    def _tier(self, job: Job, where: Allocation) -> str:
        linked = False
        if len(where.nodes) == 1:
            (node,) = where.nodes
            held = job.indexes.get(node, ())
            linked = len(held) == where.gpus and self._fabric.in_one_domain(node, held)
        return self._tree.tier(where, linked=linked).name.lower()

    def _holder(self, job: Job, node: str) -> HolderRow:
        held = job.indexes.get(node)
        return {
            "job_id": job.job_id,
            "display_id": job.display_id,
            "elastic": job.elastic,
            "gpus": self._places[job.job_id].on(node),
            "devices": list(held) if held is not None else None,
        }

    def _link(self, link: str) -> LinkRow:
        users = self._users.get(link, ())
        seen = [self._shown[i].display_id for i in users if i in self._shown]
        return {
            "link": link,
            "gbit_s": self._fabric.gbit_s(link),
            "users": seen,
            "others": len(users) - len(seen),
        }


def _present(where: Allocation, nodes: Mapping[str, Node]) -> bool:
    """Return nodes that Slurm still lists: one may have left slurm.conf before its job ended."""
    return all(n in nodes for n in where.nodes)
