"""Properties of the leader lease: never two controllers that may write, whatever is delayed.

Each call to slurmctld is three moments: begun, carried out, answered. Anything may
happen between two of them, for any time. slurmctld dies now and then, and what it took in its
last five seconds is gone; not again before `takeover_s` is over, which is what the rules assume.
"""

import copy
import heapq
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.controller.leader.leader_lease import (
    LeaseClaim,
    LeaseMark,
    LeaseObservation,
    Tenure,
    comment_of,
    newest,
)

T = 30.0
_FORGETS_S = 5.0


@dataclass
class Slurmctld:
    """Leases by name, as they were at each change."""

    leases: dict[str, str] = field(default_factory=dict)
    past: list[tuple[float, dict[str, str]]] = field(default_factory=list)
    died: float = float("-inf")

    def write(self, now: float) -> None:
        self.past.append((now, copy.copy(self.leases)))

    def die(self, now: float, forgets_s: float) -> None:
        if now - self.died < T:
            return
        self.died = now
        kept = [(at, leases) for at, leases in self.past if at <= now - forgets_s]
        self.leases = copy.copy(kept[-1][1]) if kept else {}
        self.past = [*kept, (now, copy.copy(self.leases))]

    def newest(self) -> LeaseMark | None:
        return newest(LeaseMark(*one) for one in self.leases.items())


class Process:
    """One controller's steps, as `LeaderElection` takes them."""

    def __init__(self, number: int, slurm: Slurmctld) -> None:
        self.id, self.slurm, self.beat = f"{number}", slurm, 0
        self.tenure: Tenure | None = None
        self.life = self.lives()
        next(self.life)

    def step(self, now: float) -> None:
        self.life.send(now)

    def may_write(self, now: float) -> bool:
        return self.tenure is not None and self.tenure.left(now) > 0

    def comment(self, *, free: bool = False) -> str:
        self.beat += 1
        return comment_of(holder=f"h{self.id}:1", id_=self.id, beat=self.beat, free=free)

    def renew(self, name: str, comment: str, now: float) -> bool:
        known = name in self.slurm.leases
        if known:
            self.slurm.leases[name] = comment
            self.slurm.write(now)
        return known

    def lives(self):
        now = yield
        while True:
            claim = yield from self.stands_by(now)
            now = yield
            self.tenure = claim.tenure
            yield from self.holds(claim)
            self.tenure = None
            now = yield

    def stands_by(self, now: float):
        watch, claim = LeaseObservation(T), None
        while True:
            began = now
            now = yield
            seen = self.slurm.newest()
            now = yield
            if claim is None:
                if not watch.look(seen, began=began, ended=now):
                    continue
                name = f"selastic_active_{seen.generation + 1 if seen else 1}"
                began = now
                now = yield
                made = name not in self.slurm.leases
                if made:
                    self.slurm.leases[name] = self.comment()
                    self.slurm.write(now)
                now = yield
                watch = LeaseObservation(T)
                claim = LeaseClaim(name, self.id, Tenure(T, began), made=now) if made else None
                continue
            looked, began = began, now
            now = yield
            known = claim.stands(seen) and self.renew(claim.name, self.comment(), now)
            now = yield
            if known:
                claim.tenure.renewed(began, now)
            if not claim.stands(seen) or not claim.tenure.left(now):
                watch, claim = LeaseObservation(T), None
            elif claim.lasts(looked):
                return claim

    def holds(self, claim: LeaseClaim):
        while True:
            began = yield
            if not claim.tenure.left(began):
                return
            now = yield
            known = self.renew(claim.name, self.comment(), now)
            now = yield
            if not known:
                claim.tenure.end()
            if not claim.tenure.renewed(began, now):
                return


def delay(lot: Random) -> float:
    """Draw the seconds to a process's next step: mostly a call or a wait, sometimes a pause."""
    kind = lot.random()
    if kind < 0.55:
        return lot.uniform(0.0, 0.3)
    if kind < 0.93:
        return lot.uniform(0.0, T / 10)
    return lot.uniform(0.0, 1.2 * T)


@given(st.integers(0, 2**32), st.floats(0.0, 0.03), st.integers(2, 3))
@settings(max_examples=150)
def test_never_two_that_may_write(seed, deaths, count):
    lot, slurm = Random(seed), Slurmctld()
    everyone = [Process(n, slurm) for n in range(count)]
    moments = [(delay(lot), n) for n in range(count)]
    for _ in range(600):
        now, number = heapq.heappop(moments)
        made = len(slurm.leases)
        everyone[number].step(now)
        assert sum(p.may_write(now) for p in everyone) <= 1
        if lot.random() < (0.3 if len(slurm.leases) > made else deaths):
            slurm.die(now, lot.uniform(0.0, _FORGETS_S))
        heapq.heappush(moments, (now + delay(lot), number))


def test_a_controller_becomes_active_and_another_after_it():
    slurm, now = Slurmctld(), 0.0
    everyone = [Process(n, slurm) for n in range(2)]
    while not any(p.may_write(now) for p in everyone):
        now += 0.5
        for one in everyone:
            one.step(now)
        assert now < 2 * T
    (first,) = [p for p in everyone if p.may_write(now)]
    (second,) = [p for p in everyone if p is not first]
    stopped = now
    while not second.may_write(now):
        now += 0.5
        second.step(now)
        assert now < stopped + 2 * T
    assert not first.may_write(now)
    for _ in range(20):
        now += 0.5
        first.step(now)
        second.step(now)
    assert second.may_write(now)
    assert not first.may_write(now)
