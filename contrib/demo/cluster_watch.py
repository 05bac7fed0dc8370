"""Background threads that read the state of the cluster and the controller's decisions.

The decisions are displayed only; the checks do not use them.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Mapping

from contrib.demo.cluster_view import END, WATCH_SCRIPT, ClusterView, parse
from contrib.demo.demo_cluster import DemoCluster, DemoError
from slurm_elastic.cli.reason_text import sentence
from slurm_elastic.core.reason import Reason

_LOG = "/var/log/selastic/selasticd.log"
_REASONS = f"tail -n 0 -F {_LOG} 2>/dev/null | grep --line-buffered ' Action=.* Reason='"
_DECIDED = re.compile(r"JobId=(\S+) Action=(\w+) From=(\d+) To=(.+?) Reason=(.+)$")
#: Longest time without a view.
_TIMEOUT_S = 60.0


class ClusterWatch:
    """Observation of one cluster, as a context.

    Attributes:
        view: newest view.
        placements: last observed GPUs of each run, by (job, run), then by node.
    """

    def __init__(self, cluster: DemoCluster) -> None:
        self.view = ClusterView()
        self.placements: dict[tuple[str, int], Mapping[str, tuple[int, ...]]] = {}
        self._cluster = cluster
        self._news = threading.Condition()
        self._decisions: list[tuple[int, str]] = []
        self._streams: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> ClusterWatch:
        for script, read in ((WATCH_SCRIPT, self._read_views), (_REASONS, self._read_reasons)):
            stream = self._cluster.stream(script)
            self._streams.append(stream)
            threading.Thread(target=read, args=(stream,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(stream.pid, signal.SIGTERM)
            stream.wait()

    def next(self) -> ClusterView:
        """Wait for the next view and return it.

        Raises:
            DemoError: no view for a minute.
        """
        with self._news:
            last_time = self.view.time
            if not self._news.wait_for(lambda: self.view.time > last_time, timeout=_TIMEOUT_S):
                raise DemoError(f"squeue has not answered for {_TIMEOUT_S:.0f} s")
            return self.view

    def decisions(self) -> list[str]:
        """Return the controller's decisions since the last call, as sentences."""
        with self._news:
            taken, self._decisions = self._decisions, []
            names = {job.job_id: job.name for job in self.view.jobs.values()}
        return [f"{names.get(job_id, job_id)} {text}" for job_id, text in taken]

    def _read_views(self, stream: subprocess.Popen[bytes]) -> None:
        assert stream.stdout is not None
        lines: list[str] = []
        for raw in stream.stdout:
            line = raw.decode(errors="replace")
            if line.rstrip() != END:
                lines.append(line)
                continue
            view = parse("".join(lines), self.view)
            lines = []
            if view is not None:
                with self._news:
                    self.view = view
                    self._update_placements(view)
                    self._news.notify_all()

    def _update_placements(self, view: ClusterView) -> None:
        for job in view.jobs.values():
            if job.gpus:
                known = self.placements.get((job.name, job.run), {})
                self.placements[job.name, job.run] = {**known, **job.gpus}

    def _read_reasons(self, stream: subprocess.Popen[bytes]) -> None:
        assert stream.stdout is not None
        for raw in stream.stdout:
            decision = parse_decision(raw.decode(errors="replace").rstrip())
            if decision:
                with self._news:
                    self._decisions.append(decision)


def parse_decision(line: str) -> tuple[int, str] | None:
    """Return job id and sentence of a log line with a decision; None for other lines.

    >>> line = "… JobId=7 Action=grow From=4 To='8 a100 on g[01-02]' Reason=holds-max gpus=8"
    >>> parse_decision(line)
    (7, 'grows from 4 to 8 a100 on g[01-02]: 8 is its MAX')
    """
    match = _DECIDED.search(line)
    if not match:
        return None
    job_id, action, held, target, reason = match.groups()
    target_text = _text(target)
    sentences = {
        "start": f"starts with {target_text}",
        "grow": f"grows from {held} to {target_text}",
        "shrink": f"shrinks from {held} to {target_text}",
        "move": f"moves to {target_text}",
        "preempt": "releases its GPUs and waits",
    }
    if action not in sentences or not job_id.isdecimal():
        return None
    return int(job_id), f"{sentences[action]}: {_sentence(reason)}"


def _text(literal: str) -> str:
    try:
        return str(ast.literal_eval(literal))
    except (ValueError, SyntaxError):
        return literal


def _sentence(reason: str) -> str:
    try:
        return sentence(Reason.from_log(reason))
    except ValueError:
        return reason


def clock(seconds: float) -> str:
    """Return minutes and seconds since the beginning.

    >>> clock(83.4)
    '1:23'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
