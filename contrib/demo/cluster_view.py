"""State of the cluster at one instant: squeue, and the last lines of the jobs' own logs.

`WATCH_SCRIPT` prints it once a second, `parse` reads one of its frames. Nothing here comes from the
controller.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from contrib.demo.demo_cluster import SHARED_DIR
from contrib.demo.sacct import COMPANION
from slurm_elastic.core.nodelist import expand

#: Line that ends every frame.
END = "#end"
WATCH_SCRIPT = f"""\
cd {SHARED_DIR}
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
#: Slurm's states that are shown as another one.
_STATES = {"COMPLETING": "ENDING", "CONFIGURING": "RUNNING", "STAGE_OUT": "ENDING"}
_GRES = re.compile(r"^gpu:(?:([^:(]+):)?\d+\(IDX:([\d,-]*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleJob:
    """One job at one instant.

    Attributes:
        state: PENDING, RUNNING, ENDING, or the final state.
        run: number of restarts by Slurm.
        gpus: indices of its GPUs, by node, those of its companions included.
        directive: its directive, "" for a rigid job.
        reason: Slurm's reason why it waits.
        step: optimisation steps done.
        ranks: that computed the last step; 0: none in the present run, or not known.
        base: steps done before the present run, or by another number of ranks.
        since: epoch seconds since when it has been in this state of this run.
    """

    job_id: int
    name: str
    user: str
    state: str
    run: int = 0
    gpu_type: str = ""
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    directive: str = ""
    reason: str = ""
    step: int = 0
    ranks: int = 0
    base: int = 0
    since: float = 0.0

    @property
    def gpu_count(self) -> int:
        """Number of its GPUs."""
        return sum(len(indices) for indices in self.gpus.values())

    @property
    def steps_in_run(self) -> int:
        """Steps done in the present run by as many ranks as now."""
        return self.step - self.base

    @property
    def ended(self) -> bool:
        """Whether it will not run again."""
        return self.state not in ("PENDING", "RUNNING", "ENDING")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """State of the cluster; `saves` are (job, epoch seconds) of complete checkpoints."""

    time: float = 0.0
    jobs: Mapping[str, VisibleJob] = field(default_factory=dict)
    saves: frozenset[tuple[str, float]] = frozenset()


def parse(frame: str, last_view: ClusterView) -> ClusterView | None:
    """Parse one frame of WATCH_SCRIPT.

    Args:
        frame: its lines, without END.
        last_view: the view before it, from which `base` and `since` continue.

    Returns:
        None if squeue gave no answer.
    """
    parts = dict(_sections(frame))
    try:
        time = float(parts["time"])
        listed = json.loads(parts["jobs"])["jobs"]
    except (KeyError, ValueError):
        return None
    steps = dict(_steps(parts.get("steps", "")))
    jobs = {}
    for job in _with_companions([_job(entry, steps) for entry in listed]):
        jobs[job.name] = _with_history(job, last_view.jobs.get(job.name), time)
    return ClusterView(time=time, jobs=jobs, saves=last_view.saves | frozenset(_saves(parts)))


def _sections(frame: str) -> list[tuple[str, str]]:
    sections: list[tuple[str, str]] = []
    for part in re.split(r"^#", frame, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        name, _, value = head.partition(" ")
        sections.append((name, value or body))
    return sections


class _LastStep(NamedTuple):
    """Last line of a job's losses: the step, the ranks that computed it, the run of the job."""

    step: int = 0
    ranks: int = 0
    run: int = 0


def _steps(text: str) -> list[tuple[str, _LastStep]]:
    steps = []
    for line in text.splitlines():
        path, _, last = line.partition(" ")
        try:
            entry = json.loads(last)
            numbers = (entry["step"], entry.get("world", 0), entry.get("run", 0))
            steps.append((path.split("/")[0], _LastStep(*map(int, numbers))))
        except (ValueError, KeyError, TypeError):
            continue  # the job is writing this line
    return steps


def _saves(parts: Mapping[str, str]) -> list[tuple[str, float]]:
    rows = (line.rsplit(" ", 1) for line in parts.get("saves", "").splitlines())
    return [(path.split("/")[0], float(time)) for path, time in rows]


def _job(entry: Mapping[str, Any], steps: Mapping[str, _LastStep]) -> VisibleJob:
    words = [str(word) for word in entry["job_state"]]
    state = next((_STATES[w] for w in words if w in _STATES), words[0])
    gpu_type, gpus = _gpus(entry) if state == "RUNNING" else ("", {})
    last = steps.get(str(entry["name"]), _LastStep())
    return VisibleJob(
        job_id=int(entry["job_id"]),
        name=str(entry["name"]),
        user=str(entry["user_name"]),
        state=state,
        run=int(entry["restart_cnt"]),
        gpu_type=gpu_type,
        gpus=gpus,
        directive=_directive(str(entry.get("admin_comment", ""))),
        reason=str(entry.get("state_reason", "")),
        step=last.step,
        ranks=last.ranks if last.run == int(entry["restart_cnt"]) else 0,
    )


def _with_companions(jobs: list[VisibleJob]) -> list[VisibleJob]:
    """Return the jobs with the GPUs of their companions, these no longer beside them."""
    held: dict[str, list[VisibleJob]] = {}
    for job in jobs:
        if job.name.endswith(COMPANION):
            held.setdefault(job.name.removesuffix(COMPANION), []).append(job)
    result = []
    for job in jobs:
        if job.name.endswith(COMPANION):
            continue
        gpus = dict(job.gpus)
        for companion in held.get(job.name, ()) if job.state == "RUNNING" else ():
            for node, indices in companion.gpus.items():
                gpus[node] = tuple(sorted({*gpus.get(node, ()), *indices}))
        result.append(dataclasses.replace(job, gpus=gpus))
    return result


def _gpus(entry: Mapping[str, Any]) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Return GPU type and indices by node; Slurm lists them in the order of the nodes."""
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


def _with_history(job: VisibleJob, old: VisibleJob | None, time: float) -> VisibleJob:
    base, since = 0, time
    step = max(job.step, old.step if old else 0)
    if old:
        same_run = old.run == job.run
        same_ranks = not old.ranks or job.ranks in (0, old.ranks)
        base = old.base if same_run and same_ranks else step
        since = old.since if same_run and old.state == job.state else time
    return dataclasses.replace(job, step=step, base=base, since=since)
