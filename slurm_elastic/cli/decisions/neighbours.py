"""Line of `selastic explain` about jobs that stand on the nodes of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_elastic.cli.sentences.phrases import counted
from slurm_elastic.core.nodelist import fold

if TYPE_CHECKING:
    from slurm_elastic.rpc.decision_answers import ExplainAnswer, NeighbourRow

#: Name of the shared resource, by `NeighbourRow.resource`.
_RESOURCES = {
    "compute": "CPUs",
    "memory": "memory bandwidth",
    "network": "the network",
    "storage": "reading from storage",
}
#: The same where both jobs have halves of one GPU.
_RESOURCES_OF_GPU = {"compute": "the GPU", "memory": "the GPU's memory bandwidth"}
#: Less is not told from noise.
_LEAST = 0.005
#: Most neighbours that are named.
_MOST = 4


def sentence(answer: ExplainAnswer) -> str:
    """Return the effect of each neighbour: `shares node g01 with job 17: 12% slower, ...`."""
    rows = answer.get("neighbours") or []  # a controller of an older release sends none
    shown = [_of(row) for row in rows[:_MOST]]
    if len(rows) > _MOST:
        shown.append(f"shares nodes with {counted(len(rows) - _MOST, 'further job')}")
    return ". ".join(text if i == 0 else text[0].upper() + text[1:] for i, text in enumerate(shown))


def _of(row: NeighbourRow) -> str:
    nodes, owner = row["nodes"], f" of {row['user']}" if row["user"] else ""
    where = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {fold(nodes)}"
    if row.get("same_gpu"):
        where = f"a GPU on {where.partition(' ')[2]}"
    shares = f"shares {where} with job {row['display_id']}{owner}"
    if row["speed"] is None:
        return f"{shares}: what they do to each other is not known yet"
    source = f"measured {counted(row['measured'], 'time')}" if row["measured"] else "predicted"
    text = f"{shares}: {_slower(row['speed'])} ({source}, ±{row['error']:.0%})"
    if row["other_speed"] is not None:
        text += f"; job {row['display_id']} is {_slower(row['other_speed'])}"
    names = _RESOURCES_OF_GPU if row.get("same_gpu") else _RESOURCES
    resource = names.get(row.get("resource", ""))
    return f"{text}; they contend for {resource}" if resource else text


def _slower(speed: float) -> str:
    return f"{1 - speed:.0%} slower" if speed < 1 - _LEAST else "no slower"
