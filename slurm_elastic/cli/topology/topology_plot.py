"""Plot of `selastic topology --plot`: racks as columns, nodes as boxes of GPUs, links above.

GPUs have the colour of their job. The width of a link grows with the jobs that cross it; its speed
is beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_elastic.cli.formatting import clean, digits, gpus
from slurm_elastic.simulator import plots

if TYPE_CHECKING:
    from slurm_elastic.rpc.topology_answers import NodeRow, SwitchRow, TopologyAnswer

_IDLE, _OTHERS, _DOWN, _LINE, _SHARED = "#ffffff", "#bbbbbb", "#eeeeee", "#888888", "#D55E00"
#: Hatches that distinguish jobs of the same colour.
_HATCHES = ("", "////", "....", "xxxx")
#: Nodes in a column of a rack; more nodes take further columns.
_HIGH = 32
#: Most jobs in the legend; most nodes with labels.
_NAMED, _LABELLED = 24, 300
#: Most jobs named beside a node; of more only the number is shown.
_MOST_JOBS = 2
#: Inches of a node's line, of a GPU, between link domains, of a letter, between racks.
_LINE_IN, _GPU_IN, _GAP_IN, _LETTER_IN, _RACK_IN = 0.3, 0.22, 0.1, 0.065, 0.3
_LEVEL_IN, _LARGEST_IN = 0.75, 60.0


@dataclass(frozen=True)
class _Rack:
    """Nodes below one lowest switch; lengths in inches, of a column: names, GPUs, jobs."""

    switch: str
    nodes: Sequence[NodeRow]
    x: float
    names: float
    gpus: float
    jobs: float

    @property
    def column(self) -> float:
        return self.names + self.gpus + self.jobs

    @property
    def width(self) -> float:
        return -(-len(self.nodes) // _HIGH) * self.column + _RACK_IN


def draw(answer: TopologyAnswer, path: Path) -> None:
    """Draw an answer to `topology`.

    Raises:
        PlotError: matplotlib is not installed, or the file cannot be written.
    """
    plt = plots.matplotlib()
    racks = list(_racks(answer))
    rows = max((min(_HIGH, len(r.nodes)) for r in racks), default=1)
    levels = 1 + max((s["level"] for s in answer["switches"]), default=-1)
    width = max(4.0, sum(r.width for r in racks))
    height = rows * _LINE_IN + levels * _LEVEL_IN
    scale = min(1.0, _LARGEST_IN / max(width, height))
    with plt.rc_context(plots.STYLE | {"axes.grid": False, "font.size": 8}):
        figure, axes = plt.subplots(
            figsize=((width + 3) * scale, (height + 0.8) * scale), layout="constrained"
        )
        axes.set_axis_off()
        axes.set_xlim(-0.1, width)
        axes.set_ylim(-rows * _LINE_IN - 0.1, levels * _LEVEL_IN + 0.2)
        colours = _colours(answer)
        _links(axes, answer, racks)
        squares: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for rack in racks:
            for i, node in enumerate(rack.nodes):
                column, row = divmod(i, _HIGH)
                corner = (rack.x + column * rack.column, -(row + 1) * _LINE_IN)
                _node(axes, node, corner, rack)
                for place, holder in _squares(node, corner[0] + rack.names):
                    look = _gpu_style(node, holder, colours)
                    squares.setdefault(look, []).append((place, corner[1]))
        _fill(axes, squares)
        _legend(axes, answer, colours)
        axes.set_title(_title(answer))
        plots.save(figure, path)
        plt.close(figure)


def _racks(answer: TopologyAnswer) -> Iterator[_Rack]:
    """Yield the racks in the tree's order, then the nodes below no switch."""
    below: dict[str, list[NodeRow]] = {}
    for node in answer["nodes"]:
        below.setdefault(node["switch"], []).append(node)
    labelled = len(answer["nodes"]) <= _LABELLED
    x = 0.0
    for name in [*_leaves(answer["switches"]), *sorted(below)]:
        nodes = below.pop(name, None)
        if nodes:
            names = max(len(n["name"]) for n in nodes) if labelled else 0
            jobs = max(len(_jobs(n)) for n in nodes) if labelled else 0
            gaps = max(max(0, len(n["domains"]) - 1) for n in nodes)
            gpus = max(n["gpus"] for n in nodes) * _GPU_IN + gaps * _GAP_IN
            rack = _Rack(name, nodes, x, names * _LETTER_IN + 0.1, gpus, jobs * _LETTER_IN + 0.1)
            yield rack
            x += rack.width


