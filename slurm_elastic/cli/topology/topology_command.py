"""`selastic topology`: the network and the jobs on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurm_elastic.cli import client, formatting, options
from slurm_elastic.cli.exit_codes import USAGE, CliError
from slurm_elastic.cli.tables import Column, TableLayout, render
from slurm_elastic.core.nodelist import fold

if TYPE_CHECKING:
    from slurm_elastic.rpc.topology_answers import (
        LinkRow,
        NodeRow,
        SpreadRow,
        SwitchRow,
        TopologyAnswer,
    )

_COLUMNS = (
    Column("JOBID", lambda r: r["display_id"], right=True),
    Column("NAME", lambda r: r["name"], most=20),
    Column("USER", lambda r: r["user"], most=12),
    Column("GPUS", lambda r: str(r["gpus"]), right=True),
    Column("TYPE", lambda r: r["gpu_type"]),
    Column("TIER", lambda r: r["tier"]),
    Column("NODES", lambda r: str(r["node_count"]), right=True),
    Column("RACKS", lambda r: str(r["rack_count"]), right=True),
    Column("WHERE", lambda r: formatting.places(r["where"])),
    Column("SHARES", lambda r: r["shares"]),
)
_TIERS = (
    ("domain", "inside a GPU domain"),
    ("node", "inside a node"),
    ("rack", "inside a rack"),
    ("spine", "between racks"),
)
#: Note on a measured speed that does not count for all jobs.
_COUNTS = {"all": "", "own": "; counts for their own jobs only", "none": "; shown only"}
#: Most names that are listed; of more only the number is.
_MOST = 4


@options.verb
@click.option("-a", "--all", "all_", is_flag=True, help="Show rigid jobs in the table, too.")
@click.option("--plot", metavar="FILE", help="Draw the answer to a .png, .svg or .pdf file.")
@options.table
@options.as_json
def topology(
    *, all_: bool, plot: str | None, format_: str, noheader: bool, parsable: bool, json_: bool
) -> None:
    """Show the network, the jobs on it, and shared links.

    Of each elastic job it shows the highest tier that its communication crosses (link domain of
    GPUs, node, rack, spine). Link speeds are those of [topology] in elastic.toml, else measured.
    """
    layout = options.layout(format_, noheader, parsable)
    if plot is not None:
        _check(plot)
    answer: Any = client.ask("topology")
    if plot is not None:
        _draw(answer, plot)
    if json_:
        options.put_json(answer)
    else:
        options.put(lines(answer, layout, all_jobs=all_))


def _check(path: str) -> None:
    """Refuse impossible plots before the controller is asked."""
    from slurm_elastic.simulator import plots  # noqa: PLC0415 - slow to import

    try:
        plots.check(Path(path))
    except plots.PlotError as error:
        raise CliError(formatting.clean(error), USAGE) from None


def _draw(answer: TopologyAnswer, path: str) -> None:
    from slurm_elastic.cli.topology import topology_plot  # noqa: PLC0415 - slow to import
    from slurm_elastic.simulator import plots  # noqa: PLC0415

    try:
        topology_plot.draw(answer, Path(path))
    except plots.PlotError as error:
        raise CliError(formatting.clean(error), USAGE) from None


def lines(answer: TopologyAnswer, layout: TableLayout, *, all_jobs: bool = False) -> list[str]:
    """Return notes, speeds, the tree, and the table of jobs."""
    links = {row["link"]: row for row in (*answer["switches"], *answer["nodes"])}
    jobs = [{**j, "shares": shares(j, links)} for j in answer["jobs"] if j["elastic"] or all_jobs]
    table = render(jobs, _COLUMNS, [c.header for c in _COLUMNS], layout)
    if layout.parsable or not layout.header:
        return table
    out = [f"note: {formatting.clean(n)}" for n in answer["notes"]]
    speeds = [f"{text} {speed}" for tier, text in _TIERS if (speed := _tier_speed(answer, tier))]
    if speeds:
        out.append("LINKS   " + "   ".join(speeds))
    out += tree(answer)
    missing = "no jobs hold GPUs" if all_jobs else "no elastic jobs hold GPUs"
    return [*out, "", *(table if jobs else [missing])]


def tree(answer: TopologyAnswer) -> list[str]:
    """Return switches and nodes, indented; equal nodes are folded."""
    switches, nodes = answer["switches"], answer["nodes"]
    rack = answer["speeds"].get("rack")
    if not nodes:
        return ["no nodes with GPUs are known (yet)"]
    if not switches:
        return ["no switches: all nodes count as one rack", *_nodes(nodes, "  ", rack)]
    out = [
        line
        for top in switches
        if not top["parent"]
        for line in _switch(top, answer, frozenset(), rack)
    ]
    alone = [n for n in nodes if not n["switch"]]
    return out + (["(below no switch)", *_nodes(alone, "  ", rack)] if alone else [])


def shares(row: SpreadRow, links: Mapping[str, LinkRow]) -> str:
    """Return the links that a job shares: `rack1 with 4713 (50 Gbit/s each)`; equal ones once."""
    alike: dict[str, list[str]] = {}
    for name in row["shared"]:
        link = links.get(name)
        if link is None:  # of a node without GPUs
            continue
        users = [u for u in link["users"] if u != row["display_id"]]
        count = 1 + len(users) + link["others"]
        speed = link["gbit_s"]
        share_text = f" ({_speed(speed / count)} each)" if speed is not None else ""
        alike.setdefault(f"with {_users(users, link['others'])}{share_text}", []).append(
            _lower_end(link)
        )
    parts = [f"{fold(names)} {text}" for text, names in alike.items()]
    more = sum(len(names) for names in list(alike.values())[_MOST:])
    return ", ".join([*parts[:_MOST], *([f"and {more} more"] if more else [])])


def _switch(
    switch: SwitchRow, answer: TopologyAnswer, above: frozenset[str], rack: float | None
) -> Iterator[str]:
    """Yield a switch and the lines below it; `above` ends a loop in the tree."""
    name = switch["name"]
    indent = "  " * len(above)
    parts = [formatting.clean(name)]
    if switch["parent"]:
        if switch["gbit_s"] is not None:
            parts.append(f"up {_speed(switch['gbit_s'])}")
        elif switch["link_speed"] != 1:
            parts.append(f"LinkSpeed {switch['link_speed']}")
    if switch["users"] or switch["others"]:
        parts.append(f"crossed by {_users(switch['users'], switch['others'])}")
    yield indent + "   ".join(parts)
    below = above | {name}
    for child in answer["switches"]:
        if child["parent"] == name and child["name"] not in below:
            yield from _switch(child, answer, below, rack)
    yield from _nodes([n for n in answer["nodes"] if n["switch"] == name], indent + "  ", rack)


def _nodes(nodes: Sequence[NodeRow], indent: str, rack: float | None) -> list[str]:
    alike: dict[str, list[str]] = {}
    for node in nodes:
        alike.setdefault(_node(node, rack), []).append(node["name"])
    names = [formatting.clean(fold(n)) for n in alike.values()]
    width = max(map(len, names), default=0)
    return [f"{indent}{n.ljust(width)}  {text}" for n, text in zip(names, alike, strict=True)]


def _node(node: NodeRow, rack: float | None) -> str:
    parts = [formatting.gpus(node["gpus"], node["gpu_type"]) + _domains(node)]
    if node["gbit_s"] is not None and node["gbit_s"] != rack:
        parts.append(f"up {_speed(node['gbit_s'])}")
    held = [f"{formatting.clean(h['display_id'])}: {h['gpus']}" for h in node["holders"]]
    other_gpus = node["used"] - sum(h["gpus"] for h in node["holders"])
    if other_gpus > 0:
        held.append(f"others: {other_gpus}")
    if held:
        parts.append(", ".join(held))
    if node.get("asleep"):  # a controller of an older release sends none
        parts.append("boots" if "POWERING_UP" in node["state"] else "asleep")
    elif not node["available"]:
        parts.append(f"unavailable ({formatting.clean(node['state'])})")
    elif node["idle"]:
        parts.append(f"{node['idle']} idle")
    return "   ".join(parts)


def _domains(node: NodeRow) -> str:
    sizes = [len(d) for d in node["domains"]]
    if len(sizes) <= 1:
        return ""
    if len({*sizes}) == 1:
        return f" in {len(sizes)} domains of {sizes[0]}"
    return f" in domains of {', '.join(map(str, sizes))}"


def _users(users: Sequence[str], others: int) -> str:
    """Return job ids for a sentence: `4711, 4713 and 2 others`."""
    unnamed = others + len(users[_MOST:])
    shown = [formatting.clean(u) for u in users[:_MOST]]
    if not unnamed:
        return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))
    more = f"{unnamed} other{'s' if unnamed > 1 else ''}"
    return f"{', '.join(shown)} and {more}" if shown else more


def _tier_speed(answer: TopologyAnswer, tier: str) -> str:
    """Return the configured speed, else the measured one; "" if neither is known."""
    if tier in answer["speeds"]:
        return _speed(answer["speeds"][tier])
    measured = answer["measured"].get(tier)
    if measured is None:
        return ""
    count = f"{measured['jobs']} job{'s' if measured['jobs'] != 1 else ''}"
    owners = f"{measured['owners']} user{'s' if measured['owners'] != 1 else ''}"
    return (
        f"{_speed(measured['gbit_s'])} (measured by {count} of {owners}"
        f"{_COUNTS[measured['counts']]})"
    )


def _lower_end(link: LinkRow) -> str:
    """Return the name of the lower end of a link."""
    return formatting.clean(link["link"].removeprefix("switch:"))


def _speed(gbit_s: float) -> str:
    return f"{formatting.digits(gbit_s)} Gbit/s"
