"""Picture of which job held which GPU when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from contrib.demo.cluster_watch import clock
from contrib.demo.gpu_blocks import Block, Placements, beginning, blocks, waits
from contrib.demo.gpu_rows import Rack, rows
from contrib.demo.sacct import Attempt, Change

_INK, _FAINT, _LINE, _NODE_LINE = "#1f1f1f", "#6e6e6e", "#ececec", "#bdbdbd"
_LEFT = 0.105
_LEGEND = (
    "One row per GPU.  Colour: alice's elastic jobs and how many GPUs they hold.  "
    "Grey: bob's rigid jobs.  White: idle.  Notch: checkpoint"
)
#: Parts of the picture's width: half a letter above the rows, a narrow block, one without text.
_HALF_LETTER, _NARROW, _TINY = 0.0043, 0.055, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Contents of the picture.

    Attributes:
        placements: GPUs of each run by node, by (job, run), as far as observed.
        saves: (job, epoch seconds) of checkpoints.
        elastic: names of the elastic jobs.
    """

    title: str
    racks: Sequence[Rack]
    attempts: Mapping[str, Sequence[Attempt]]
    changes: Sequence[Change]
    placements: Placements
    saves: Iterable[tuple[str, float]]
    colours: Mapping[str, str]
    elastic: Sequence[str]


def draw(content: Timeline, paths: Iterable[Path]) -> None:
    """Draw and save, in the formats of the paths' suffixes."""
    row = rows(content.racks)
    all_blocks = blocks(content.attempts, row, content.placements)
    last = max((block.end for block in all_blocks), default=1.0)
    style = {"font.size": 8.5, "font.family": "DejaVu Sans", "svg.hashsalt": "demo"}
    with plt.rc_context(style):
        figure, (axes, queue) = plt.subplots(
            2,
            1,
            figsize=(10.5, 6.7),
            sharex=True,
            gridspec_kw={"height_ratios": [max(1, len(row)), 3.2], "hspace": 0.03},
        )
        axes.set_xlim(0, last)
        _cluster(axes, content.racks)
        for block in all_blocks:
            _block(axes, block, content, last)
        _saves(axes, content, all_blocks, last)
        _changes(axes, content, last)
        _queue(queue, content, last)
        _clock(queue, last)
        figure.suptitle(content.title, x=0.012, y=0.985, ha="left", fontsize=13, weight="bold")
        figure.text(0.012, 0.932, _LEGEND, color=_FAINT)
        figure.subplots_adjust(left=_LEFT, right=0.985, top=0.835, bottom=0.075)
        for path in paths:
            figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else {})
        plt.close(figure)