def _leaves(switches: Sequence[SwitchRow]) -> list[str]:
    """Return the names in depth-first order; each once, even if the tree has loops."""
    visited: dict[str, None] = {}

    def walk(name: str) -> None:
        if name not in visited:
            visited[name] = None
            for switch in switches:
                if switch["parent"] == name:
                    walk(switch["name"])

    for switch in switches:
        if not switch["parent"]:
            walk(switch["name"])
    return list(visited)


def _node(axes: Any, node: NodeRow, corner: tuple[float, float], rack: _Rack) -> None:
    """Draw the name of a node on the left of its GPUs, its jobs on the right."""
    x, y = corner[0], corner[1] + _GPU_IN / 2
    if rack.names > _LETTER_IN * 2:
        axes.text(x, y, clean(node["name"]), va="center", fontsize=7)
        jobs = _jobs(node) if node["available"] else "x"
        colour = "#444444" if node["available"] else _SHARED
        axes.text(x + rack.names + rack.gpus, y, jobs, va="center", fontsize=6, color=colour)


def _jobs(node: NodeRow) -> str:
    names = [clean(h["display_id"]) for h in node["holders"]]
    return ", ".join(names) if len(names) <= _MOST_JOBS else f"{len(names)} jobs"


def _squares(node: NodeRow, x: float) -> Iterator[tuple[float, int | None]]:
    """Yield the place of each GPU and the job that holds it."""
    holders = _holders(node)
    for place, gpu in enumerate(_order(node)):
        if place and _starts_domain(node, gpu):
            x += _GAP_IN
        yield x, holders[gpu]
        x += _GPU_IN


def _gpu_style(
    node: NodeRow, holder: int | None, colours: Mapping[int, tuple[str, str]]
) -> tuple[str, str]:
    """Return colour and hatch of a GPU."""
    if holder is None:
        return (_IDLE if node["available"] else _DOWN), ""
    return colours.get(holder, (_OTHERS, ""))


def _fill(axes: Any, squares: Mapping[tuple[str, str], Sequence[tuple[float, float]]]) -> None:
    """Draw all squares of one look at once; one by one takes seconds on large clusters."""
    from matplotlib.collections import PatchCollection  # noqa: PLC0415
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    side = _GPU_IN * 0.86
    for (colour, hatch), corners in squares.items():
        axes.add_collection(
            PatchCollection(
                [Rectangle(corner, side, side) for corner in corners],
                facecolor=colour, hatch=hatch, edgecolor="#555555", linewidth=0.5,
            )
        )  # fmt: skip


def _order(node: NodeRow) -> list[int]:
    """Return the indexes of the GPUs by link domain."""
    return [i for d in node["domains"] for i in d] or list(range(node["gpus"]))


def _starts_domain(node: NodeRow, gpu: int) -> bool:
    return any(d and d[0] == gpu for d in node["domains"])


def _holders(node: NodeRow) -> list[int | None]:
    """Return the job of each GPU: by Slurm's indexes if known, else from the left; -1: hidden."""
    holders: list[int | None] = [None] * node["gpus"]
    without_index: list[int] = []
    for holder in node["holders"]:
        exact = [i for i in holder["devices"] or () if 0 <= i < node["gpus"] and holders[i] is None]
        for i in exact:
            holders[i] = holder["job_id"]
        without_index += [holder["job_id"]] * (holder["gpus"] - len(exact))
    without_index += [-1] * (node["used"] - sum(h["gpus"] for h in node["holders"]))
    free = [i for i, job_id in enumerate(holders) if job_id is None]
    for i, job_id in zip(free, without_index, strict=False):
        holders[i] = job_id
    return holders


