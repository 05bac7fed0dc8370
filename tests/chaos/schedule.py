"""Schedule of a campaign, drawn from one seed before it begins.

The same seed, minutes and `only` give the same schedule. Whom a fault hits depends on what runs
at that moment: `pick` chooses among those.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.script_histories import MANNERS


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        cards: how often it is in the deck that faults are drawn from.
        shortest, longest: seconds until it is undone.
        what: in words.
    """

    cards: int
    shortest: float
    longest: float
    what: str


#: Slurm gives a node up after SlurmdTimeout=15: `-lost` faults last longer, the others do not.
KINDS = {
    "selasticd-kill": Kind(3, 0.3, 12, "SIGKILL of selasticd"),
    "slurmctld-kill": Kind(2, 0.3, 8, "SIGKILL of slurmctld"),
    "slurmctld-stop": Kind(2, 3, 20, "SIGSTOP of slurmctld"),
    "slurmdbd-kill": Kind(1, 1, 20, "SIGKILL of slurmdbd"),
    "munged-kill": Kind(1, 1, 10, "SIGKILL of munged on slurmctld's host"),
    "node-munged-kill": Kind(1, 1, 10, "SIGKILL of munged on a node"),
    "slurmd-kill": Kind(2, 1, 8, "SIGKILL of slurmd"),
    "slurmd-lost": Kind(1, 30, 40, "SIGKILL of slurmd, for longer than SlurmdTimeout"),
    "rank-kill": Kind(2, 0, 0, "SIGKILL of a rank"),
    "esrun-kill": Kind(1, 0, 0, "SIGKILL of esrun"),
    "node-kill": Kind(2, 3, 40, "a node's container is killed, and started again"),
    "node-cut": Kind(1, 2, 10, "a node without its network"),
    "node-cut-lost": Kind(1, 30, 40, "a node without its network, for longer than SlurmdTimeout"),
    "ctld-cut": Kind(1, 2, 10, "slurmctld's and selasticd's host without its network"),
    "reports-slow": Kind(1, 10, 30, "reports and orders delayed by a proxy, seconds each way"),
    "reports-cut": Kind(1, 5, 25, "no report reaches selasticd"),
    "ledger-full": Kind(1, 5, 20, "no room on the ledger's disk"),
    "checkpoints-full": Kind(1, 5, 20, "no room on the checkpoints' disk"),
    "ledger-truncated": Kind(1, 0, 2, "SIGKILL of selasticd, its ledger truncated"),
    "ledger-deleted": Kind(1, 0, 3, "the ledger deleted, then SIGKILL of selasticd"),
    "clock-step": Kind(1, 5, 20, "selasticd's clock steps by minutes and back"),
    "orphan": Kind(1, 25, 35, "SIGKILL of selasticd, and of a node's container meanwhile"),
    "id-reuse": Kind(1, 0.5, 2, "jobs submitted just before SIGKILL of slurmctld, others after"),
    "user-cancel": Kind(1, 0, 0, "scancel by the owner"),
    "user-hold": Kind(1, 3, 12, "hold and release by the owner"),
    "admin-hold": Kind(1, 3, 12, "hold and release by an administrator"),
    "user-requeue": Kind(1, 0, 0, "requeue by the owner"),
    "admin-requeue": Kind(1, 0, 0, "requeue by an administrator"),
    "user-update": Kind(1, 0, 0, "update by the owner: start time, nice, time limit, name lists"),
    "drain": Kind(1, 5, 20, "a node drained and resumed by an administrator"),
    "companion-rank": Kind(1, 0, 0, "SIGKILL of a rank in a companion"),
    "companion-script": Kind(1, 0, 0, "SIGKILL of a companion's batch script"),
    "companion-cancel": Kind(1, 0, 0, "scancel of a companion by its owner"),
    "companion-node": Kind(1, 3, 40, "a companion's node is killed, and started again"),
    "companion-cut": Kind(1, 2, 40, "a companion's node without its network"),
    "companion-late": Kind(1, 0, 0, "a companion that Slurm is not to start within an hour"),
    "companion-refused": Kind(1, 10, 20, "no compute node may submit jobs"),
    "base-cancel": Kind(1, 0, 0, "scancel, by its owner, of a job with companions"),
    "base-esrun": Kind(1, 0, 0, "SIGKILL of esrun of a job with companions"),
    "selasticd-in-place": Kind(3, 0.3, 12, "SIGKILL of selasticd in a state of a change in place"),
    "selasticd-stop": Kind(1, 3, 30, "SIGSTOP of selasticd"),
    "selasticd-restart": Kind(1, 0.3, 5, "SIGTERM of selasticd, as before an upgrade"),
    "slurmd-stop": Kind(1, 3, 10, "SIGSTOP of slurmd"),
    "rank-stop": Kind(1, 5, 40, "SIGSTOP of a rank of a training"),
    "esrun-stop": Kind(1, 5, 40, "SIGSTOP of esrun"),
    "job-suspend": Kind(1, 5, 20, "suspend and resume by an administrator"),
    "user-keep": Kind(1, 3, 12, "selastic hold and release by the owner"),
    "maintenance": Kind(1, 10, 40, "a node reserved for maintenance while jobs run on it"),
    "reconfigure": Kind(1, 0, 0, "scontrol reconfigure"),
    "wrong-configuration": Kind(1, 3, 12, "selasticd reads a configuration with a mistake"),
}
#: Queue mode, and what becomes of the controller at the end.
_QUEUES = ("slurm", "controller")
#: Shares of the kinds of jobs, after the first five, which are one of each.
SHARES = {"train": 0.06, "light": 0.36, "script": 0.16, "sleep": 0.22, "rigid": 0.2}
_FIRST = ("train", "light", "script", "sleep", "rigid")
#: What users give elastic jobs by --nice: the controller must not lose it.
_NICE = (0, 7)
#: Steps of scripts, 0.2 s each: about a minute with its saves; half a minute for one that is
#: begun anew by each restart.
_STEPS = {"rename": 200, "place": 200, "folder": 160, "anew": 120}
_BETWEEN_S = 9.0
#: Mean seconds between two jobs; where nodes may sleep there are fewer, so that some are idle.
_ARRIVALS_S, _SPARSE_ARRIVALS_S = 8.0, 30.0
_WARM_UP_S = 15.0


