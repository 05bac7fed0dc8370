"""What can be seen of the cluster at one instant: squeue, and the ends of the jobs' own logs.

`WATCH` is the script that prints it once a second, `parse` reads one of its
frames. Nothing here comes from the controller.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from contrib.demo.cluster import STAGE
from slurm_elastic.core.nodelist import expand

#: Ends every frame.
END = "#end"
WATCH = f"""\
cd {STAGE}
while :; do
  echo "#time $EPOCHREALTIME"
  echo '#jobs'; squeue --json --states=all
  echo; echo '#steps'
  for log in */losses.jsonl; do [ -e "$log" ] && echo "$log $(tail -n 1 "$log")"; done
  echo '#saves'
  find . -maxdepth 3 \\( -path '*/checkpoints/step_*' -o -path '*/ckpt/*.pt' \\) -printf '%P %T@\\n'
  echo '{END}' || exit
  sleep 1
done
"""
#: Slurm's states that mean the same to an onlooker.
_STATES = {"COMPLETING": "ENDING", "CONFIGURING": "RUNNING", "STAGE_OUT": "ENDING"}
_GRES = re.compile(r"^gpu:(?:([^:(]+):)?\d+\(IDX:([\d,-]*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One job as it was seen.

    Attributes:
        state: PENDING, RUNNING, ENDING, or the final one.
        run: how often Slurm has restarted it.
        gpus: indices of its GPUs, by node.
        wants: its directive, "" for a rigid job.
        reason: why it waits, as Slurm says.
        step: optimisation steps done.
        base: of those, before the present run.
        since: epoch seconds since when it has been in this state of this run.
    """

    job_id: int
    name: str
    user: str
    state: str
    run: int = 0
    gpu_type: str = ""
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    wants: str = ""
    reason: str = ""
    step: int = 0
    base: int = 0
    since: float = 0.0

    @property
    def count(self) -> int:
        """GPUs it holds."""
        return sum(len(indices) for indices in self.gpus.values())

    @property
    def stepped(self) -> int:
        """Steps done in the present run."""
        return self.step - self.base

    @property
    def over(self) -> bool:
        """Whether it will never run again."""
        return self.state not in ("PENDING", "RUNNING", "ENDING")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything seen at one instant; `saves` are (job, epoch seconds) of complete checkpoints."""

    time: float = 0.0
    jobs: Mapping[str, Seen] = field(default_factory=dict)
    saves: frozenset[tuple[str, float]] = frozenset()


def parse(frame: str, before: View) -> View | None:
    """One frame of WATCH.

    Args:
        frame: its lines, without END.
        before: the view before it, for what has changed since when.

    Returns:
        None when squeue gave no answer this time.
    """
    parts = dict(_sections(frame))
    try:
        time = float(parts["time"])
        listed = json.loads(parts["jobs"])["jobs"]
    except (KeyError, ValueError):
        return None
    steps = dict(_steps(parts.get("steps", "")))
    jobs = {}
    for entry in listed:
        seen = _job(entry, steps)
        old = before.jobs.get(seen.name)
        jobs[seen.name] = _placed_in_time(seen, old, time)
    return View(time=time, jobs=jobs, saves=before.saves | frozenset(_saves(parts)))


def _sections(frame: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for part in re.split(r"^#", frame, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        name, _, value = head.partition(" ")
        found.append((name, value or body))
    return found


def _steps(text: str) -> list[tuple[str, int]]:
    found = []
    for line in text.splitlines():
        path, _, last = line.partition(" ")
        try:
            found.append((path.split("/")[0], int(json.loads(last)["step"])))
        except (ValueError, KeyError, TypeError):
            continue  # caught while it was being written
    return found


def _saves(parts: Mapping[str, str]) -> list[tuple[str, float]]:
    rows = (line.rsplit(" ", 1) for line in parts.get("saves", "").splitlines())
    return [(path.split("/")[0], float(time)) for path, time in rows]


def _job(entry: Mapping[str, Any], steps: Mapping[str, int]) -> Seen:
    words = [str(word) for word in entry["job_state"]]
    state = next((_STATES[w] for w in words if w in _STATES), words[0])
    gpu_type, gpus = _gpus(entry) if state == "RUNNING" else ("", {})
    return Seen(
        job_id=int(entry["job_id"]),
        name=str(entry["name"]),
        user=str(entry["user_name"]),
        state=state,
        run=int(entry["restart_cnt"]),
        gpu_type=gpu_type,
        gpus=gpus,
        wants=_directive(str(entry.get("admin_comment", ""))),
        reason=str(entry.get("state_reason", "")),
        step=steps.get(str(entry["name"]), 0),
    )


def _gpus(entry: Mapping[str, Any]) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Type and indices by node; Slurm lists them in the order of the nodes."""
    gpu_type, gpus = "", {}
    for node, text in zip(expand(str(entry["nodes"])), entry["gres_detail"], strict=False):
        match = _GRES.match(str(text))
        if match:
            gpu_type = match[1] or ""
            gpus[node] = tuple(int(i) for i in expand(f"[{match[2]}]"))
    return gpu_type, gpus


def _directive(admin_comment: str) -> str:
    try:
        return str(json.loads(admin_comment)["elastic"])
    except (ValueError, KeyError, TypeError):
        return ""


def _placed_in_time(seen: Seen, old: Seen | None, time: float) -> Seen:
    base, since = 0, time
    step = max(seen.step, old.step if old else 0)
    if old:
        same = old.run == seen.run
        base = old.base if same else step
        since = old.since if same and old.state == seen.state else time
    return Seen(
        **{name: getattr(seen, name) for name in Seen.__slots__}
        | {"step": step, "base": base, "since": since}
    )