def _cluster(axes: Axes, racks: Sequence[Rack]) -> None:
    """Draw rows, nodes and racks."""
    top = 0
    for rack in racks:
        rack_top = top
        for node in rack.nodes:
            for i in range(1, node.gpus):
                axes.axhline(top + i, color=_LINE, lw=0.5, zorder=0)
            _beside(axes, f"{node.name}  {node.gpu_type}", top + node.gpus / 2)
            top += node.gpus
            axes.axhline(top, color=_NODE_LINE, lw=0.7, zorder=0)
        _beside(axes, rack.name, (rack_top + top) / 2, -66, rotation=90, color=_FAINT)
        axes.axhline(top, color=_INK, lw=1.2, zorder=1, xmin=-0.1, clip_on=False)
    axes.set_ylim(top, 0)
    axes.set_yticks([])
    axes.tick_params(axis="x", length=0, labelbottom=False)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def _beside(
    axes: Axes, text: str, y: float, points: float = -6, *, rotation: float = 0, color: str = _INK
) -> None:
    """Write a word to the left of the rows."""
    axes.annotate(
        text,
        (0, y),
        (points, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        rotation=rotation,
        color=color,
    )


def _block(axes: Axes, block: Block, content: Timeline, last: float) -> None:
    height, width = block.bottom - block.top + 1, max(last / 300, block.end - block.start)
    gap = last / 1000
    elastic = block.name in content.elastic
    axes.add_patch(
        FancyBboxPatch(
            (block.start + gap, block.top + 0.07),
            width - 2 * gap,
            height - 0.14,
            boxstyle=f"round,pad=0,rounding_size={last / 400}",
            mutation_aspect=60 / last,
            facecolor=content.colours[block.name],
            edgecolor="none",
            zorder=2,
        )
    )
    if width < _TINY * last:
        return
    narrow = width < _NARROW * last
    axes.text(
        block.start + width / 2,
        block.top + height / 2,
        f"{block.name} · {block.gpus}" if elastic else block.name,
        ha="center",
        va="center",
        color="white" if elastic else _INK,
        weight="bold" if elastic else "normal",
        fontsize=7.5 if narrow or height == 1 else 8.5,
        rotation=90 if narrow and height > 2 else 0,
        zorder=4,
        clip_on=True,
    )


def _saves(axes: Axes, content: Timeline, all_blocks: Sequence[Block], last: float) -> None:
    """Mark each checkpoint on the uppermost row of its job."""
    zero, inset = beginning(content.attempts), last / 150
    for name, at in content.saves:
        for block in all_blocks:
            if block.name == name and block.first and block.start <= at - zero <= block.end + 1:
                x = min(max(at - zero, block.start + inset), block.end - inset)
                depth = 0.42 if block.bottom > block.top else 0.28
                axes.plot([x, x], [block.top + 0.07, block.top + depth], color="white", lw=1.6)


def _changes(axes: Axes, content: Timeline, last: float) -> None:
    """Label the changes of elastic jobs above the rows."""
    ends = [-last] * 3
    for x, name, verb in sorted(_labels(content)):
        half = _HALF_LETTER * last * (len(name) + len(verb) + 2)
        level = next((i for i, end in enumerate(ends) if x - half > end), len(ends) - 1)
        ends[level] = x + half
        top = -0.3 - 1.05 * level
        colour = content.colours[name]
        axes.plot([x, x], [top, 0], color=colour, lw=1.2, clip_on=False, zorder=6 - level)
        axes.text(
            x,
            top,
            f"{name} {verb}",
            color=colour,
            ha="center",
            va="bottom",
            weight="bold",
            zorder=7,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )


def _labels(content: Timeline) -> Iterator[tuple[float, str, str]]:
    """Yield (time, job, verb) of each label."""
    zero = beginning(content.attempts)
    verbs = {"grow": "grows", "shrink": "shrinks", "move": "moves", "preempt": "resumes"}
    for change in content.changes:
        if change.kind == "preempt" and change.before.end is not None:
            yield change.before.end - zero, change.name, "is preempted"
        if change.after.start is not None:
            verb = verbs.get(change.kind, "restarts") + (" in place" if change.in_place else "")
            yield change.after.start - zero, change.name, verb


def _queue(axes: Axes, content: Timeline, last: float) -> None:
    """Draw the waits below the rows."""
    lanes: list[float] = []
    for wait in waits(content.attempts):
        if wait.end - wait.start < 1:
            continue
        lane = next((i for i, free in enumerate(lanes) if free <= wait.start), len(lanes))
        lanes[lane : lane + 1] = [wait.end]
        colour = content.colours[wait.name]
        axes.barh(
            lane + 0.5,
            wait.end - wait.start,
            left=wait.start,
            height=0.7,
            facecolor="none",
            edgecolor=colour if wait.name in content.elastic else "#a0a0a0",
            hatch="//////",
            lw=0.9,
        )
        if wait.end - wait.start > _NARROW * last:
            axes.text(
                (wait.start + wait.end) / 2,
                lane + 0.5,
                wait.name,
                ha="center",
                va="center",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
            )
    count = max(3, len(lanes))
    axes.set_ylim(count, 0)
    axes.set_yticks([])
    _beside(axes, "waiting", count / 2, color=_FAINT)


def _clock(axes: Axes, last: float) -> None:
    """Draw minutes and seconds along the bottom."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    step = 10 if last < 180 else 30
    at = range(0, int(last) + 1, step)
    axes.set_xticks(list(at), [clock(t) for t in at])
    axes.tick_params(axis="x", length=3)
    axes.set_xlabel("minutes since the first submission", color=_FAINT)