def _links(axes: Any, answer: TopologyAnswer, racks: Sequence[_Rack]) -> None:
    """Draw the switches, each above the middle of its children, and the links between them."""
    middles = {
        r.switch: r.x + r.names + r.gpus / 2 + (r.width - _RACK_IN - r.column) / 2 for r in racks
    }
    switches = {s["name"]: s for s in answer["switches"]}
    for switch in sorted(answer["switches"], key=lambda s: s["level"]):
        children = [middles[s["name"]] for s in switches.values() if s["parent"] == switch["name"]
                    and s["name"] in middles]  # fmt: skip
        if children:
            middles[switch["name"]] = (min(children) + max(children)) / 2
    for name, x in middles.items():
        child = switches.get(name)
        if child is None:
            continue
        y = child["level"] * _LEVEL_IN + 0.3
        parent = switches.get(child["parent"])
        if parent is not None and parent["name"] in middles:
            count = len(child["users"]) + child["others"]
            top = parent["level"] * _LEVEL_IN + 0.3
            axes.plot(
                (x, middles[parent["name"]]), (y, top), zorder=0,
                color=_SHARED if count > 1 else _LINE, linewidth=min(6.0, 1.0 + count),
            )  # fmt: skip
            label = _link_words(child, count)
            if label:
                middle = (x + middles[parent["name"]]) / 2
                axes.text(middle, (y + top) / 2, label, ha="center", va="center", fontsize=7,
                          bbox=_box("none"))  # fmt: skip
        axes.text(x, y, clean(name), ha="center", va="center", bbox=_box(_LINE))


def _box(edge: str) -> dict[str, object]:
    return {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": edge}


def _link_words(switch: SwitchRow, count: int) -> str:
    parts = [] if switch["gbit_s"] is None else [f"{digits(switch['gbit_s'])} Gbit/s"]
    if count:
        parts.append(f"{count} job{'s' if count > 1 else ''}")
    return ", ".join(parts)


def _colours(answer: TopologyAnswer) -> dict[int, tuple[str, str]]:
    """Return colour and hatch by job, elastic jobs first."""
    order = sorted(answer["jobs"], key=lambda j: not j["elastic"])
    colours = plots.COLOURS[:-1]  # grey is for hidden jobs
    many = len(colours)
    return {
        job["job_id"]: (colours[i % many], _HATCHES[i // many % len(_HATCHES)])
        for i, job in enumerate(order)
    }


def _legend(axes: Any, answer: TopologyAnswer, colours: Mapping[int, tuple[str, str]]) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415

    def patch(colour: str, hatch: str, label: str) -> Any:
        return Patch(facecolor=colour, hatch=hatch, edgecolor="#555555", linewidth=0.5, label=label)

    jobs = {j["job_id"]: j for j in answer["jobs"]}
    patches = []
    for job_id, (colour, hatch) in list(colours.items())[:_NAMED]:
        job = jobs[job_id]
        count = gpus(job["gpus"], job["gpu_type"])
        label = f"{clean(job['display_id'])} {clean(job['name'])[:20]}, {count}"
        patches.append(patch(colour, hatch, label + ("" if job["elastic"] else " (rigid)")))
    if len(colours) > _NAMED:
        patches.append(patch("white", "", f"and {len(colours) - _NAMED} more jobs"))
    if any(n["used"] > sum(h["gpus"] for h in n["holders"]) for n in answer["nodes"]):
        patches.append(patch(_OTHERS, "", "others"))
    patches.append(patch(_IDLE, "", "idle"))
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _title(answer: TopologyAnswer) -> str:
    total = sum(n["gpus"] for n in answer["nodes"])
    used = sum(n["used"] for n in answer["nodes"])
    return f"{len(answer['nodes'])} nodes, {total} GPUs, {used} in use"
