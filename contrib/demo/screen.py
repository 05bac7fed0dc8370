"""Live display: redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from contrib.demo.cluster_view import ClusterView, VisibleJob
from contrib.demo.cluster_watch import clock
from contrib.demo.events import held
from contrib.demo.gpu_rows import Rack

_EVENTS_SHOWN = 12
_HEAD = ("JOBID", "NAME", "USER", "DIRECTIVE", "STATE", "WHERE", "STEP", "RUNS")


class Screen:
    """Live display of the cluster, as a context.

    Args:
        racks: nodes of the cluster.
        colours: colour of each job.
        steps: total steps of each elastic job.
        start: epoch seconds that are shown as 0:00.
        console: output.
    """

    def __init__(
        self,
        *,
        racks: Sequence[Rack],
        colours: Mapping[str, str],
        steps: Mapping[str, int],
        start: float,
        console: Console,
    ) -> None:
        self._racks, self._colours, self._steps = racks, colours, steps
        self._start = start
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._events: list[Text] = []
        self._map = ""

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def log(self, text: str, view: ClusterView, *, style: str = "") -> None:
        """Show an event."""
        at = clock(max(0.0, view.time - self._start))
        line = Text.assemble((f"{at:>5}  ", "dim"), (text, style))
        if self._live:
            self._events.append(line)
        else:
            self._print(line.plain)

    def announce(self, text: str, view: ClusterView) -> None:
        """Show the beginning of a phase."""
        if not self._live and view.jobs:
            for line in self._table_lines(view):
                self._print(f"       {line}")
        self.log(f"» {text}", view, style="bold")

    def show(self, view: ClusterView) -> None:
        """Show the present state."""
        if self._live:
            self._live.update(self._picture(view), refresh=True)
            return
        line = self.map_line(view)
        if line != self._map:
            self._map = line
            self._print(f"       {line}")

    def map_line(self, view: ClusterView) -> str:
        """Return all GPUs as a letter each: `rack1 g01 gggg g02 EEEE …`; `.` is idle."""
        holders = _holders(view)
        parts = []
        for rack in self._racks:
            parts.append(rack.name)
            for node in rack.nodes:
                cells = [holders.get((node.name, i)) for i in range(node.gpus)]
                parts.append(f"{node.name} " + "".join(_letter(c) for c in cells))
        return "  ".join(parts)

    def _print(self, line: str) -> None:
        print(line, file=self._console.file)
        self._console.file.flush()

    def _picture(self, view: ClusterView) -> Group:
        """Return map, table, and as many of the last events as fit on the screen."""
        table = self._table(view)
        used_lines = len(self._racks) + table.row_count + 4
        room = max(3, min(_EVENTS_SHOWN, self._console.height - used_lines))
        return Group(self._map_grid(view), Text(), table, Text(), *self._events[-room:])

    def _map_grid(self, view: ClusterView) -> Text:
        holders = _holders(view)
        text = Text()
        for rack in self._racks:
            text.append(f"{rack.name:7}", "dim")
            for node in rack.nodes:
                text.append(f"{node.name} {node.gpu_type} ")
                for i in range(node.gpus):
                    job = holders.get((node.name, i))
                    if job is None:
                        text.append("· ", "dim")
                    else:
                        ink = "bold white" if job.directive else "black"
                        text.append(f"{job.name[:1]} ", f"{ink} on {self._colours[job.name]}")
                text.append("   ")
            text.append("\n")
        text.right_crop(1)
        return text

    def _table(self, view: ClusterView) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in _HEAD:
            right = name in ("JOBID", "STEP", "RUNS")
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
        for job in _listed(view):
            cells = self._cells(job)
            colour = self._colours[job.name] if job.directive else ""
            style = "dim" if job.ended else ""
            table.add_row(cells[0], Text(cells[1], f"bold {colour}"), *cells[2:], style=style)
        return table

    def _table_lines(self, view: ClusterView) -> list[str]:
        rows: list[tuple[str, ...]] = [_HEAD]
        rows += [self._cells(job) for job in _listed(view)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]

    def _cells(self, job: VisibleJob) -> tuple[str, ...]:
        where = held(job) if job.gpus else ""
        if job.state == "PENDING":
            where = f"waits ({job.reason})"
        total = self._steps.get(job.name)
        step = f"{job.step}/{total}" if total else "-"
        directive = job.directive or "rigid"
        state = job.state.lower()
        return (
            str(job.job_id),
            job.name,
            job.user,
            directive,
            state,
            where,
            step,
            str(job.run + 1),
        )


def console() -> Console:
    """Return a console that writes to stdout."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())


def _holders(view: ClusterView) -> dict[tuple[str, int], VisibleJob]:
    return {
        (node, i): job
        for job in view.jobs.values()
        for node, indices in job.gpus.items()
        for i in indices
    }


def _letter(job: VisibleJob | None) -> str:
    """Return the letter of a job in the map; capitals for elastic jobs."""
    if job is None:
        return "."
    return job.name[0].upper() if job.directive else job.name[0]


def _listed(view: ClusterView) -> list[VisibleJob]:
    """Return the jobs to list: elastic jobs first, without rigid jobs that have ended."""
    jobs = [j for j in view.jobs.values() if j.directive or not j.ended]
    return sorted(jobs, key=lambda j: (not j.directive, j.job_id))
