"""Keeps the present view of the cluster, in the background, and the controller's stated reasons.

The reasons are shown to the audience and play no part in the verdict.
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

from contrib.demo.cluster import Cluster
from contrib.demo.errors import DemoError
from contrib.demo.view import END, WATCH, View, parse

_LOG = "/var/log/selastic/selasticd.log"
_REASONS = f"tail -n 0 -F {_LOG} 2>/dev/null | grep --line-buffered ' Action=.* Reason='"
_DECIDED = re.compile(r"JobId=(\S+) Action=(\w+) From=(\d+) To=(.+?) Reason=(.+)$")
#: After so long without a view something is wrong with the cluster.
_BLIND_S = 60.0


class Watch:
    """Eyes on one cluster, from `with` to its end.

    Attributes:
        view: the newest.
        placements: the last GPUs seen of each run, by (job, run), then by node.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.view = View()
        self.placements: dict[tuple[str, int], Mapping[str, tuple[int, ...]]] = {}
        self._cluster = cluster
        self._news = threading.Condition()
        self._decisions: list[tuple[int, str]] = []
        self._streams: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Watch:
        for script, read in ((WATCH, self._read_views), (_REASONS, self._read_reasons)):
            stream = self._cluster.stream(script)
            self._streams.append(stream)
            threading.Thread(target=read, args=(stream,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(stream.pid, signal.SIGTERM)
            stream.wait()

    def next(self) -> View:
        """The next view.

        Raises:
            DemoError: none came for a minute.
        """
        with self._news:
            seen = self.view.time
            if not self._news.wait_for(lambda: self.view.time > seen, timeout=_BLIND_S):
                raise DemoError(f"squeue has not answered for {_BLIND_S:.0f} s")
            return self.view

    def decisions(self) -> list[str]:
        """What the controller has decided since the last call, in its words."""
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
                    self._remember(view)
                    self._news.notify_all()

    def _remember(self, view: View) -> None:
        for job in view.jobs.values():
            if job.gpus:
                self.placements[job.name, job.run] = job.gpus

    def _read_reasons(self, stream: subprocess.Popen[bytes]) -> None:
        assert stream.stdout is not None
        for raw in stream.stdout:
            decision = decided(raw.decode(errors="replace").rstrip())
            if decision:
                with self._news:
                    self._decisions.append(decision)


def decided(line: str) -> tuple[int, str] | None:
    """Job id and words of a log line that tells of a decision.

    >>> decided("… JobId=7 Action=grow From=4 To='8 a100 on g[01-02]' Reason='8 is its MAX'")
    (7, 'grows from 4 to 8 a100 on g[01-02]: 8 is its MAX')
    """
    match = _DECIDED.search(line)
    if not match:
        return None
    job_id, action, held, target, reason = match.groups()
    where = _text(target)
    words = {
        "start": f"starts with {where}",
        "grow": f"grows from {held} to {where}",
        "shrink": f"shrinks from {held} to {where}",
        "move": f"moves to {where}",
        "preempt": "lets go of everything and waits",
    }
    if action not in words or not job_id.isdecimal():
        return None
    return int(job_id), f"{words[action]}: {_text(reason)}"


def _text(literal: str) -> str:
    try:
        return str(ast.literal_eval(literal))
    except (ValueError, SyntaxError):
        return literal


def clock(seconds: float) -> str:
    """Minutes and seconds since the beginning.

    >>> clock(83.4)
    '1:23'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