@dataclass(frozen=True)
class Event:
    """A scheduled fault. `at`: seconds from the start; `pick`, `size`: in [0, 1)."""

    at: float
    kind: str
    outage_s: float
    pick: float
    size: float


@dataclass(frozen=True)
class Layout:
    """Layout of a training.

    Attributes:
        directive: what its directive says besides the sizes.
        pairs: it needs GPUs in pairs.
    """

    directive: str = ""
    pairs: bool = False


#: By name; all but the first: drivers/layouts.py.
LAYOUTS = {
    "replicas": Layout(),
    "slices": Layout(),
    "stages": Layout(",unit=2,parallel=hybrid", pairs=True),
    "sliced-stages": Layout(",unit=2,parallel=hybrid", pairs=True),
    "spatial": Layout(",unit=2,parallel=spatial", pairs=True),
    "tensor": Layout(",unit=2", pairs=True),
    "plans": Layout(",parallel=hybrid,plan=auto"),
    "buckets": Layout(),
}


@dataclass(frozen=True)
class Submission:
    """A scheduled job.

    Attributes:
        kind: "train" (the library), "light" (tests/support/light_training, which changes in place,
            too), "script" (drivers/saver.py, with checkpoints of its own), "sleep" (reported by
            drivers/reporter.py), "rigid".
        name: unique in its campaign; reporter.py reads it.
        work: seconds of sleep, or steps of a script; trainings are all of one length.
        manner: of a script, how it saves: one of `script_histories.MANNERS`; of a training, its
            layout: one of `LAYOUTS`.
        nice: as in --nice.
    """

    at: float
    name: str
    kind: str
    user: str
    least: int
    most: int
    work: int
    manner: str = ""
    nice: int = 0


