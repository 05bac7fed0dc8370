"""Rules that must hold at all times, whatever has been killed. Pure: works on samples.

Rules whose repair takes time have a grace period, counted only while selasticd and slurmctld both
run and answer:

| rule | broken when |
|---|---|
| range | an elastic job with its companions is outside MIN-MAX, or a rigid one of another size |
| companion | a job's companion is still there long after the run to which it belongs |
| twice | two running jobs hold one GPU, or GPUs that run plus those promised exceed a node |
| held | a job is held, and not by the campaign |
| nice | an elastic job has lost what its user has given by --nice |
| pinned | a pending job stays bound to nodes, or any job to a reservation or a priority of ours |
| reservation | no job names one of ours for long, or it does not end by itself |
| rigid | a job without the directive has marks of selasticd |
| restarted | such a job was restarted without a fault |
| failed | an unmodified script ends as FAILED for good, and no fault has struck it |
| vanished | a job that had not ended is not known any more |
| asleep | a job waits for GPUs while a node that has as many is switched off and not started |
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.schedule import Submission

#: The priority of a job that selasticd is starting.
FIRST = 4_000_000_000
OURS = "selastic_"
#: Reservation that marks the active controller; it blocks no job.
LEASE = "selastic_active_"
#: Seconds within which selasticd must clear its marks: it gives up a start after 25 s, the way back
#: takes as long, and it pauses up to 15 s after slurmctld did not answer.
GRACE_S = 90.0
#: selasticd never holds a job: this allows only for a sample taken between two states.
HOLD_GRACE_S = 3.0
#: A crash of slurmctld gives GPUs back to a job that had left them: it takes 6 s to be sure.
PROMISE_GRACE_S = 12.0
#: Comment of a companion: `selastic:companion:BASE:RUN:CHANGE`.
COMPANION = "selastic:companion:"
#: Seconds in which a companion ends after its job: esrun may be dead, and slurmctld unable to say
#: so to the companion; then selasticd cancels it.
COMPANION_GRACE_S = 60.0
#: Longest that a reservation may reach ahead: lease_s = 60 in the campaign, rounded by Slurm.
AHEAD_S = 135.0
#: A job that slurmctld takes for a failed one, as it has forgotten a requeue, is sent back.
FAILED_GRACE_S = 20.0
#: ResumeTimeout of slurm.conf where nodes may sleep.
RESUME_TIMEOUT_S = 60
#: A pending job waits no longer than this because of sleeping nodes: a boot, and one round.
ASLEEP_GRACE_S = RESUME_TIMEOUT_S + 5.0
#: Reasons of jobs for which Slurm, or selasticd, looks for nodes.
_WAITING = ("None", "Resources", "Priority")
HELD = ("JobHeldUser", "JobHeldAdmin")
#: Comment of a job that the crash-loop guard holds; a user releases it.
GUARDED = "selastic: held, "
#: Description of a job that Slurm itself holds because its launch failed.
LAUNCH_FAILED = "launch failed requeued held"


@dataclass(frozen=True)
class Breach:
    """A broken rule: when (epoch s), which, on what, and how."""

    at: float
    rule: str
    who: str
    text: str


@dataclass
class Rules:
    """Check of one sample after the other.

    Args:
        jobs: submissions by name.
        gpus: GPUs of each node.
        excused: (rule, job name) → whether the campaign itself caused this.
    """

    jobs: Mapping[str, Submission]
    gpus: Mapping[str, int]
    excused: Callable[[str, str], bool] = lambda rule, name: False
    breaches: list[Breach] = field(default_factory=list)
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    _healthy_s: float = 0.0
    _last: float = 0.0
    _known: dict[str, dict[str, Any]] = field(default_factory=dict)
    _recorded: set[tuple[str, str]] = field(default_factory=set)

    def judge(self, sample: Mapping[str, Any], *, healthy: bool) -> None:
        """Look at one sample of drivers/observer.py; `healthy`: nothing of the controls is hit."""
        at = float(sample["at"])
        if healthy and sample["jobs"] is not None:
            self._healthy_s += min(3.0, at - self._last) if self._last else 0.0
        self._last = at
        if sample["jobs"] is None:
            return
        jobs = {j["name"]: j for j in sample["jobs"] if j["name"] in self.jobs}
        companions = [
            j for j in sample["jobs"] if j["comment"].startswith(COMPANION) and not j["ended"]
        ]
        wrong: dict[tuple[str, str], tuple[float, str]] = {}
        for name, job in jobs.items():
            own = [c for c in companions if base_of(c) == (job["id"], job["restarts"])]
            for rule, grace, text in self._job(self.jobs[name], job, own):
                if not self.excused(rule, name):
                    wrong[rule, name] = (grace, text)
        held = jobs | {f"{c['name']} {c['id']}": c for c in companions}
        for rule, who, grace, text in [
            *self._nodes(held),
            *self._reservations(sample, held),
            *self._orphans(jobs, companions),
            *self._asleep(sample, jobs),
        ]:
            wrong[rule, who] = (grace, text)
        for name, before in self._known.items():
            if name not in jobs and not before["ended"] and not self.excused("vanished", name):
                wrong["vanished", name] = (0.0, f"it was {before['state']}, id {before['id']}")
        self._known |= jobs
        self._since = {k: self._since.get(k, self._healthy_s) for k in wrong}
        for (rule, who), (grace, text) in wrong.items():
            if self._healthy_s - self._since[rule, who] >= grace:
                self._record(at, rule, who, text)

    def add(self, at: float, rule: str, who: str, text: str) -> None:
        """Add a breach that was found in another way."""
        self._record(at, rule, who, text)

    def _record(self, at: float, rule: str, who: str, text: str) -> None:
        if (rule, who) not in self._recorded:
            self._recorded.add((rule, who))
            self.breaches.append(Breach(at, rule, who, text))

    def _job(
        self, asked: Submission, job: Mapping[str, Any], companions: Collection[Mapping[str, Any]]
    ) -> Collection[tuple[str, float, str]]:
        broken: list[tuple[str, float, str]] = []
        if job["ended"]:
            earlier = self._known.get(job["name"])
            is_new = earlier is not None and earlier["state"] != "FAILED"
            fails = job["state"] == "FAILED" and (is_new or ("failed", job["name"]) in self._since)
            if asked.kind == "script" and fails:
                broken.append(("failed", FAILED_GRACE_S, f"after {job['restarts']} restarts"))
            return broken
        held = sum(map(len, job["held"].values()))
        held += sum(len(indices) for c in companions for indices in c["held"].values())
        if job["state"] == "RUNNING" and job["held"] and not asked.least <= held <= asked.most:
            broken.append(("range", 0.0, f"holds {held} GPUs, asked {asked.least}-{asked.most}"))
        if (
            job["state"] == "PENDING"
            and job["reason"] in HELD
            and LAUNCH_FAILED not in job["description"]
            and not job["comment"].startswith(GUARDED)
        ):
            broken.append(("held", HOLD_GRACE_S, f"{job['reason']} {job['description']}".strip()))
        marks = [
            f"reservation {job['reservation']}" if job["reservation"].startswith(OURS) else "",
            f"priority {job['priority']}" if job["priority"] >= FIRST else "",
        ]
        # A job that a lost node still holds is pending already, and cannot be changed.
        pending = job["state"] == "PENDING" and "COMPLETING" not in job["flags"]
        pinned = pending and job["required"]
        marks += [f"nodes {','.join(job['required'])}"] if pinned else []
        text = f"{job['state']}: " + ", ".join(m for m in marks if m)
        if any(marks):
            if asked.kind == "rigid":
                broken.append(("rigid", 0.0, text))
            else:
                broken.append(("pinned", GRACE_S, text))
        if asked.kind != "rigid" and job["nice"] != asked.nice:
            broken.append(("nice", GRACE_S, f"{job['nice']}, asked {asked.nice}"))
        if asked.kind == "rigid" and job["restarts"]:
            broken.append(("restarted", 0.0, f"{job['restarts']} times"))
        return broken

    def _nodes(
        self, seen: Mapping[str, Mapping[str, Any]]
    ) -> Collection[tuple[str, str, float, str]]:
        holders: dict[tuple[str, int], list[str]] = defaultdict(list)
        promised: dict[str, int] = defaultdict(int)
        for name, job in seen.items():
            for node, indices in job["held"].items():
                for index in indices:
                    holders[node, index].append(name)
                promised[node] += len(indices)
            start = job["state"] == "PENDING" and job["priority"] >= FIRST
            if start and len(job["required"]) == 1:
                promised[job["required"][0]] += job["asked"]
        broken = [
            ("twice", f"{node} GPU {index}", 0.0, " and ".join(names))
            for (node, index), names in holders.items()
            if len(names) > 1
        ]
        broken += [
            (
                "twice",
                node,
                PROMISE_GRACE_S,
                f"{count} GPUs are held or promised, it has {self.gpus[node]}",
            )
            for node, count in promised.items()
            if count > self.gpus[node]
        ]
        return broken

    @staticmethod
    def _orphans(
        jobs: Mapping[str, Mapping[str, Any]], companions: Collection[Mapping[str, Any]]
    ) -> Collection[tuple[str, str, float, str]]:
        running = {(j["id"], j["restarts"]) for j in jobs.values() if j["state"] == "RUNNING"}
        return [
            (
                "companion",
                f"{c['name']} {c['id']}",
                COMPANION_GRACE_S,
                f"{c['state']}: its job ended",
            )
            for c in companions
            # Of a lost node: Slurm completes it until it gives up, and nobody can end it before.
            if base_of(c) not in running and "COMPLETING" not in c["flags"]
        ]

    def _asleep(
        self, sample: Mapping[str, Any], jobs: Mapping[str, Mapping[str, Any]]
    ) -> Collection[tuple[str, str, float, str]]:
        sleeping = [n for n, words in (sample.get("nodes") or {}).items() if is_off(words)]
        broken = []
        for name, job in jobs.items():
            waits = job["state"] == "PENDING" and job["reason"] in _WAITING
            fits = [n for n in sleeping if self.gpus[n] >= job["asked"] > 0]
            fits = [n for n in fits if n not in job["excluded"]]
            if waits and fits and not job["required"]:
                broken.append(("asleep", name, ASLEEP_GRACE_S, f"{job['reason']}: {fits} sleep"))
        return broken

    @staticmethod
    def _reservations(
        sample: Mapping[str, Any], seen: Mapping[str, Mapping[str, Any]]
    ) -> Collection[tuple[str, str, float, str]]:
        named = {j["reservation"] for j in seen.values()}
        broken = []
        for name, end in sample["reservations"].items():
            if not name.startswith(OURS) or name.startswith(LEASE):
                continue
            if end - sample["at"] > AHEAD_S:
                broken.append(
                    ("reservation", name, 0.0, f"ends in {end - sample['at']:.0f} s only")
                )
            elif name not in named:
                broken.append(("reservation", name, GRACE_S, "no job names it"))
        return broken


def is_off(words: Collection[str]) -> bool:
    """Return whether a node of this state is switched off, and Slurm may start it."""
    return "POWERED_DOWN" in words and not {"POWERING_UP", "POWER_UP", "DRAIN", "DOWN"} & set(words)


def base_of(companion: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return id and run of the job to which a companion says that it belongs."""
    words = companion["comment"].split(":")
    return (int(words[2]), int(words[3])) if len(words) >= 4 and words[2].isdigit() else None


def overlaps(beats: Mapping[int, list[tuple[float, str]]]) -> list[tuple[int, int, str, float]]:
    """Return attempts of one job that ran at the same time.

    Args:
        beats: attempt → (epoch, host) that it wrote about every second.

    Returns:
        (earlier attempt, later one, host of the earlier, seconds that both were there), beats
        of one second apart not counted.
    """
    overlapping = []
    runs = sorted(run for run in beats if beats[run])
    for earlier, later in itertools.pairwise(runs):
        begun = min(at for at, _ in beats[later])
        last, host = max(beats[earlier])
        if last - begun > 1.5:
            overlapping.append((earlier, later, host, last - begun))
    return overlapping