@dataclass(frozen=True)
class Schedule:
    """Schedule of a whole campaign."""

    seed: int
    minutes: float
    queue: str
    abandoned: bool  # the controller is killed at the end for good
    submissions: tuple[Submission, ...]
    events: tuple[Event, ...]
    sleep: bool = False  # idle nodes are switched off

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes of the cluster; where they may sleep, more than the jobs need at once."""
        return tuple(f"g{number:02d}" for number in range(1, 10 if self.sleep else 7))

    def lines(self) -> list[str]:
        """Return the schedule as text."""
        head = (
            f"seed {self.seed}, {self.minutes:g} min, queue = {self.queue!r}, "
            f"{len(self.submissions)} jobs, {len(self.events)} faults"
            + (", idle nodes sleep" if self.sleep else "")
            + (", the controller is killed at the end for good" if self.abandoned else "")
        )
        return [head, *(f"{e.at:7.1f} s  {e.kind:18} {e.outage_s:5.1f} s" for e in self.events)]


def schedule(
    seed: int,
    minutes: float,
    *,
    only: Collection[str] = (),
    manners: Collection[str] = (),
    layouts: Collection[str] = (),
    sleep: bool = False,
) -> Schedule:
    """Draw a campaign.

    Args:
        seed: seed of all random numbers.
        minutes: minutes with faults and submissions.
        only: kinds of fault; empty: all.
        manners: of unmodified scripts, which are then four of five jobs; empty: all manners, and
            the usual shares.
        layouts: of trainings, which are then half of the jobs; empty: all layouts, and the usual
            shares.
        sleep: idle nodes are switched off, and there are fewer jobs.

    Raises:
        ValueError: a kind, a manner or a layout is unknown.
    """
    for option, words, known in (
        ("only", only, KINDS),
        ("manner", manners, MANNERS),
        ("layout", layouts, LAYOUTS),
    ):
        unknown = sorted(set(words) - set(known))
        if unknown:
            raise ValueError(f"--{option} {unknown[0]}: expected one of {', '.join(known)}")
    end = minutes * 60
    faults, load = random.Random(f"faults {seed}"), random.Random(f"load {seed}")
    kinds = _kinds(faults, [k for k in KINDS if not only or k in only])
    events, at = [], min(_WARM_UP_S, end / 4)
    while (at := at + 0.4 * _BETWEEN_S + faults.expovariate(1 / (0.6 * _BETWEEN_S))) < end:
        kind = next(kinds)
        outage = faults.uniform(KINDS[kind].shortest, KINDS[kind].longest)
        events.append(Event(at, kind, outage, faults.random(), faults.random()))
    return Schedule(
        seed=seed,
        minutes=minutes,
        queue=_QUEUES[seed % 2],
        abandoned=seed % 3 == 0,
        submissions=tuple(
            _load(
                load,
                end,
                seed,
                manners=tuple(manners),
                layouts=tuple(layouts),
                between_s=_SPARSE_ARRIVALS_S if sleep else _ARRIVALS_S,
            )
        ),
        events=tuple(events),
        sleep=sleep,
    )


def _kinds(rng: random.Random, kinds: Collection[str]) -> Iterator[str]:
    """Yield kinds from shuffled decks: within one deck, of about five minutes, each kind occurs."""
    while True:
        deck = [kind for kind in kinds for _ in range(KINDS[kind].cards)]
        rng.shuffle(deck)
        yield from deck


def _load(
    rng: random.Random,
    end: float,
    seed: int,
    *,
    manners: Sequence[str],
    layouts: Sequence[str],
    between_s: float,
) -> list[Submission]:
    shares = {"script": 0.8, "sleep": 0.1, "rigid": 0.1} if manners else SHARES
    shares = {"train": 0.5, "sleep": 0.25, "rigid": 0.25} if layouts else shares
    manners, layouts = manners or MANNERS, layouts or tuple(LAYOUTS)
    submissions: list[Submission] = []
    at, scripts, trainings = 0.0, seed, seed
    while at < end:
        number = len(submissions)
        kind = _FIRST[number] if number < len(_FIRST) else ""
        kind = kind or rng.choices(tuple(shares), tuple(shares.values()))[0]
        least = rng.choice((1, 1, 2))
        most = {
            "train": least + 2,
            "light": least + rng.choice((2, 3, 4)),
            "script": least + 2,
            "sleep": rng.choice((4, 6, 8)),
            "rigid": least,
        }[kind]
        if kind == "rigid":
            least = most = rng.choice((1, 2, 4))
        prefix = {"train": "real", "light": "light", "rigid": "rigid"}.get(kind) or rng.choices(
            ("plain", "slow", "deaf"), (0.75, 0.15, 0.1)
        )[0]
        work, manner = rng.randint(20, 60), ""
        if kind == "script":
            manner = manners[scripts % len(manners)]
            scripts += 1
            prefix, work = f"script-{manner}", _STEPS[manner]
        elif kind == "train":
            manner = layouts[trainings % len(layouts)]
            trainings += 1
            prefix = "real" if manner == "replicas" else f"real-{manner}"
            if LAYOUTS[manner].pairs:
                least, most = 2, 4
        submissions.append(
            Submission(
                at=at,
                name=f"{prefix}-s{seed}n{number}",
                kind=kind,
                user=rng.choice(("alice", "bob")),
                least=least,
                most=most,
                work=work,
                manner=manner,
                nice=0 if kind == "rigid" else rng.choice(_NICE),
            )
        )
        at += rng.expovariate(1 / between_s) if number >= len(_FIRST) - 1 else 1.0
    return submissions
